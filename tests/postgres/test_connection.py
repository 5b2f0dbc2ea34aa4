"""The Python door: the same path as the proxy, from the operator's DSN or from the task's own."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from end_to_end.shop import POLICY, SHOP, TABLES
from servers import Database, fresh_database

import sqlguard
from sqlguard.embedded import EmbeddedServer
from sqlguard.errors import CapExceeded, DatabaseUnavailable, NotConfigured, Refused, TaskEnded
from sqlguard.policy import parse_policy
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.tasks import OpenedTask, end_task, open_task
from sqlguard.postgres.undo import undo


@pytest.fixture(scope="module")
def shop(server: EmbeddedServer) -> Iterator[Database]:
    with fresh_database(server) as database:
        migrate(database.owner_dsn)
        owner = database.connect(database.owner_dsn)
        owner.execute(SHOP)
        guard_tables(owner, TABLES, mode="soft")
        apply_policy(owner, parse_policy(POLICY, "policy"))
        yield database


@pytest.fixture
def owner(shop: Database) -> psycopg.Connection[Any]:
    return shop.connect(shop.owner_dsn)


@pytest.fixture
def task(owner: psycopg.Connection[Any]) -> Iterator[OpenedTask]:
    opened = open_task(owner, agent="tester", policy="support", ttl=timedelta(minutes=5))
    yield opened
    undo(owner, task=opened.task.id)
    end_task(owner, opened.task.id, "test done")


@pytest.fixture(params=["operator", "task"])
def db(
    shop: Database, task: OpenedTask, request: pytest.FixtureRequest
) -> Iterator[sqlguard.GuardedConnection]:
    """The door from both sides: the operator with a task's id, and the task itself."""
    if request.param == "operator":
        with sqlguard.connect(shop.owner_dsn, task=task.task.id) as connection:
            yield connection
    else:
        with sqlguard.connect(shop.dsn_for(task.role, task.password)) as connection:
            yield connection


def live(owner: psycopg.Connection[Any], table: str, condition: str) -> int:
    row = owner.execute(
        f"SELECT count(*) FROM {table} WHERE deleted_at IS NULL AND {condition}".encode()
    ).fetchone()
    assert row is not None
    return int(row[0])


def test_a_preview_counts_and_changes_nothing(
    db: sqlguard.GuardedConnection, owner: psycopg.Connection[Any]
) -> None:
    outcome = db.preview("DELETE FROM customers WHERE id = %s", [42])
    assert {a.table: a.rows for a in outcome.affected} == {
        "public.customers": 1,
        "public.orders": 4,
        "public.items": 10,
    }
    assert outcome.as_dict()["affected_rows"] == 15
    assert not outcome.committed
    assert live(owner, "customers", "id = 42") == 1


def test_what_a_preview_says_is_what_happens(
    db: sqlguard.GuardedConnection, owner: psycopg.Connection[Any]
) -> None:
    sql, params = "DELETE FROM customers WHERE id = %(id)s RETURNING id, name", {"id": 43}
    seen = db.preview(sql, params)
    done = db.execute(sql, params, reason="asked for", confidence=0.9)
    assert done.affected == seen.affected
    assert (done.tag, done.rows, done.columns) == ("DELETE 1", ((43, "Customer 43"),), ("id", "name"))
    assert done.committed
    assert live(owner, "customers", "id = 43") == 0
    row = owner.execute(
        "SELECT agent, reason, confidence FROM sqlguard.action WHERE id = %s", [done.action]
    ).fetchone()
    assert row == ("tester", "asked for", 0.9)


@pytest.mark.parametrize(
    ("sql", "error", "sqlstate"),
    [
        ("DROP TABLE orders", Refused, "SG002"),
        ("UPDATE orders SET status = 'x'", Refused, "SG002"),
        ("selec 1", Refused, "42601"),
        ("", None, None),
    ],
)
def test_refusals(
    db: sqlguard.GuardedConnection, sql: str, error: type[Exception] | None, sqlstate: str | None
) -> None:
    if error is None:
        assert db.execute(sql).rows == ()
        return
    with pytest.raises(error) as caught:
        db.execute(sql)
    assert caught.value.sqlstate == sqlstate  # type: ignore[attr-defined]
    assert db.execute("SELECT 1").rows == ((1,),)


def test_over_the_cap(db: sqlguard.GuardedConnection, owner: psycopg.Connection[Any]) -> None:
    with pytest.raises(CapExceeded, match="2395 rows"):
        db.execute("UPDATE orders SET status = 'x' WHERE id > 5")
    assert live(owner, "orders", "status = 'x'") == 0


def test_a_block_commits_or_not_as_a_whole(
    db: sqlguard.GuardedConnection, owner: psycopg.Connection[Any]
) -> None:
    db.execute("BEGIN")
    db.execute("UPDATE orders SET note = 'kept' WHERE id = 3")
    assert db.execute("COMMIT").tag == "COMMIT"
    db.execute("BEGIN")
    db.execute("UPDATE orders SET note = 'lost' WHERE id = 4")
    assert db.preview("UPDATE orders SET note = 'seen' WHERE id = 5").affected[0].rows == 1
    db.execute("ROLLBACK")
    assert (live(owner, "orders", "note = 'kept'"), live(owner, "orders", "note IN ('lost', 'seen')")) == (
        1,
        0,
    )


def test_reads_are_read_only(db: sqlguard.GuardedConnection) -> None:
    assert db.execute("SELECT current_setting('transaction_read_only')").rows == (("on",),)


def test_undo_needs_the_operator(shop: Database, task: OpenedTask, owner: psycopg.Connection[Any]) -> None:
    with sqlguard.connect(shop.dsn_for(task.role, task.password)) as agent:
        agent.execute("UPDATE orders SET note = 'x' WHERE id = 8")
        with pytest.raises(NotConfigured):
            agent.undo()
    with sqlguard.connect(shop.owner_dsn, task=task.task.id) as operator:
        assert operator.undo(preview=True).rows == 1
        assert live(owner, "orders", "note = 'x'") == 1
        assert operator.undo().rows == 1
        assert operator.undo().already_undone
    assert live(owner, "orders", "note = 'x'") == 0


def test_a_role_made_for_the_connection_ends_with_it(
    shop: Database, task: OpenedTask, owner: psycopg.Connection[Any]
) -> None:
    with sqlguard.connect(shop.owner_dsn, task=task.task.id) as db:
        role = db.role
        assert role != task.role
    assert owner.execute("SELECT count(*) FROM pg_roles WHERE rolname = %s", [role]).fetchone() == (0,)


def test_what_can_not_be_connected(shop: Database, task: OpenedTask, owner: psycopg.Connection[Any]) -> None:
    with pytest.raises(NotConfigured):
        sqlguard.connect(shop.owner_dsn)
    with pytest.raises(TaskEnded):
        sqlguard.connect(shop.owner_dsn, task="no-such-task")
    with pytest.raises(DatabaseUnavailable):
        sqlguard.connect("postgresql://nobody@127.0.0.1:1/shop?connect_timeout=2", task=task.task.id)
    end_task(owner, task.task.id, "over")
    with pytest.raises(TaskEnded):
        sqlguard.connect(shop.owner_dsn, task=task.task.id)


def test_another_tasks_action_is_not_undone(
    shop: Database, task: OpenedTask, owner: psycopg.Connection[Any]
) -> None:
    other = open_task(owner, agent="another", policy="support", ttl=timedelta(minutes=5))
    try:
        with sqlguard.connect(shop.owner_dsn, task=other.task.id) as theirs:
            action = theirs.execute("UPDATE orders SET note = 'theirs' WHERE id = 12").action
        with sqlguard.connect(shop.owner_dsn, task=task.task.id) as ours:
            with pytest.raises(Refused, match="not of this task"):
                ours.undo(action=action)
        assert live(owner, "orders", "note = 'theirs'") == 1
    finally:
        undo(owner, task=other.task.id)
        end_task(owner, other.task.id, "test done")


def test_values_that_python_has_no_room_for_are_read_as_text(db: sqlguard.GuardedConnection) -> None:
    db.load_as_text()
    outcome = db.execute(
        "SELECT 'infinity'::timestamptz, '0044-03-15 BC'::date, '1 mon 3 days'::interval,"
        " '[2026-01-01,2026-02-01)'::daterange, timestamp '2026-01-02 03:04:05.5', ARRAY['-infinity'::date]"
    )
    assert outcome.rows == (
        (
            "infinity",
            "0044-03-15 BC",
            "1 mon 3 days",
            "[2026-01-01,2026-02-01)",
            "2026-01-02T03:04:05.500000",
            ["-infinity"],
        ),
    )


def test_only_the_first_rows_of_a_read_are_kept(db: sqlguard.GuardedConnection) -> None:
    found = db.execute(
        "SELECT n, n::text AS t FROM generate_series(1, 5000) n WHERE n <= %s", [5000], max_rows=3
    )
    assert (found.rows, found.columns) == (((1, "1"), (2, "2"), (3, "3")), ("n", "t"))
    assert (found.rowcount, found.tag) == (5000, "SELECT 5000")
    nothing = db.execute("SELECT 1 AS one WHERE false", max_rows=3)
    assert (nothing.rows, nothing.rowcount, nothing.columns) == ((), 0, ("one",))
    assert db.execute("SHOW server_version_num", max_rows=1).rowcount == 1
    with pytest.raises(psycopg.errors.DivisionByZero):
        db.execute("SELECT 1 / (n - 40) FROM generate_series(1, 50) n", max_rows=3)
    many = db.execute("SELECT a.id FROM items a CROSS JOIN items b", max_rows=3)
    assert (len(many.rows), many.rowcount, many.has_more) == (3, 100_000, True)
    # The session is as it was.
    assert db.execute("SELECT 1").rows == ((1,),)


@pytest.mark.parametrize(
    "text",
    [
        "SET sqlguard.dry_run = on",
        "SELECT set_config('sqlguard.dry_run', 'on', false)",
        "PREPARE p AS SELECT set_config('SQLGUARD.dry_run', 'on', false)",
        "SET sqlguard.idempotency_key = 'k'",
    ],
)
def test_a_setting_that_nothing_follows_here_is_refused(db: sqlguard.GuardedConnection, text: str) -> None:
    with pytest.raises(Refused, match="settings of a task are the proxy's") as caught:
        db.execute(text)
    assert "dry_run" in str(caught.value.hint)
    db.execute("SET TimeZone = 'UTC'")


def test_nothing_has_a_name_that_the_agent_could_give_to_another_statement(
    db: sqlguard.GuardedConnection,
) -> None:
    """psycopg prepares what it is given often: under a name that DEALLOCATE and PREPARE would take from a read."""
    db.execute("BEGIN")
    for _ in range(10):
        db.execute("SELECT id FROM orders WHERE id = 6")
        db.execute("UPDATE orders SET note = 'seen' WHERE id = 6")
    assert db.execute("SELECT name FROM pg_prepared_statements").rows == ()
    db.execute("ROLLBACK")


@pytest.mark.parametrize("text", ["COPY staff FROM STDIN", "COPY staff TO STDOUT"])
def test_copy_says_where_it_works(db: sqlguard.GuardedConnection, text: str) -> None:
    with pytest.raises(Refused, match="needs a stream of data") as caught:
        db.execute(text)
    assert "cursor.copy()" in str(caught.value.hint)
    assert db.execute("SELECT 1").rows == ((1,),)


def test_a_dry_run_takes_back_no_prepared_statement(db: sqlguard.GuardedConnection) -> None:
    """PostgreSQL keeps it: what a name stands for is what EXECUTE runs, and is judged by."""
    db.execute("PREPARE p AS SELECT 1")
    db.execute("DEALLOCATE p", dry_run=True)
    db.execute("PREPARE p AS UPDATE orders SET note = 'unseen' WHERE id = 5", dry_run=True)
    db.execute("BEGIN")
    outcome = db.execute("EXECUTE p")
    db.execute("COMMIT")
    assert outcome.action is not None
    assert outcome.tag == "UPDATE 1"
