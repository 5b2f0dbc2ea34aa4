"""
What an agent might try in order to write what no journal tells of, through the proxy.

Each test is one attack that once worked, or that would if its wall were taken away; confirmed in the database as its
owner sees it.
"""

import psycopg
import pytest
from end_to_end.attack_lab import Lab, intents, raw
from end_to_end.raw import bind, kinds
from end_to_end.wired import Agent

from sqlguard.wire.messages import Close, Execute, Parse, Query, Sync


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
