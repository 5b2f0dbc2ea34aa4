"""What comes after the guard: foreign keys to soft tables and unique rules are noticed at once and mended by guarding again."""

from collections.abc import Iterator

import psycopg
import pytest
from servers import Database
from task_world import POLICY, World, shop

from sqlguard.connection import connect
from sqlguard.errors import Refused
from sqlguard.postgres import event_trigger
from sqlguard.postgres.doctor import Finding, Severity, examine
from sqlguard.postgres.guard_table import guard_tables

ITEMS = """
[tables."public.items"]
select = true
insert = true
update = true
delete = "journal"
"""


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with shop(database) as made:
        made.apply()
        yield made


def found(world: World, code: str, thing: str | None = None) -> list[Finding]:
    return [f for f in examine(world.op, None).findings if f.code == code and thing in (None, f.object)]


def guard_again(world: World, finding: Finding) -> None:
    assert finding.command == "sqlguard guard public.orders"
    guard_tables(world.op, ["public.orders"])


def test_a_foreign_key_to_a_soft_table_that_came_after_the_guard(world: World) -> None:
    event_trigger.put_up(world.database.connect())
    said: list[str | None] = []
    world.op.add_notice_handler(lambda notice: said.append(notice.message_hint))
    world.op.execute("CREATE TABLE bills (id integer PRIMARY KEY, order_id integer REFERENCES orders)")
    assert said == ["run `sqlguard guard public.orders`"]
    world.database.load("UPDATE orders SET deleted_at = now(), deleted_by_agent = 'bot' WHERE id = 1")
    world.op.execute("INSERT INTO bills VALUES (1, 1)")
    (finding,) = found(world, "wall-missing", "public.bills")
    assert (finding.severity, finding.command) == (Severity.BROKEN, "sqlguard guard public.orders")
    guard_again(world, finding)
    assert found(world, "wall-missing") == found(world, "wall-function") == []
    with pytest.raises(psycopg.errors.ForeignKeyViolation):
        world.op.execute("INSERT INTO bills VALUES (2, 1)")

    # What stood behind the key says nothing without it, and goes with the next guard.
    world.op.execute(
        "ALTER TABLE bills DROP CONSTRAINT bills_order_id_fkey; INSERT INTO bills VALUES (3, 99)"
    )
    guard_tables(world.op, ["orders"])
    ours = "SELECT count(*) FROM pg_trigger WHERE tgrelid = 'bills'::regclass AND tgname LIKE 'sqlguard%'"
    assert world.value(ours) == 0


@pytest.mark.parametrize(
    "rule",
    ["CREATE UNIQUE INDEX late ON orders (note)", "ALTER TABLE orders ADD CONSTRAINT late UNIQUE (note)"],
)
def test_a_unique_rule_that_came_after_the_guard(world: World, rule: str) -> None:
    assert found(world, "unique-of-deleted") == []
    world.op.execute(rule)
    (finding,) = found(world, "unique-of-deleted", "public.orders")
    assert "late" in finding.message
    guard_again(world, finding)
    assert found(world, "unique-of-deleted") == []
    assert "deleted_at IS NULL" in world.value("SELECT pg_get_indexdef('late'::regclass)")
    world.database.load("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'late'::regclass")
    (finding,) = found(world, "unique-invalid", "public.orders")
    guard_again(world, finding)
    assert found(world, "unique-invalid") == []


def test_an_agent_can_t_refer_by_a_key_that_the_guard_does_not_know(world: World) -> None:
    world.apply(POLICY.split('[tables."public.items"]')[0] + ITEMS)
    insert = "INSERT INTO items (order_id, quantity) VALUES (%s, 1)"
    opened = world.task()
    with connect(world.database.dsn_for(opened.role, opened.password)) as agent:
        agent.execute("DELETE FROM orders WHERE id = 1")
        agent.execute(insert, [2])
        world.op.execute("ALTER TABLE items ADD FOREIGN KEY (order_id) REFERENCES orders")
        for order in (1, 2):
            with pytest.raises(Refused, match="newer than the guard") as caught:
                agent.execute(insert, [order])
            assert "sqlguard guard public.orders" in (caught.value.hint or "")
        with pytest.raises(Refused, match="newer than the guard"):
            agent.execute("UPDATE items SET order_id = 1 WHERE id = 2")
        agent.execute("UPDATE items SET quantity = 2 WHERE id = 2")
        guard_tables(world.op, ["public.orders"])
        agent.execute(insert, [2])
        with pytest.raises(psycopg.errors.ForeignKeyViolation):
            agent.execute(insert, [1])


def test_keys_of_partitions_are_known_by_what_they_refer_to(world: World) -> None:
    world.op.execute(
        "CREATE TABLE parts (id integer, at integer, order_id integer REFERENCES orders, PRIMARY KEY (id, at))"
        " PARTITION BY RANGE (at);"
        "CREATE TABLE whole (id integer PRIMARY KEY) PARTITION BY RANGE (id);"
        "CREATE TABLE whole_1 PARTITION OF whole FOR VALUES FROM (0) TO (99);"
        "ALTER TABLE items ADD whole_id integer REFERENCES whole;"
        "CREATE TABLE parts_1 (id integer NOT NULL, at integer NOT NULL, order_id integer CONSTRAINT other REFERENCES orders);"
        "ALTER TABLE parts ATTACH PARTITION parts_1 FOR VALUES FROM (0) TO (99)"
    )
    guard_tables(world.op, ["public.parts"], "journal")
    guard_tables(world.op, ["public.whole"], "soft")
    guard_tables(world.op, ["public.orders", "public.items"])
    more = '[tables."public.parts*"]\nselect = true\ninsert = true\n'
    world.apply(POLICY.split('[tables."public.items"]')[0] + ITEMS + more)
    world.database.load("INSERT INTO whole VALUES (1)")
    opened = world.task()
    with connect(world.database.dsn_for(opened.role, opened.password)) as agent:
        agent.execute("INSERT INTO items (order_id, whole_id, quantity) VALUES (2, 1, 1)")
        agent.execute("INSERT INTO parts (id, at, order_id) VALUES (1, 1, 2)")
        agent.execute("INSERT INTO parts_1 (id, at, order_id) VALUES (2, 2, 2)")
