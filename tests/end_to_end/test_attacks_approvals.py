"""
What an agent might try against approvals, caps, row scopes and deleted rows, through the proxy and straight.

Each test is one attack that once worked, or that would if its wall were taken away; confirmed in the database as its
owner sees it.
"""

from contextlib import suppress

import psycopg
import pytest
from end_to_end.attack_lab import Lab, raw, straight
from end_to_end.raw import Raw, bind
from end_to_end.wired import Agent

from sqlguard.wire.messages import PROTOCOL_3_0, Execute, Parse, Sync

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
        "SELECT sqlguard.keep_count('k', 'DELETE', 1)",
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
