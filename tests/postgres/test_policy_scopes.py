"""Row scopes of an applied policy: they hold whatever is asked, and go away without a trace."""

from collections.abc import Iterator

import pytest
from servers import Database
from task_world import World, agent, refused, shop

from sqlguard.errors import PolicyError
from sqlguard.postgres.guard_table import unguard_tables
from sqlguard.postgres.leases import has_grant_options

SCOPED = """
name = "scoped"
[tables."public.orders"]
select = true
insert = true
update = true
delete = "soft"
rows = "customer_id = :customer_id"
[tables."public.items"]
select = true
rows = "order_id IN (SELECT id FROM orders)"
[tables."public.customers"]
select = true
rows = "id = :customer_id"
"""


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with shop(database) as made:
        yield made


def test_a_row_scope_holds_for_every_kind_of_statement(world: World) -> None:
    world.apply(SCOPED)
    conn = agent(world, "scoped", customer_id="42")
    assert conn.execute("SELECT DISTINCT customer_id FROM orders").fetchall() == [(42,)]
    assert conn.execute("SELECT name FROM customers").fetchall() == [("Ada",)]
    assert conn.execute(
        "SELECT count(*) FROM items WHERE order_id NOT IN (SELECT id FROM orders)"
    ).fetchone() == (0,)
    assert conn.execute("SELECT count(*) FROM items").fetchone() == (40,)
    assert conn.execute("UPDATE orders SET note = 'mine' WHERE customer_id = 43").rowcount == 0
    assert conn.execute("UPDATE orders SET note = 'mine' WHERE id < 5").rowcount == 2
    assert refused(conn, "UPDATE orders SET customer_id = 43 WHERE id = 2") == "42501"
    assert refused(conn, "INSERT INTO orders (customer_id) VALUES (43)") == "42501"
    conn.execute("INSERT INTO orders (customer_id) VALUES (42)")
    conn.execute("SET search_path = pg_temp, public")
    conn.execute("SET SESSION CHARACTERISTICS AS TRANSACTION READ WRITE")
    assert conn.execute("SELECT count(*) FROM public.orders WHERE customer_id = 43").fetchone() == (0,)
    # Others go on seeing everything, whether or not they own the table.
    assert world.value("SELECT count(*) FROM orders") == 41
    world.database.execute("CREATE ROLE sg_app LOGIN PASSWORD 'x'")
    world.database.execute("GRANT SELECT ON orders TO sg_app")
    app = world.database.connect(world.database.dsn_for("sg_app", "x"))
    assert app.execute("SELECT count(*) FROM orders").fetchone() == (41,)


def test_a_scope_s_parameters_are_asked_for_and_checked(world: World) -> None:
    world.apply(SCOPED)
    with pytest.raises(PolicyError, match="scopes rows by `customer_id`"):
        world.task(policy="scoped")
    with pytest.raises(PolicyError, match="no value of type integer"):
        world.task(policy="scoped", params={"customer_id": "42; DROP TABLE orders"})
    assert world.value("SELECT count(*) FROM sqlguard.task") == 0


def test_a_scope_of_arrays_own_types_and_casts(world: World) -> None:
    world.op.execute("CREATE TYPE mood AS ENUM ('good', 'bad')")
    world.op.execute("ALTER TABLE orders ADD COLUMN mood mood DEFAULT 'good'")
    world.apply(
        'name = "typed"\n[tables."public.orders"]\nselect = true\n'
        "rows = \"mood = :mood AND customer_id = ANY(:ids) AND status <> ':no' AND id > :least::integer\""
    )
    conn = agent(world, "typed", mood="good", ids="{42,99}", least="10")
    assert conn.execute("SELECT DISTINCT customer_id FROM orders").fetchall() == [(42,)]
    assert conn.execute("SELECT min(id) FROM orders").fetchone() == (12,)
    assert world.value("SELECT scope_params FROM sqlguard.policy_table") == {
        "mood": "public.mood",
        "ids": "integer[]",
        "least": "integer",
    }


def test_a_scope_looks_its_parameter_up_once(world: World) -> None:
    world.apply(SCOPED)
    conn = agent(world, "scoped", customer_id="42")
    plan = "\n".join(r[0] for r in conn.execute("EXPLAIN (COSTS OFF) SELECT * FROM orders").fetchall())
    assert "InitPlan" in plan
    assert "task_parameter" not in plan.split("InitPlan")[0]


def test_a_scope_shows_nothing_once_the_task_is_over(world: World) -> None:
    world.apply(SCOPED)
    conn = agent(world, "scoped", customer_id="42")
    world.database.execute("UPDATE sqlguard.task SET expires_at = now() - interval '1 second'")
    assert conn.execute("SELECT count(*) FROM orders").fetchone() == (0,)


def test_row_level_security_goes_with_the_last_scope_and_only_if_it_came_with_one(world: World) -> None:
    def secured(table: str) -> tuple[bool, list[str]]:
        return (
            world.value("SELECT relrowsecurity FROM pg_class WHERE oid = to_regclass(%s)", table),
            [
                r[0]
                for r in world.database.execute(
                    "SELECT polname FROM pg_policy WHERE polrelid = to_regclass(%s) ORDER BY 1", [table]
                )
            ],
        )

    before = {table: secured(table) for table in ("orders", "items", "customers")}
    assert before["items"] == (False, [])
    world.apply(SCOPED)
    more = [] if has_grant_options(world.op) else ["sqlguard_unscoped"]
    assert secured("items") == (True, ["sg_rows_scoped_1", "sqlguard_everyone", *more])
    world.apply(SCOPED.replace("order_id IN", "true AND order_id IN"))
    assert secured("items") == (True, ["sg_rows_scoped_2", "sqlguard_everyone", *more])
    world.apply('name = "scoped"\n[tables."public.orders"]\nselect = true\n')
    assert {table: secured(table) for table in before} == before


def test_taking_a_guard_off_leaves_a_scoped_table_open_to_the_application(world: World) -> None:
    world.apply(SCOPED)
    unguard_tables(world.op, ["public.orders"])
    world.database.execute("CREATE ROLE sg_app LOGIN PASSWORD 'x'")
    world.database.execute("GRANT SELECT ON orders TO sg_app")
    app = world.database.connect(world.database.dsn_for("sg_app", "x"))
    assert app.execute("SELECT count(*) FROM orders").fetchone() == (40,)
    conn = agent(world, "scoped", customer_id="42")
    assert conn.execute("SELECT count(*) FROM orders").fetchone() == (20,)


def test_the_application_s_own_row_level_security_is_not_opened(world: World) -> None:
    world.op.execute("CREATE TABLE own (id integer, customer_id integer)")
    world.op.execute("INSERT INTO own VALUES (1, 42), (2, 42), (3, 43)")
    world.op.execute("ALTER TABLE own ENABLE ROW LEVEL SECURITY")
    world.op.execute("CREATE POLICY odd ON own USING (id % 2 = 1)")
    world.apply('name = "own"\n[tables."public.own"]\nselect = true\nrows = "customer_id = :customer_id"')
    assert agent(world, "own", customer_id="42").execute("SELECT id FROM own").fetchall() == [(1,)]
    world.apply('name = "own"\n[tables."public.own"]\nselect = true')
    assert world.value("SELECT relrowsecurity FROM pg_class WHERE relname = 'own'") is True


def test_views_and_partitions_are_no_way_round_a_scope(world: World) -> None:
    world.op.execute("CREATE VIEW plain AS SELECT * FROM orders")
    world.op.execute("CREATE VIEW over AS SELECT * FROM plain")
    world.op.execute("CREATE VIEW careful WITH (security_invoker = true) AS SELECT * FROM orders")
    world.op.execute("CREATE MATERIALIZED VIEW frozen AS SELECT * FROM orders")
    world.op.execute("CREATE TABLE events (id integer, customer_id integer) PARTITION BY LIST (customer_id)")
    world.op.execute("CREATE TABLE events_43 PARTITION OF events FOR VALUES IN (43)")
    world.op.execute("INSERT INTO events VALUES (1, 43)")
    world.op.execute("CREATE TABLE child () INHERITS (orders)")
    text = (
        'name = "scoped"\n[tables."public.*"]\nselect = true\n'
        '[tables."public.orders"]\nrows = "customer_id = :customer_id"\n'
        '[tables."public.events"]\nrows = "customer_id = :customer_id"\n'
    )
    done = world.apply(text)
    assert sum("without their row scope: not granted" in w for w in done.warnings) == 3
    conn = agent(world, "scoped", customer_id="42")
    for relation in ("plain", "over", "frozen", "events_43"):
        assert refused(conn, f"SELECT * FROM {relation}") == "42501"
    assert conn.execute("SELECT DISTINCT customer_id FROM careful").fetchall() == [(42,)]
    assert conn.execute("SELECT * FROM events").fetchall() == []
    world.op.execute("INSERT INTO child (id, customer_id) VALUES (900, 43), (901, 42)")
    assert conn.execute("SELECT id FROM child").fetchall() == [(901,)]
    with pytest.raises(PolicyError, match="without their row scope"):
        world.apply(text + '[tables."public.plain"]\nselect = true\n')
    world.apply(text + '[tables."public.events_43"]\nselect = true\n')
    assert agent(world, "scoped", customer_id="42").execute("SELECT * FROM events_43").fetchall() == []
