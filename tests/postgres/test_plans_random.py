"""
What a preview announces is what is done: random schemas and statements, measured from outside.

SQLGUARD_PLAN_EXAMPLES says how many schemas are tried (each with several statements); the default keeps CI short.
"""

import os
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import fresh_database

import sqlguard
from sqlguard.embedded import EmbeddedServer
from sqlguard.errors import SqlguardError
from sqlguard.policy import parse_policy
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.tasks import open_task
from sqlguard.postgres.undo import undo

EXAMPLES = int(os.environ.get("SQLGUARD_PLAN_EXAMPLES", "5"))
POLICY = """
name = "any"
[defaults]
max_rows = 5000
max_share = 1.0
[tables."public.*"]
select = true
insert = true
update = true
[tables."public.counters"]
insert = false
update = false
"""
COUNTING = """
CREATE FUNCTION counting() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS
    'BEGIN UPDATE counters SET n = n + 1; RETURN NULL; END'
"""
ROWS = 12
TABLES = ("a", "b", "c", "d")


@st.composite
def schemas(draw: st.DrawFn) -> tuple[list[str], dict[str, str]]:
    """The statements that make a schema of four tables, and the mode of each."""
    actions = st.sampled_from(["CASCADE", "SET NULL", "SET DEFAULT", "NO ACTION"])
    texts = ["CREATE TABLE counters (n integer)", "INSERT INTO counters VALUES (0)"]
    modes = {}
    is_partitioned = draw(st.booleans())
    for number, name in enumerate(TABLES):
        modes[name] = draw(st.sampled_from(["soft", "journal"]))
        columns = ["id integer PRIMARY KEY", "v integer", "t text"]
        for parent in TABLES[:number]:
            if draw(st.booleans()):
                late = draw(st.sampled_from(["", " DEFERRABLE INITIALLY DEFERRED"]))
                columns.append(
                    f"{parent}_id integer DEFAULT 1 REFERENCES {parent} ON DELETE {draw(actions)}{late}"
                )
        tail = " PARTITION BY RANGE (id)" if is_partitioned and name == "d" else ""
        texts.append(f"CREATE TABLE {name} ({', '.join(columns)}){tail}")
        if tail:
            texts.append(f"CREATE TABLE {name}_low PARTITION OF {name} FOR VALUES FROM (MINVALUE) TO (6)")
            texts.append(f"CREATE TABLE {name}_high PARTITION OF {name} FOR VALUES FROM (6) TO (MAXVALUE)")
        keys = [c.split()[0] for c in columns[3:]]
        values = "".join(f", 1 + (n * {draw(st.integers(1, 7))}) % {ROWS}" for _ in keys)
        names = "".join(f", {key}" for key in keys)
        texts.append(
            f"INSERT INTO {name} (id, v, t{names}) SELECT n, n % 4, 'x'{values} FROM generate_series(1, {ROWS}) n"
        )
    if draw(st.booleans()):
        event = draw(st.sampled_from(["INSERT", "UPDATE OF v"]))
        texts += [
            COUNTING,
            f"CREATE TRIGGER counting AFTER {event} ON b FOR EACH ROW EXECUTE FUNCTION counting()",
        ]
        modes["b"] = "journal"
    texts.append("CREATE VIEW shown WITH (security_invoker) AS SELECT id, v, t FROM a WHERE id > 2")
    # A policy gives no rights to write through views; owners do.
    texts.append("GRANT SELECT, INSERT, UPDATE, DELETE ON shown TO PUBLIC")
    return texts, modes


@st.composite
def statements(draw: st.DrawFn) -> str:
    table = draw(st.sampled_from(TABLES))
    low, high = draw(st.integers(1, ROWS)), draw(st.integers(1, ROWS))
    where = draw(st.sampled_from([f"id BETWEEN {low} AND {high}", f"v = {low % 4}", f"id = {low}"]))
    return draw(
        st.sampled_from(
            [
                f"DELETE FROM {table} WHERE {where}",
                f"UPDATE {table} SET v = v + 1 WHERE {where}",
                f"UPDATE {table} SET t = t || 'y' WHERE {where} RETURNING id",
                f"INSERT INTO {table} (id, v) SELECT id + 100, v FROM {table} WHERE {where}",
                f"UPDATE shown SET v = 9 WHERE {where}",
                f"INSERT INTO shown (id, v) SELECT id + 200, v FROM {table} WHERE {where}",
                f"WITH gone AS (DELETE FROM {table} WHERE {where} RETURNING id) SELECT count(*) FROM gone",
            ]
        )
    )


def dump(owner: psycopg.Connection[Any], name: str, mode: str) -> dict[int, str]:
    live = "WHERE deleted_at IS NULL" if mode == "soft" else ""
    return dict(owner.execute(f"SELECT id, ({name}.*)::text FROM {name} {live}".encode()).fetchall())


def counted(report: dict[str, Any]) -> dict[tuple[str, str], int]:
    return {(a["table"], a["op"]): a["rows"] for a in report["affected"]}


@pytest.mark.slow
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(schema=schemas(), texts=st.lists(statements(), min_size=3, max_size=8))
def test_announced_equals_done(
    server: EmbeddedServer, schema: tuple[list[str], dict[str, str]], texts: list[str]
) -> None:
    made, modes = schema
    with fresh_database(server) as database:
        migrate(database.owner_dsn)
        owner = database.connect(database.owner_dsn)
        owner.execute("; ".join(made).encode())
        for name in TABLES:
            guard_tables(owner, [name], mode=modes[name])
        policy = POLICY + "".join(f'[tables."public.{n}"]\ndelete = "{m}"\n' for n, m in modes.items())
        apply_policy(owner, parse_policy(policy, "policy"))
        task = open_task(owner, agent="tester", policy="any")
        with sqlguard.connect(database.owner_dsn, task=task.task.id) as db:
            for text in texts:
                check(owner, db, modes, text)


def check(
    owner: psycopg.Connection[Any], db: sqlguard.GuardedConnection, modes: dict[str, str], text: str
) -> None:
    before = {name: dump(owner, name, mode) for name, mode in modes.items()}
    count = owner.execute("SELECT n FROM counters").fetchone()
    try:
        seen = db.preview(text)
    except (psycopg.Error, SqlguardError) as fault:
        assert not isinstance(fault, psycopg.errors.InsufficientPrivilege), text
        # What can't be previewed can't be done either.
        with pytest.raises(type(fault)):
            db.execute(text)
        return
    assert before == {name: dump(owner, name, mode) for name, mode in modes.items()}, text
    done = db.execute(text)
    assert seen.report is not None
    announced = counted(dict(seen.report))
    assert announced == {(a.table, a.op): a.rows for a in done.affected}, text
    assert (seen.tag, seen.rows) == (done.tag, done.rows)
    for name, mode in modes.items():
        after = dump(owner, name, mode)
        keys = before[name].keys() | after.keys()
        changed = sum(before[name].get(key) != after.get(key) for key in keys)
        of_table = {
            k: n
            for k, n in announced.items()
            if k[0] in (f"public.{name}", f"public.{name}_low", f"public.{name}_high")
        }
        assert sum(of_table.values()) >= changed, (text, name)
        if len({op for _, op in of_table}) == 1 and "update" not in {op for _, op in of_table}:
            assert sum(of_table.values()) == changed, (text, name)
    after_count = owner.execute("SELECT n FROM counters").fetchone()
    assert count is not None
    assert after_count is not None
    unguarded = sum(u["updated"] for u in seen.report["unguarded"])
    assert unguarded == after_count[0] - count[0], text
    if done.action is not None and done.affected:
        undo(owner, action=done.action, on_conflict="skip")
