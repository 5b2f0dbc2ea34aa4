"""A purge removes tombstones for good, and never anything else."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from journaled import Agent, World, rows
from journaled import world as made_world
from servers import Database

from sqlguard.errors import NotUnderstood, Refused
from sqlguard.postgres import undo
from sqlguard.postgres.hold import hold, release
from sqlguard.postgres.purge import purge
from sqlguard.postgres.retention import read_holds

OLD = "2024-01-01"
CUTOFF = datetime(2025, 1, 1, tzinfo=UTC)
NOW = timedelta(0)
SCHEMA = """
    CREATE SCHEMA app;
    CREATE TABLE app.customer (id int PRIMARY KEY, name text);
    CREATE TABLE app.invoice (
        id int PRIMARY KEY, customer_id int REFERENCES app.customer ON DELETE CASCADE, amount int);
    CREATE TABLE app.line (id int PRIMARY KEY, invoice_id int REFERENCES app.invoice ON DELETE RESTRICT);
    INSERT INTO app.customer VALUES (1, 'ann'), (2, 'bob'), (3, 'cid');
    INSERT INTO app.invoice VALUES (10, 1, 100), (11, 1, 50), (12, 2, 70);
    INSERT INTO app.line VALUES (100, 10), (101, 12);
"""


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with made_world(database) as made:
        made.op.execute(SCHEMA)
        made.grant()
        made.guard("app.customer", "app.invoice", "app.line", mode="soft")
        made.task("t")
        yield made


def mark(world: World, table: str, where: str = "true", at: str = OLD) -> None:
    world.op.execute(f"UPDATE {table} SET deleted_at = '{at}', deleted_by_agent = 'bot' WHERE {where}")


def ids(world: World, table: str) -> list[int]:
    return [row[0] for row in rows(world.op, f"SELECT id FROM {table} ORDER BY id")]


def delete(world: World, agent: Agent, table: str, where: str) -> int:
    return world.act(
        agent,
        f"UPDATE {table} SET deleted_at = statement_timestamp(), deleted_by_agent = sqlguard.agent() WHERE {where}",
    )


def test_children_go_before_their_parents(world: World) -> None:
    mark(world, "app.line", "id = 100")
    mark(world, "app.invoice", "customer_id = 1")
    mark(world, "app.customer", "id = 1")
    report = purge(world.op, older_than=CUTOFF)
    assert {t.table: t.removed for t in report.tables} == {
        "app.customer": 1,
        "app.invoice": 2,
        "app.line": 1,
    }
    assert (ids(world, "app.customer"), ids(world, "app.invoice"), ids(world, "app.line")) == (
        [2, 3],
        [12],
        [101],
    )
    assert rows(world.op, "SELECT kind, scope ->> 'tables' IS NOT NULL FROM sqlguard.removal") == [
        ("purge", True)
    ]
    assert rows(world.op, "SELECT sum(rows) FROM sqlguard.removed") == [(4,)]
    again = purge(world.op, older_than=CUTOFF)
    assert (again.rows, again.purge) == (0, None)


def test_live_rows_that_refer_to_a_tombstone_stop_it_all(world: World) -> None:
    mark(world, "app.customer", "id IN (1, 3)")
    mark(world, "app.line", "id = 101")
    report = purge(world.op, older_than=CUTOFF)
    assert (report.stopped, report.rows) == (True, 0)
    (blocked,) = report.blocked
    assert (blocked.reason, blocked.table, blocked.by, blocked.rows, blocked.keys) == (
        "purge_live_reference",
        "app.customer",
        "app.invoice",
        1,
        [["1"]],
    )
    assert ids(world, "app.customer") == [1, 2, 3]
    assert ids(world, "app.line") == [100, 101]
    skipped = purge(world.op, older_than=CUTOFF, skip_blocked=True)
    assert (skipped.stopped, skipped.rows) == (False, 2)
    assert ids(world, "app.customer") == [1, 2]
    assert ids(world, "app.invoice") == [10, 11, 12]


def test_a_tombstone_waits_for_the_tombstones_that_refer_to_it(world: World) -> None:
    mark(world, "app.line")
    mark(world, "app.invoice", "id = 10", at=OLD)
    mark(world, "app.invoice", "id = 11", at="2025-06-01")
    mark(world, "app.customer", "id = 1")
    # The tables that refer to it were not asked for: nothing may cascade into them.
    alone = purge(world.op, ["app.customer"], older_than=CUTOFF)
    assert [(t.removed, t.left) for t in alone.tables] == [(0, 1)]
    report = purge(world.op, older_than=CUTOFF)
    left = {t.table: (t.removed, t.left) for t in report.tables}
    assert left == {"app.customer": (0, 1), "app.invoice": (1, 0), "app.line": (2, 0)}
    assert ids(world, "app.invoice") == [11, 12]
    assert purge(world.op, older_than=NOW).rows == 2


def test_a_dry_run_is_the_same_run_rolled_back(world: World) -> None:
    mark(world, "app.line")
    mark(world, "app.invoice", "customer_id = 1")
    mark(world, "app.customer", "id = 1")
    before = world.contents("app.customer", "app.invoice", "app.line", "sqlguard.removal", "sqlguard.removed")
    told = purge(world.op, older_than=CUTOFF, dry_run=True)
    assert (
        world.contents("app.customer", "app.invoice", "app.line", "sqlguard.removal", "sqlguard.removed")
        == before
    )
    done = purge(world.op, older_than=CUTOFF)
    assert (told.dry_run, told.purge) == (True, None)
    assert told.tables == done.tables


def test_batches_are_transactions_of_their_own(world: World) -> None:
    world.op.execute("INSERT INTO app.customer SELECT g, 'x' FROM generate_series(1000, 8999) g")
    mark(world, "app.customer", "id >= 1000")
    seen: list[tuple[int, int]] = []
    report = purge(
        world.op,
        ["app.customer"],
        older_than=CUTOFF,
        batch=700,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert report.rows == 8000
    assert (seen[-1], len(seen) >= 12) == ((8000, 8000), True)
    assert rows(world.op, "SELECT count(DISTINCT xmin::text), sum(rows) FROM sqlguard.removed") == [
        (len(seen), 8000)
    ]


def test_rows_that_somebody_has_locked_stay_for_the_next_time(world: World) -> None:
    mark(world, "app.customer", "id = 3")
    other = world.database.connect(world.database.owner_dsn, autocommit=False)
    other.execute("SELECT FROM app.customer WHERE id = 3 FOR UPDATE")
    report = purge(world.op, older_than=CUTOFF)
    assert [(t.removed, t.left) for t in report.tables if t.table == "app.customer"] == [(0, 1)]
    other.rollback()
    assert purge(world.op, older_than=CUTOFF).rows == 1


@pytest.mark.parametrize("action", ["NO ACTION", "RESTRICT", "CASCADE", "SET NULL"])
def test_rows_of_a_table_that_refer_to_one_another(world: World, action: str) -> None:
    world.op.execute(f"""
        CREATE TABLE app.node (id int PRIMARY KEY, up int REFERENCES app.node ON DELETE {action});
        INSERT INTO app.node SELECT g, nullif(g - 1, 0) FROM generate_series(1, 50) g;
        INSERT INTO app.node VALUES (100, NULL), (101, 100); UPDATE app.node SET up = 101 WHERE id = 100;
        INSERT INTO app.node VALUES (200, NULL), (201, 200); UPDATE app.node SET up = 201 WHERE id = 200;
        INSERT INTO app.node VALUES (300, 200);
    """)
    world.guard("app.node", mode="soft")
    mark(world, "app.node")
    mark(world, "app.node", "id = 300", at="2025-06-01")
    # 300 is too young, so the ring of 200 and 201 has to stay; the ring of 100 and the chain go.
    report = purge(world.op, ["app.node"], older_than=CUTOFF)
    assert [(t.removed, t.left) for t in report.tables] == [(52, 2)]
    assert rows(world.op, "SELECT id, up FROM app.node ORDER BY id") == [(200, 201), (201, 200), (300, 200)]


def test_tables_that_refer_to_one_another(world: World) -> None:
    world.op.execute("""
        CREATE TABLE app.a (id int PRIMARY KEY, b int);
        CREATE TABLE app.b (id int PRIMARY KEY, a int REFERENCES app.a);
        ALTER TABLE app.a ADD FOREIGN KEY (b) REFERENCES app.b;
        INSERT INTO app.a VALUES (1, NULL), (2, NULL); INSERT INTO app.b VALUES (1, 1), (2, 2);
        UPDATE app.a SET b = id;
    """)
    world.guard("app.a", "app.b", mode="soft")
    mark(world, "app.a", "id = 1")
    mark(world, "app.b", "id = 1")
    assert purge(world.op, ["app.a", "app.b"], older_than=CUTOFF).rows == 2
    assert (ids(world, "app.a"), ids(world, "app.b")) == ([2], [2])


def test_partitions_and_tables_without_a_key(world: World) -> None:
    world.op.execute("""
        CREATE TABLE app.part (id int, at date, PRIMARY KEY (id, at)) PARTITION BY RANGE (at);
        CREATE TABLE app.part_1 PARTITION OF app.part FOR VALUES FROM ('2024-01-01') TO ('2025-01-01');
        CREATE TABLE app.part_2 PARTITION OF app.part FOR VALUES FROM ('2025-01-01') TO ('2026-01-01');
        CREATE TABLE app.child (id int PRIMARY KEY, p int, at date, FOREIGN KEY (p, at) REFERENCES app.part);
        INSERT INTO app.part VALUES (1, '2024-02-02'), (1, '2025-02-02'), (2, '2025-02-02');
        INSERT INTO app.child VALUES (1, 2, '2025-02-02');
        CREATE TABLE app.keyless (a int); INSERT INTO app.keyless VALUES (1), (1), (2);
    """)
    world.guard("app.part", "app.keyless", mode="soft")
    mark(world, "app.part", "id = 1")
    mark(world, "app.keyless", "ctid = (SELECT min(ctid) FROM app.keyless WHERE a = 1)")
    assert purge(world.op, older_than=CUTOFF).rows == 3
    assert rows(world.op, "SELECT id FROM app.part") == [(2,)]
    assert rows(world.op, "SELECT a FROM app.keyless ORDER BY 1") == [(1,), (2,)]
    mark(world, "app.part")
    report = purge(world.op, older_than=CUTOFF)
    assert (report.stopped, report.blocked[0].by) == (True, "app.child")


def test_rows_that_row_level_security_hides_are_reached(world: World) -> None:
    world.op.execute("""
        ALTER TABLE app.customer FORCE ROW LEVEL SECURITY;
        CREATE POLICY mine ON app.customer AS RESTRICTIVE USING (name = 'bob');
        ALTER TABLE app.invoice ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
        CREATE POLICY none ON app.invoice AS RESTRICTIVE USING (false);
    """)
    root = world.database.connect()
    root.execute(f"UPDATE app.customer SET deleted_at = '{OLD}' WHERE id IN (1, 3)")
    # The live invoice that refers to customer 1 is hidden, and still it counts.
    report = purge(world.op, ["app.customer"], older_than=CUTOFF)
    assert (report.stopped, [b.rows for b in report.blocked]) == (True, [1])
    assert purge(world.op, ["app.customer"], older_than=CUTOFF, skip_blocked=True).rows == 1
    assert root.execute("SELECT id FROM app.customer ORDER BY 1").fetchall() == [(1,), (2,)]
    forced = root.execute("SELECT relforcerowsecurity FROM pg_class WHERE oid = 'app.customer'::regclass")
    assert forced.fetchone() == (True,)


def test_rows_on_hold_are_never_purged(world: World) -> None:
    mark(world, "app.line")
    mark(world, "app.invoice")
    mark(world, "app.customer")
    by_key, covered = hold(world.op, "app.customer", keys=("2",), reason="case 7")
    assert ([h.key for h in by_key], covered) == ([["2"]], 1)
    hold(world.op, "app.invoice", where="amount = 100 -- and more", reason="case 8")
    told = purge(world.op, older_than=CUTOFF, dry_run=True)
    report = purge(world.op, older_than=CUTOFF)
    assert told.tables == report.tables
    assert (ids(world, "app.customer"), ids(world, "app.invoice")) == ([1, 2], [10])
    left = {t.table: (t.removed, t.held, t.left) for t in report.tables}
    assert left == {"app.customer": (1, 1, 1), "app.invoice": (2, 1, 0), "app.line": (2, 0, 0)}
    assert len(read_holds(world.op)) == 2
    assert [h.reason for h in release(world.op, "app.invoice")] == ["case 8"]
    assert release(world.op, "app.invoice") == []
    assert purge(world.op, older_than=CUTOFF).rows == 2
    assert ids(world, "app.customer") == [2]
    hold(world.op, "app.customer", reason="all of it")
    release(world.op, hold_id=by_key[0].id)
    assert purge(world.op, older_than=CUTOFF).rows == 0
    release(world.op, "app.customer")
    assert purge(world.op, older_than=CUTOFF).rows == 1


@pytest.mark.parametrize(
    "condition", ["id = 1) OR (true", "true ORDER BY 1", "true; DROP TABLE app.line", "", "id = "]
)
def test_a_condition_is_one_expression(world: World, condition: str) -> None:
    with pytest.raises(NotUnderstood):
        hold(world.op, "app.customer", where=condition, reason="x")


def test_what_can_not_be_held(world: World) -> None:
    with pytest.raises(Refused, match="no such row"):
        hold(world.op, "app.customer", keys=("77",), reason="x")
    world.op.execute("CREATE TABLE app.plain (id int)")
    with pytest.raises(Refused, match="not guarded"):
        hold(world.op, "app.plain", reason="x")
    with pytest.raises(psycopg.errors.UndefinedColumn):
        hold(world.op, "app.customer", where="nonesuch = 1", reason="x")
    assert read_holds(world.op) == []


def test_an_undo_says_that_the_row_was_purged(world: World) -> None:
    agent = world.agents[0]
    changed = world.act(agent, "UPDATE app.customer SET name = 'new' WHERE id = 3")
    action = delete(world, agent, "app.customer", "id = 3")
    done = purge(world.op, older_than=NOW)
    assert done.rows == 1
    assert rows(world.op, "SELECT change_set_id IS NOT NULL FROM sqlguard.removed") == [(True,)]
    for number in (action, changed):
        report = undo.undo(world.op, action=number)
        assert (report.stopped, [c.reason for c in report.conflicts]) == (True, ["the row was purged"])


def test_agents_reach_none_of_it(world: World) -> None:
    agent = world.agents[0].conn
    for statement in (
        "SELECT FROM sqlguard.hold",
        "DELETE FROM sqlguard.removal",
        "SELECT sqlguard.erase_images(1, '{1}', '{1}', true)",
        "INSERT INTO sqlguard.erasure_run VALUES ('1')",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            agent.execute(statement)
