"""
What an agent might try with the JSON of `sqlguard task open` in its hands, through the proxy and straight.

Each test is one attack that once worked, or that would if its wall were taken away; those that still work are
marked with the reason. Confirmed in the database as its owner sees it, and by an undo.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from end_to_end.inprocess import Proxy, proxy
from end_to_end.raw import Raw, bind, kinds
from end_to_end.shop import SHOP, TABLES
from end_to_end.wired import Agent
from servers import Database, fresh_database

from sqlguard import annotation
from sqlguard.embedded import EmbeddedServer
from sqlguard.policy import parse_policy
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.sweep import sweep
from sqlguard.postgres.tasks import end_task, open_task
from sqlguard.postgres.undo import undo
from sqlguard.wire.messages import PROTOCOL_3_0, Close, Execute, Parse, Query, Sync

SCHEMA = """
CREATE TABLE ledger (id integer PRIMARY KEY, amount money, note text);
INSERT INTO ledger SELECT n, n::money, 'entry ' || n FROM generate_series(1, 60) AS n;
CREATE TABLE loose (id integer PRIMARY KEY, t text);
INSERT INTO loose VALUES (1, 'only the owner writes here');
CREATE SCHEMA workshop;
GRANT USAGE, CREATE ON SCHEMA workshop TO PUBLIC;
CREATE SEQUENCE coins;
GRANT USAGE ON SEQUENCE coins TO PUBLIC;
CREATE TYPE coin AS (v integer);
CREATE FUNCTION coin_plus(coin, integer) RETURNS integer LANGUAGE plpgsql
    AS 'BEGIN PERFORM nextval(''coins''); RETURN 1; END';
CREATE OPERATOR + (LEFTARG = coin, RIGHTARG = integer, FUNCTION = coin_plus);
"""
SUPPORT = """
name = "support"
[defaults]
on_excess = "refuse"
[tables."public.*"]
select = true
insert = true
update = true
delete = "soft"
[tables."public.ledger"]
delete = "journal"
"""
SCOPED = """
name = "scoped"
[defaults]
max_rows = 1000
max_share = 1.0
on_excess = "refuse"
[tables."public.staff"]
select = true
delete = "soft"
[tables."public.orders"]
select = true
update = ["note"]
rows = "customer_id = :customer_id"
"""


@dataclass
class Lab:
    database: Database
    proxy: Proxy
    owner: psycopg.Connection[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.owner = self.operator()

    def operator(self) -> psycopg.Connection[Any]:
        return self.database.connect(self.database.owner_dsn)

    def value(self, sql: str, *values: object) -> Any:
        row = self.owner.execute(sql.encode(), values or None).fetchone()
        return row[0] if row else None

    def agent(self, policy: str = "support", params: dict[str, str] | None = None) -> Agent:
        task = open_task(self.owner, agent="mallory", policy=policy, ttl=timedelta(minutes=10), params=params)
        direct = self.database.dsn_for(task.role, task.password)
        return Agent(task, "127.0.0.1", self.proxy.port, self.database.name, direct)

    @contextmanager
    def visit(self, policy: str = "support", **params: str) -> Iterator[Agent]:
        agent = self.agent(policy, params)
        try:
            yield agent
        finally:
            undo(self.owner, task=agent.task.task.id)
            end_task(self.owner, agent.task.task.id, "tested")


@pytest.fixture(scope="module")
def lab(server: EmbeddedServer) -> Iterator[Lab]:
    with fresh_database(server) as database:
        migrate(database.owner_dsn)
        with psycopg.connect(database.owner_dsn, autocommit=True) as owner:
            owner.execute(SHOP)
            owner.execute(SCHEMA)
            guard_tables(owner, TABLES, "soft")
            guard_tables(owner, ["ledger"], "journal")
            for policy in (SUPPORT, SCOPED):
                apply_policy(owner, parse_policy(policy, "attacks.toml"))
        with proxy(database.owner_dsn) as running:
            yield Lab(database, running)


@pytest.fixture
def mallory(lab: Lab) -> Iterator[Agent]:
    with lab.visit() as agent:
        yield agent


def straight(agent: Agent, **options: Any) -> psycopg.Connection[Any]:
    return psycopg.connect(agent.direct, **{"autocommit": True, **options})


def soon(work: Callable[[], Any], seconds: float = 5) -> bool:
    """Whether *work* comes to an end; what it raises counts as one."""

    def run() -> None:
        with suppress(psycopg.Error):
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def intents(lab: Lab, agent: Agent) -> int:
    return int(lab.value("SELECT count(*) FROM sqlguard.action WHERE task_id = %s", agent.task.task.id))


# --- code that would run with the operator's rights


def test_a_wall_s_trigger_function_runs_on_no_table_of_the_agent_s(lab: Lab, mallory: Agent) -> None:
    """Its casts and row policies would be the agent's code with the operator's rights."""
    with straight(mallory) as agent:
        agent.execute("CREATE TYPE pg_temp.trap AS (a int)")
        agent.execute(
            "CREATE FUNCTION pg_temp.spring(pg_temp.trap) RETURNS text LANGUAGE plpgsql"
            " AS $$ BEGIN DELETE FROM public.loose; RETURN '1'; END $$"
        )
        agent.execute("CREATE CAST (pg_temp.trap AS text) WITH FUNCTION pg_temp.spring(pg_temp.trap)")
        agent.execute(
            "CREATE TEMP TABLE bait (id pg_temp.trap, deleted_at timestamptz, deleted_by_agent text)"
        )
        function = lab.value(
            "SELECT tgfoid::regproc::text FROM pg_trigger"
            " WHERE tgrelid = 'orders'::regclass AND tgname = 'sqlguard_insert'"
        )
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            agent.execute(
                "CREATE TRIGGER t AFTER INSERT ON bait REFERENCING NEW TABLE AS sg_new"
                f" FOR EACH STATEMENT EXECUTE FUNCTION {function}()"
            )
    assert lab.value("SELECT count(*) FROM loose") == 1


def test_no_definer_function_can_be_attached_by_everyone(lab: Lab) -> None:
    found = lab.owner.execute(
        "SELECT p.proname FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace"
        " WHERE n.nspname = 'sqlguard' AND p.prosecdef AND p.prorettype = 'trigger'::regtype"
        " AND has_function_privilege('sqlguard_agent', p.oid, 'EXECUTE')"
    ).fetchall()
    # Owners of partitioned tables need this one; it refuses tables that are not guarded.
    assert found == [("check_children",)]


def test_the_check_of_deferrable_keys_reads_no_table_of_the_agent_s(mallory: Agent) -> None:
    with straight(mallory) as agent:
        agent.execute(
            "CREATE TEMP TABLE bait (id int PRIMARY KEY, above int CONSTRAINT above REFERENCES bait)"
        )
        agent.execute("INSERT INTO bait VALUES (1)")
        agent.execute(
            "CREATE TRIGGER t AFTER UPDATE ON bait FOR EACH ROW"
            " EXECUTE FUNCTION sqlguard.check_children('above')"
        )
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            agent.execute("UPDATE bait SET id = 2")


def test_what_an_agent_leaves_behind_does_not_run_as_the_operator(lab: Lab) -> None:
    """Where PUBLIC may create in a schema, as in databases that come from PostgreSQL 14."""
    first = lab.agent()
    with straight(first) as agent:
        agent.execute(
            "CREATE FUNCTION workshop.parcel() RETURNS void LANGUAGE sql SECURITY DEFINER"
            " AS $$ DELETE FROM public.loose $$"
        )
        agent.execute("CREATE TABLE workshop.notes (t text)")
    end_task(lab.owner, first.task.task.id, "done")
    assert lab.value("SELECT to_regclass('workshop.notes')::text") == "workshop.notes"
    with lab.visit() as second, straight(second) as agent:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            agent.execute("SELECT workshop.parcel()")
    assert lab.value("SELECT count(*) FROM loose") == 1


# --- rights that outlive their task, work that stops others


def test_a_task_ends_although_its_session_locks_its_role(lab: Lab) -> None:
    mallory = lab.agent()
    held = straight(mallory, autocommit=False)
    held.execute("ALTER ROLE CURRENT_USER PASSWORD 'mine'")
    try:
        other = lab.operator()
        assert soon(lambda: end_task(other, mallory.task.task.id, "over"), 20)
        with pytest.raises(psycopg.Error):
            held.execute("SELECT count(*) FROM orders")
        assert lab.value("SELECT count(*) FROM pg_roles WHERE rolname = %s", mallory.task.role) == 0
    finally:
        held.close()


def test_a_lock_on_a_task_s_chain_stops_nobody_else(lab: Lab, mallory: Agent) -> None:
    with lab.visit() as honest, honest.connect() as victim, straight(mallory, autocommit=False) as agent:
        agent.execute("""SELECT sqlguard.record_intent('{"verdict": "refuse"}')""")
        with mallory.connect() as accomplice:
            stuck = threading.Thread(
                target=lambda: soon(lambda: accomplice.execute("UPDATE orders SET note = 'a' WHERE id = 60"))
            )
            stuck.start()
            time.sleep(0.3)
            assert soon(lambda: victim.execute("UPDATE orders SET note = 'b' WHERE id = 61"))
            agent.rollback()
            stuck.join()


@pytest.mark.parametrize("number", [2, 3, 4])
def test_an_agent_that_takes_the_operator_s_locks_is_ended(lab: Lab, number: int) -> None:
    """With them it would keep the janitor from ending tasks, tasks from being opened, and every undo waiting."""
    mallory = lab.agent()
    other = lab.operator()
    with lab.visit() as honest, straight(mallory) as agent:
        agent.execute("SELECT pg_advisory_lock(x'73716c67'::int, %s)", [number])
        found = sweep(other, datetime.now(UTC))
        assert not found.busy
        assert found.changed == (mallory.task.task.id,)
        with pytest.raises(psycopg.Error):
            agent.execute("SELECT 1")
        assert soon(lambda: undo(other, task=honest.task.task.id))


@pytest.mark.parametrize("ended_by", ["operator", "janitor"])
def test_a_prepared_transaction_stops_no_undo(lab: Lab, ended_by: str) -> None:
    """Where max_prepared_transactions is not 0, its default, a lock needs no session that could be ended."""
    mallory = lab.agent()
    other = lab.operator()
    with straight(mallory) as agent:
        agent.execute("BEGIN READ WRITE")
        agent.execute("SELECT pg_advisory_xact_lock(x'73716c67'::int, n) FROM generate_series(3, 4) n")
        agent.execute("UPDATE orders SET note = 'mine for good' WHERE id = 59")
        agent.execute("ALTER ROLE CURRENT_USER PASSWORD 'mine'")
        agent.execute("PREPARE TRANSACTION 'squatter'")
    if ended_by == "operator":
        assert soon(lambda: end_task(other, mallory.task.task.id, "over"), 20)
    else:
        assert sweep(other, datetime.now(UTC)).changed == (mallory.task.task.id,)
    assert lab.value("SELECT count(*) FROM pg_prepared_xacts") == 0
    assert lab.value("SELECT count(*) FROM pg_roles WHERE rolname = %s", mallory.task.role) == 0
    with lab.visit() as honest:
        with honest.connect() as agent:
            agent.execute("UPDATE orders SET note = 'honest' WHERE id = 59")
        assert soon(lambda: undo(other, task=honest.task.task.id))


def test_an_undo_waits_for_no_prepared_transaction_s_advisory_lock(lab: Lab, mallory: Agent) -> None:
    with straight(mallory) as agent:
        agent.execute("BEGIN")
        agent.execute("SELECT pg_advisory_xact_lock(x'73716c67'::int, 4)")
        agent.execute("PREPARE TRANSACTION 'squatter'")
        other = lab.operator()
        assert soon(lambda: undo(other, task=mallory.task.task.id), 3)
        agent.execute("ROLLBACK PREPARED 'squatter'")


def test_text_that_would_keep_the_judge_busy(mallory: Agent) -> None:
    """One proxy serves everyone: no text of a few kilobytes may hold it up."""
    doubling = ", ".join(
        f"c{n} AS (SELECT * FROM {'orders' if n == 0 else f'c{n - 1} a, c{n - 1} b'})" for n in range(40)
    )
    before = time.monotonic()
    with mallory.connect() as agent, pytest.raises(psycopg.Error):
        agent.execute(f"WITH {doubling} SELECT * FROM c39".encode())
    annotation.read("SELECT 1 /*" + ",".join(["a='b'"] * 150_000) + "*/")
    assert time.monotonic() - before < 3


def test_deep_text_is_an_answer_and_no_broken_session(mallory: Agent) -> None:
    deep = "SELECT * FROM " + "(SELECT * FROM " * 60 + "orders" + ") a" * 60
    with mallory.connect() as agent:
        try:
            agent.execute(deep.encode())
        except psycopg.Error as fault:
            assert fault.sqlstate == "SG007"
        assert agent.execute("SELECT 1").fetchone() == (1,)


# --- writes that were never journaled


def test_explain_of_another_session_s_plan(lab: Lab, mallory: Agent) -> None:
    """The same words, decided for one prepared statement, must not pass for another one."""
    with mallory.connect(prepare_threshold=None) as agent:
        agent.execute("PREPARE q AS SELECT 1")
        agent.execute("EXPLAIN ANALYZE EXECUTE q")
        agent.execute("DEALLOCATE q")
        agent.execute("PREPARE q AS UPDATE orders SET note = 'unseen' WHERE id = 7")
        agent.execute("BEGIN")
        with pytest.raises(psycopg.Error):
            agent.execute("EXPLAIN ANALYZE EXECUTE q")
        agent.execute("ROLLBACK")
    assert lab.value("SELECT note FROM orders WHERE id = 7") is None


def test_a_plan_that_is_replaced_in_the_same_message(lab: Lab, mallory: Agent) -> None:
    with mallory.connect(prepare_threshold=None) as agent:
        agent.execute("PREPARE r AS SELECT 1")
        before = intents(lab, mallory)
        agent.execute(
            "DEALLOCATE r; PREPARE r AS UPDATE orders SET note = 'again' WHERE id = 8; SELECT 1; EXECUTE r"
        )
    changed = lab.value("SELECT note FROM orders WHERE id = 8") == "again"
    assert intents(lab, mallory) - before == int(changed)


def raw(lab: Lab, agent: Agent, **parameters: str) -> Raw:
    client = Raw("127.0.0.1", lab.proxy.port)
    client.log_in(agent, PROTOCOL_3_0, **parameters)
    return client


def names_of(common: bytes) -> tuple[bytes, bytes]:
    """Two names that are one to PostgreSQL, which looks at 63 bytes."""
    return common.ljust(63, b"x") + b"A", common.ljust(63, b"x") + b"B"


def test_names_that_differ_behind_byte_63(lab: Lab, mallory: Agent) -> None:
    read, write = names_of(b"plan")
    client = raw(lab, mallory)
    client.send(Parse(read, b"SELECT 1"), Sync())
    client.until_ready()
    change = b"UPDATE orders SET note = 'no intent' WHERE id = 14"
    client.send(Close(is_portal=False, name=write), Parse(write, change), Sync(), Query(b"BEGIN"))
    client.until_ready()
    client.until_ready()
    client.send(bind(statement=read), Execute(b""), Sync(), Query(b"COMMIT"))
    client.until_ready()
    client.until_ready()
    client.close()
    changed = lab.value("SELECT note FROM orders WHERE id = 14") is not None
    assert intents(lab, mallory) == int(changed)


def test_a_dry_run_behind_a_write_in_one_pipeline(lab: Lab, mallory: Agent) -> None:
    """What the client and the journal are told of the first write is true."""
    client = raw(lab, mallory)
    for text in (
        b"UPDATE orders SET note = 'first' WHERE id = 12",
        b"SET sqlguard.dry_run = on",
        b"UPDATE orders SET note = 'second' WHERE id = 13",
    ):
        client.send(Parse(b"", text), bind(), Execute(b""))
    client.send(Sync())
    told = kinds(client.until_ready())
    client.close()
    assert lab.value("SELECT note FROM orders WHERE id = 13") is None
    kept = lab.value("SELECT note FROM orders WHERE id = 12") == "first"
    assert kept == (told.count("C") >= 1 and "E" not in told)


def test_set_config_of_our_settings_takes_constants_only(lab: Lab, mallory: Agent) -> None:
    """Two keys that the proxy can't see must not become the same one: the second write would be lost."""
    with mallory.connect() as agent:
        total = lab.value("SELECT total FROM orders WHERE id = 20")
        for number, key in enumerate(("k1", "k2"), 1):
            with pytest.raises(psycopg.Error):
                agent.execute("SELECT set_config('sqlguard.idempotency_key', %s, false)", [key])
            agent.execute("UPDATE orders SET total = total + 1 WHERE id = 20")
            assert lab.value("SELECT total FROM orders WHERE id = 20") == total + number


def test_start_up_settings_count_in_postgresql_s_order(lab: Lab, mallory: Agent) -> None:
    client = raw(lab, mallory, **{"sqlguard.dry_run": "on", "options": "-c sqlguard.dry_run=off"})
    client.send(Query(b"UPDATE orders SET note = 'wet' WHERE id = 16"))
    client.until_ready()
    client.close()
    assert lab.value("SELECT note FROM orders WHERE id = 16") is None


# --- what can't be read, what can't be restored


def test_samples_show_no_rows_outside_the_row_scope(lab: Lab) -> None:
    """Deleting a clerk changes the orders of all customers; the task may see those of one."""
    with lab.visit("scoped", customer_id="120") as agent, straight(agent, autocommit=False) as conn:
        own = {row[0] for row in conn.execute("SELECT id FROM orders").fetchall()}
        conn.execute(
            "UPDATE staff SET deleted_at = statement_timestamp(), deleted_by_agent = 'mallory' WHERE id = 3"
        )
        shown = conn.execute(
            "SELECT before, after FROM sqlguard.transaction_samples(1000) WHERE table_name = 'orders'"
        ).fetchall()
        conn.rollback()
    assert {image["id"] for pair in shown for image in pair if image} <= own


def test_images_do_not_depend_on_the_agent_s_settings(lab: Lab) -> None:
    """With another lc_monetary an image of money could not be read back, or not as the same amount."""
    settings = lab.owner.execute(
        "SELECT p.proname FROM pg_proc p WHERE p.proname LIKE 'capture\\_%'"
        " AND NOT p.proconfig @> ARRAY['lc_monetary=C']"
    ).fetchall()
    assert settings == []


def test_a_parameter_s_type_picks_an_operator(lab: Lab, mallory: Agent) -> None:
    """`$1 + 1` is harmless until the client says that `$1` is of a type whose `+` is a function of the owner's."""
    oid = lab.value("SELECT 'coin'::regtype::oid::bigint")
    client = raw(lab, mallory)
    client.send(Parse(b"", b"SELECT $1 + 1", (oid,)), bind(values=(b"(1)",)), Execute(b""), Sync())
    answer = client.until_ready()
    client.close()
    assert "SG002" in str(answer)
    assert not lab.value("SELECT is_called FROM coins")


# --- approvals, caps and deleted rows, through the proxy


@pytest.mark.parametrize(
    "text",
    [
        "SELECT sqlguard.redeem_plan(1, NULL, 1, 1)",
        "SELECT sqlguard.begin_plan()",
        "SELECT * FROM sqlguard.plan_outcome(NULL)",
        "SELECT sqlguard.record_plan('{}', '{}', '')",
        "SELECT sqlguard.record_intent('{}')",
        "SELECT sqlguard.record_event(1, 'failed')",
        "SELECT * FROM sqlguard.begin_step('{}')",
        "SELECT * FROM sqlguard.lease_own_statements(1, 1)",
        "SELECT sqlguard.decide_plan(1, 'approve', '', NULL)",
        "SELECT sqlguard.decide_step(1, 'approve')",
        "SELECT * FROM sqlguard.claim_key('k', 'h', 1)",
        "SELECT sqlguard.keep_result('k', 'DELETE 1')",
        "SELECT sqlguard.transaction_samples(9)",
        "SELECT * FROM sqlguard.plan",
        "SET sqlguard.plan = on",
        "SET LOCAL sqlguard.plan = on",
        "SET sqlguard.counted = '{}'",
        "SET sqlguard.action = '1'",
        "SELECT set_config('sqlguard.plan', 'on', false)",
        "SELECT set_config('sqlguard.action', '1', false)",
        "PREPARE TRANSACTION 'squatter'",
        "LOCK TABLE orders IN ACCESS EXCLUSIVE MODE",
        "ALTER ROLE CURRENT_USER SET sqlguard.plan = on",
        "COPY sqlguard.plan TO STDOUT",
        "EXPLAIN ANALYZE SELECT sqlguard.begin_plan()",
        "PREPARE p AS SELECT sqlguard.begin_plan()",
        "DECLARE c CURSOR WITH HOLD FOR SELECT sqlguard.begin_plan()",
    ],
)
def test_our_functions_and_settings_are_not_for_the_agent_s_own_words(mallory: Agent, text: str) -> None:
    with mallory.connect() as agent, pytest.raises(psycopg.Error) as caught:
        agent.execute("BEGIN")
        agent.execute(text.encode())
    assert caught.value.sqlstate in {"SG002", "42501"}


@pytest.mark.parametrize(
    "name", ["sqlguard.plan", "sqlguard.counted", "sqlguard.action", "sqlguard.last_plan"]
)
@pytest.mark.parametrize("way", ["parameter", "options"])
def test_our_settings_can_not_be_given_at_the_start(lab: Lab, mallory: Agent, name: str, way: str) -> None:
    given = {name: "1"} if way == "parameter" else {"options": f"-c {name}=1"}
    client = Raw("127.0.0.1", lab.proxy.port)
    with pytest.raises(Exception, match=r"SG002|may not"):
        client.log_in(mallory, PROTOCOL_3_0, **given)
    client.close()


def test_no_text_shows_or_moves_a_deleted_row(lab: Lab, mallory: Agent) -> None:
    """Whatever a statement's text makes of `sqlguard.may_mark`: only rows that it has marked itself are seen."""
    lab.owner.execute(
        "UPDATE orders SET deleted_at = now() - interval '1 day', deleted_by_agent = 'x' WHERE id <= 5"
    )
    try:
        with straight(mallory) as agent:
            agent.execute("SET default_transaction_read_only = off")
            count = "SELECT count(*) FROM orders WHERE id <= 5"
            agent.execute(f"PREPARE kept AS {count} AND 'deleted_at' <> note IS NOT NULL")
            agent.execute(f"CREATE FUNCTION pg_temp.seen() RETURNS bigint LANGUAGE sql AS $$ {count} $$")
            agent.execute(f"CREATE TEMP VIEW looking AS {count} /* deleted_at execute */")
            for mode in ("force_generic_plan", "force_custom_plan"):
                agent.execute(f"SET plan_cache_mode = {mode}".encode())
                for text in (
                    f"{count} /* deleted_at */",
                    f"{count} AND (deleted_at IS NOT NULL OR true)",
                    "EXECUTE kept",
                    "SELECT pg_temp.seen() AS deleted_at",
                    "SELECT * FROM looking",
                    f"WITH m AS MATERIALIZED ({count}) SELECT * FROM m, (SELECT 'deleted_at') x",
                ):
                    row = agent.execute(text.encode()).fetchone()
                    assert row is not None
                    assert row[0] == 0, text
            with agent.transaction():
                agent.execute("DECLARE c CURSOR FOR SELECT id FROM orders WHERE id <= 5 /* deleted_at */")
                assert agent.execute("FETCH ALL FROM c /* deleted_at */").fetchall() == []
            with agent.cursor().copy(
                "COPY (SELECT id FROM orders WHERE id <= 5) TO STDOUT /* deleted_at */"
            ) as copy:
                assert list(copy.rows()) == []
            for text in (
                "UPDATE orders SET deleted_at = NULL WHERE id <= 5",
                "UPDATE orders SET deleted_at = statement_timestamp(), deleted_by_agent = 'mallory' WHERE id <= 5",
                "UPDATE orders SET note = 'risen' WHERE id <= 5 AND deleted_at IS NOT NULL",
                "DO $$ BEGIN EXECUTE 'UPDATE orders SET deleted_at = NULL WHERE id <= 5'; END $$",
            ):
                with suppress(psycopg.Error):
                    agent.execute(text.encode())
            # In one message all statements have the same time, so what it marks it goes on seeing; no more than that.
            with suppress(psycopg.Error):
                agent.execute(
                    "UPDATE orders SET deleted_at = statement_timestamp(), deleted_by_agent = 'mallory' WHERE id = 6;"
                    " UPDATE orders SET deleted_at = NULL, note = 'risen' WHERE id = 6"
                )
        found = lab.value(
            "SELECT count(*) FROM orders WHERE id <= 5 AND deleted_by_agent = 'x' AND deleted_at < now() - interval '1 hour'"
        )
        assert found == 5
        assert not lab.value("SELECT count(*) FROM orders WHERE note = 'risen'")
    finally:
        lab.owner.execute("UPDATE orders SET deleted_at = NULL, deleted_by_agent = NULL WHERE id <= 5")
