"""
A task with a row scope learns nothing of other rows, by any statement of the given cases, and changes none.

Non-interference: every statement runs twice, straight at PostgreSQL, in two databases' worth of other people's rows
(values, numbers and keys differ, the task's own rows do not). Whatever the session is told (rows, tags, notices,
errors with detail and hint) must be the same. What PostgreSQL tells by design stands in BY_DESIGN, see docs/policies.md.
"""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from psycopg import pq
from servers import Database

from sqlguard.policy import parse_policy
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.tasks import open_task

POLICY = """
name = "one"

[defaults]
max_rows = 1000
max_share = 1.0
statement_timeout = "400ms"
search_path = ["app", "public"]

[tables."app.accounts"]
select = true
insert = true
update = true
delete = "soft"
rows = "id = :account"

[tables."app.orders"]
select = true
insert = true
update = true
delete = "soft"
rows = "account_id = :account"
"""
OTHERS = """
UPDATE app.accounts SET owner_name = 'other ' || id, email = 'other' || id || '@b.example', balance = balance + 7,
    status = 'other', tags = '{}', meta = '{"other": true}' WHERE id <> 3;
DELETE FROM app.orders WHERE account_id <> 3 AND id % 3 = 0;
UPDATE app.orders SET total = total + 1000, status = 'other' WHERE account_id <> 3;
"""
#: Shows the state of everybody else's rows.
SUM = """
SELECT md5(string_agg(t, '|' ORDER BY t)) FROM (
    SELECT a::text FROM app.accounts a WHERE id <> 3 UNION ALL SELECT o::text FROM app.orders o WHERE account_id <> 3) s (t)
"""
#: What differs from one run to the next without anybody's rows: moments, processes, transactions.
NOISE = re.compile(
    r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d[\d:.+-]*|\d+\.\d{3,}( ms)?|\b\d{4,}\b|0x[0-9a-f]+|sg_tk_\w+"
    r"|\b[0-9A-F]+/[0-9A-F]+\b|pg_temp_\d+|[0-9A-F]{8}-[0-9A-F]{8}-\d"
)
#: EXPLAIN: estimates come from statistics of the whole table, filtered rows are counted.
EXPLAINED = re.compile(
    r"cost=\S+ rows=\d+ width=\d+|rows=\S+|Rows Removed by Filter: \d+|Buffers: .*|loops=\d+"
)
PATIENCE = 1.5
BY_DESIGN = {
    "read-073": "which rows TABLESAMPLE takes depends on where in the table they are",
    "read-084": "EXPLAIN in JSON: estimates by statistics of the whole table",
    "read-092": "the order in which the catalog's own rows come",
    "read-093": "sizes of tables are anybody's to read",
    "func-051": "the number of a snapshot",
    "func-071": "pg_stat_activity shows who is connected, not what they do",
    "priv-004": "the order in which the catalog's own rows come",
}
OWN = """
CREATE TABLE saved_accounts AS SELECT * FROM app.accounts WHERE id = 3;
CREATE TABLE saved_orders AS SELECT * FROM app.orders WHERE account_id = 3;
"""
#: What left its block is taken back, but for the rows that it made.
RESTORE = """
DO $$ DECLARE t text; BEGIN FOREACH t IN ARRAY ARRAY['accounts', 'orders'] LOOP
    EXECUTE (SELECT format('UPDATE app.%1$I o SET (%2$s) = (SELECT %3$s) FROM saved_%1$s s WHERE s.id = o.id'
                               ' AND o IS DISTINCT FROM s',
                           t, string_agg(quote_ident(attname), ', '), string_agg('s.' || quote_ident(attname), ', '))
             FROM pg_attribute WHERE attrelid = ('app.' || t)::regclass AND attnum > 0 AND NOT attisdropped
                 AND attgenerated = '' AND attidentity = '');
    EXECUTE format('DELETE FROM app.%1$I o WHERE o.%2$s = 3 AND NOT EXISTS (SELECT FROM saved_%1$s s WHERE s.id = o.id)',
                   t, CASE t WHEN 'accounts' THEN 'id' ELSE 'account_id' END);
END LOOP; END $$
"""


@pytest.fixture
def cases(shared: Path) -> list[dict[str, Any]]:
    path = shared / "corpus" / "guard_cases.yaml"
    if not path.is_file():
        pytest.skip("the guard cases are not there")
    found: list[dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))["entries"]
    return found


@pytest.fixture
def scoped(guard_schema: Database) -> Database:
    migrate(guard_schema.dsn)
    with guard_schema.connect() as op:
        guard_tables(op, ["app.accounts", "app.orders"], "soft")
        apply_policy(op, parse_policy(POLICY, "one.toml"))
    return guard_schema


class Watcher:
    """A task for account 3, and what its sessions are told."""

    def __init__(self, database: Database) -> None:
        self.database = database
        with database.connect() as op:
            self.task = open_task(op, agent="tester", policy="one", params={"account": "3"})

    def told(self, texts: list[str]) -> list[str]:
        """Run *texts* in one session, in a block that is rolled back; return everything that comes back."""
        dsn = self.database.dsn_for(self.task.role, self.task.password)
        heard: list[str] = []
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.add_notice_handler(
                lambda d: heard.append(f"{d.sqlstate} {d.message_primary} {d.message_detail}")
            )
            conn.execute("BEGIN")
            # Some lift their own time limit.
            watchdog = threading.Timer(PATIENCE, lambda: conn.cancel_safe(timeout=5))
            watchdog.start()
            for text in texts:
                heard += self._one(conn, text)
            watchdog.cancel()
        return [EXPLAINED.sub("", NOISE.sub("#", line)) for line in heard]

    def _one(self, conn: psycopg.Connection[Any], text: str) -> Iterator[str]:
        try:
            result = conn.pgconn.exec_(text.encode("utf-8", "surrogatepass"))
        except psycopg.Error as fault:
            yield f"broken: {fault}"
            return
        for row in range(result.ntuples):
            yield repr([result.get_value(row, column) for column in range(result.nfields)])
        yield f"{result.command_status!r} {result.status}"
        fields = pq.DiagnosticField
        for field in (
            fields.SQLSTATE,
            fields.MESSAGE_PRIMARY,
            fields.MESSAGE_DETAIL,
            fields.MESSAGE_HINT,
            fields.CONTEXT,
        ):
            if (said := result.error_field(field)) is not None:
                yield said.decode("utf-8", "replace")
        if conn.pgconn.transaction_status == pq.TransactionStatus.ACTIVE:
            conn.pgconn.finish()  # a COPY that waits for data


def sequences(database: Database) -> None:
    for (name,) in database.execute(
        "SELECT oid::regclass::text FROM pg_class WHERE relkind = 'S' AND relnamespace = 'app'::regnamespace"
    ):
        database.execute(f"SELECT setval('{name}', 50000)")


@pytest.mark.slow
def test_no_statement_of_the_cases_tells_or_changes_what_is_not_the_task_s(
    scoped: Database, cases: list[dict[str, Any]]
) -> None:
    texts = {e["id"]: [e["sql"]] if isinstance(e["sql"], str) else list(e["sql"]) for e in cases}
    heard: list[dict[str, list[str]]] = []
    scoped.load(OWN)
    for world in range(2):
        if world:
            scoped.load(OTHERS)
        sequences(scoped)
        before = scoped.execute(SUM)
        watcher = Watcher(scoped)
        run: dict[str, list[str]] = {}
        for id_, one in texts.items():
            run[id_] = watcher.told(one)
            scoped.load(RESTORE)
        assert scoped.execute(SUM) == before
        heard.append(run)
    for id_ in texts:  # stopped by time in one of the runs: how far it came is chance
        if any("canceling statement" in line for run in heard for line in run[id_]):
            heard[0][id_] = heard[1][id_]
    differ = {id_: (heard[0][id_], heard[1][id_]) for id_ in texts if heard[0][id_] != heard[1][id_]}
    shown = [f"{id_} {texts[id_]}: {v[0]} | {v[1]}" for id_, v in differ.items() if id_ not in BY_DESIGN]
    assert not shown, "\n".join(shown)
    assert len(texts) > 400


@pytest.fixture
def agent(scoped: Database) -> psycopg.Connection[Any]:
    made = Watcher(scoped).task
    return scoped.connect(scoped.dsn_for(made.role, made.password))


@pytest.mark.parametrize(
    "text",
    [
        "SELECT count(*) FROM accounts WHERE id <> 3",
        "SELECT count(*) FROM orders WHERE account_id <> 3",
        "UPDATE accounts SET balance = 0 WHERE id = 4 RETURNING 1",
        "UPDATE orders SET total = 0 WHERE account_id = 4 RETURNING 1",
        "SELECT 1 FROM accounts WHERE id = 4 AND 1 / (balance - balance) = 1",
        "SELECT 1 FROM accounts a WHERE a.id <> 3 FOR UPDATE",
        "SELECT 1 FROM pg_stats WHERE tablename IN ('accounts', 'orders') AND schemaname = 'app'",
        "MERGE INTO accounts a USING (SELECT 4 AS id) s ON a.id = s.id WHEN MATCHED THEN UPDATE SET balance = 0",
    ],
)
def test_what_is_asked_of_others_is_empty(agent: psycopg.Connection[Any], text: str) -> None:
    cursor = agent.execute(text.encode())
    rows = cursor.fetchall() if cursor.description else []
    assert rows in ([], [(0,)])


def test_nothing_can_be_moved_in_or_out_of_the_scope(agent: psycopg.Connection[Any]) -> None:
    for text in (
        "UPDATE accounts SET id = 77 WHERE id = 3",
        "UPDATE orders SET account_id = 4",
        "INSERT INTO orders (id, account_id) VALUES (900, 4)",
        "INSERT INTO accounts (id, owner_name) VALUES (78, 'x')",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security") as caught:
            agent.execute(text.encode())
        assert caught.value.diag.message_detail is None


def test_leaks_by_design_of_postgresql_are_these(scoped: Database, agent: psycopg.Connection[Any]) -> None:
    """If one of these stops leaking, docs/policies.md may say so."""
    with pytest.raises(psycopg.errors.UniqueViolation):
        agent.execute("INSERT INTO orders (id, account_id) VALUES (4, 3)")  # order 4 is another's
    plan = agent.execute("EXPLAIN (ANALYZE, COSTS OFF) SELECT * FROM orders").fetchall()
    assert any("Rows Removed by Filter" in line for (line,) in plan)
    scoped.execute("ANALYZE app.accounts")
    assert agent.execute("SELECT reltuples FROM pg_class WHERE oid = 'accounts'::regclass").fetchone() != (1,)
