"""Messages by hand: order, skipping, names, refusals in the middle, and what no driver sends."""

import pytest
from end_to_end.raw import Raw, bind, kinds, raw
from end_to_end.wired import Agent, Wired

from sqlguard.wire.messages import (
    PROTOCOL_3_2,
    BackendKeyData,
    Close,
    CommandComplete,
    DataRow,
    Describe,
    ErrorResponse,
    Execute,
    Flush,
    FunctionCall,
    NegotiateProtocolVersion,
    ParameterDescription,
    ParameterStatus,
    Parse,
    Query,
    ReadyForQuery,
    RowDescription,
    Sync,
    Terminate,
)

DELETE = b"DELETE FROM customers WHERE id = $1 RETURNING id"


def code(client: Raw, *messages: object) -> str:
    """Send and return the SQLSTATE of the one error that comes before ReadyForQuery."""
    client.send(*messages)  # type: ignore[arg-type]
    errors = [m for m in client.until_ready() if isinstance(m, ErrorResponse)]
    assert len(errors) == 1
    return (errors[0].get(b"C") or b"").decode()


def test_one_ready_for_query_per_sync_after_a_refusal(agent: Agent) -> None:
    with raw(agent) as client:
        client.send(
            Parse(b"", b"SELECT 1"),
            bind(),
            Execute(b""),
            Parse(b"", b"DROP TABLE orders"),
            bind(),
            Execute(b""),
            Parse(b"", b"SELECT 2"),
            bind(),
            Execute(b""),
            Sync(),
            Parse(b"", b"SELECT 3"),
            bind(),
            Execute(b""),
            Sync(),
        )
        assert kinds(client.until_ready()) == "12DCEZ"
        assert kinds(client.until_ready()) == "12DCZ"


def test_messages_sent_back_to_back(agent: Agent) -> None:
    with raw(agent) as client:
        client.send(*[Query(b"SELECT %d" % n) for n in range(200)])
        for n in range(200):
            rows = [m for m in client.until_ready() if isinstance(m, DataRow)]
            assert rows == [DataRow((b"%d" % n,))]


def test_reads_writes_and_refusals_back_to_back(wired_world: Wired, agent: Agent) -> None:
    with raw(agent) as client:
        for n in range(20):
            client.send(
                Query(b"UPDATE orders SET note = '%d' WHERE id = 60" % n),
                Query(b"DROP TABLE orders"),
                Query(b"SELECT note FROM orders WHERE id = 60"),
            )
        for n in range(20):
            assert kinds(client.until_ready()) == "CZ"
            assert kinds(client.until_ready()) == "EZ"
            assert DataRow((b"%d" % n,)) in client.until_ready()
    assert wired_world.outcomes(agent).count("committed") == 20


def test_a_rewritten_statement_is_described_as_the_client_wrote_it(agent: Agent) -> None:
    with raw(agent) as client:
        client.send(Parse(b"gone", DELETE), Describe(is_portal=False, name=b"gone"), Sync())
        found = client.until_ready()
        assert kinds(found) == "1tTZ"
        assert found[1] == ParameterDescription((23,))
        assert isinstance(found[2], RowDescription)
        assert [(c.name, c.type) for c in found[2].columns] == [(b"id", 23)]


def test_suspended_portals_and_row_limits(wired_world: Wired, agent: Agent) -> None:
    with raw(agent) as client:
        client.send(Parse(b"", b"SELECT id FROM orders ORDER BY id"), bind(portal=b"p"))
        client.send(Execute(b"p", 2), Execute(b"p", 2), Execute(b"p", 1), Sync())
        assert kinds(client.until_ready()) == "12DDsDDsDsZ"
        client.send(
            Parse(b"", b"DELETE FROM customers WHERE id IN (110, 111, 112) RETURNING id"), bind(portal=b"d")
        )
        client.send(Execute(b"d", 1), Execute(b"d", 0), Sync())
        found = client.until_ready()
        assert kinds(found) == "12DsDDCZ"
        assert found[-2] == CommandComplete(b"DELETE 2")
    assert wired_world.outcomes(agent) == ["committed"]


def test_names_that_were_never_decided_do_not_run(agent: Agent) -> None:
    with raw(agent) as client:
        assert code(client, bind(statement=b"nobody"), Execute(b""), Sync()) == "26000"
        assert code(client, Execute(b"nowhere"), Sync()) == "34000"
        assert (
            code(
                client,
                Parse(b"s", b"SELECT 1"),
                Close(is_portal=False, name=b"s"),
                bind(statement=b"s"),
                Sync(),
            )
            == "26000"
        )
        client.send(Parse(b"s", b"SELECT 1"), bind(portal=b"p", statement=b"s"), Sync())
        assert kinds(client.until_ready()) == "12Z"
        assert code(client, Execute(b"p"), Sync()) == "34000"


def test_a_close_that_was_skipped_closes_nothing(agent: Agent) -> None:
    with raw(agent) as client:
        client.send(Parse(b"s", b"SELECT 7"), Sync())
        client.until_ready()
        assert code(client, Parse(b"", b"SELEC"), Close(is_portal=False, name=b"s"), Sync()) == "42601"
        client.send(bind(statement=b"s"), Execute(b""), Sync())
        assert kinds(client.until_ready()) == "2DCZ"
        assert code(client, Parse(b"s", b"SELECT 8"), Sync()) == "42P05"
        client.send(bind(statement=b"s"), Execute(b""), Sync())
        assert DataRow((b"7",)) in client.until_ready()


def test_a_portal_of_a_write_can_not_be_swapped_for_a_read(wired_world: Wired, agent: Agent) -> None:
    with raw(agent) as client:
        client.send(
            Query(b"BEGIN"), Parse(b"w", DELETE), bind(portal=b"p", statement=b"w", values=(b"120",)), Sync()
        )
        client.until_ready()
        client.until_ready()
        client.send(Query(b"SAVEPOINT s"))
        client.until_ready()
        assert code(client, Parse(b"r", b"SELECT 1"), bind(portal=b"p", statement=b"r"), Sync()) == "42P03"
        client.send(Query(b"ROLLBACK TO s"), Execute(b"p"), Sync(), Query(b"COMMIT"))
        client.until_ready()
        assert kinds(client.until_ready()) == "DCZ"
        client.until_ready()
    assert wired_world.outcomes(agent) == ["committed"]
    assert wired_world.value("SELECT count(*) FROM customers WHERE id = 120 AND deleted_at IS NULL") == 0


def test_status_e_inside_a_block_and_its_end(agent: Agent) -> None:
    with raw(agent) as client:
        client.send(Query(b"BEGIN"))
        assert client.until_ready()[-1] == ReadyForQuery(b"T")
        client.send(Query(b"DROP TABLE orders"))
        assert client.until_ready()[-1] == ReadyForQuery(b"E")
        client.send(Query(b"COMMIT"))
        found = client.until_ready()
        assert found == [CommandComplete(b"ROLLBACK"), ReadyForQuery(b"I")]


def test_begin_write_commit_in_one_pipeline(wired_world: Wired, agent: Agent) -> None:
    with raw(agent) as client:
        for text in (
            b"BEGIN",
            b"UPDATE orders SET note = 'p' WHERE id = 61",
            b"SELECT note FROM orders WHERE id = 61",
            b"COMMIT",
        ):
            client.send(Parse(b"", text), bind(), Execute(b""))
        client.send(Parse(b"", b"UPDATE orders SET note = 'q' WHERE id = 62"), bind(), Execute(b""), Sync())
        assert kinds(client.until_ready()) == "12C12C12DC12C12CZ"
        client.send(Parse(b"", b"UPDATE orders SET note = 'r' WHERE id = 63"), bind(), Execute(b""))
        client.send(Parse(b"", b"SELECT 1/0"), bind(), Execute(b""), Sync())
        assert kinds(client.until_ready()) == "12C1EZ"  # PostgreSQL works constants out at Bind
    assert [wired_world.value(f"SELECT note FROM orders WHERE id = {n}") for n in (61, 62, 63)] == [
        "p",
        "q",
        None,
    ]
    assert wired_world.outcomes(agent) == ["committed", "committed", "failed"]


def test_a_read_before_a_write_in_one_pipeline(wired_world: Wired, agent: Agent) -> None:
    with raw(agent) as client:
        client.send(
            Parse(b"", b"SELECT 1"),
            bind(),
            Execute(b""),
            Parse(b"", DELETE),
            bind(values=(b"121",)),
            Execute(b""),
            Sync(),
        )
        assert kinds(client.until_ready()) == "12DC12DCZ"
    assert wired_world.value("SELECT count(*) FROM customers WHERE id = 121 AND deleted_at IS NULL") == 0


def test_flush_without_sync(agent: Agent) -> None:
    with raw(agent) as client:
        client.send(Parse(b"", DELETE), bind(values=(b"122",)), Execute(b""), Flush())
        assert kinds([client.message(), client.message(), client.message(), client.message()]) == "12DC"  # type: ignore[list-item]
        client.send(Sync())
        assert client.until_ready() == [ReadyForQuery(b"I")]


def test_the_function_call_message_is_refused(agent: Agent) -> None:
    with raw(agent) as client:
        assert code(client, FunctionCall(1598)) == "SG007"
        client.send(Query(b"SELECT 1"))
        assert kinds(client.until_ready()) == "TDCZ"


def test_a_query_in_the_middle_of_a_pipeline(wired_world: Wired, agent: Agent) -> None:
    with raw(agent) as client:
        client.send(
            Parse(b"", b"SELECT 1"),
            bind(),
            Execute(b""),
            Query(b"UPDATE orders SET note = 'mid' WHERE id = 64"),
            Sync(),
        )
        assert kinds(client.until_ready()) == "12DCCZ"
        assert client.until_ready() == [ReadyForQuery(b"I")]
    assert wired_world.value("SELECT note FROM orders WHERE id = 64") == "mid"


def test_empty_and_several_statements_in_a_parse(agent: Agent) -> None:
    with raw(agent) as client:
        client.send(Parse(b"", b""), bind(), Execute(b""), Sync(), Query(b""), Query(b" ; ; "))
        assert kinds(client.until_ready()) == "12IZ"
        assert kinds(client.until_ready()) == "IZ"
        assert kinds(client.until_ready()) == "IZ"
        assert code(client, Parse(b"", b"SELECT 1; SELECT 2"), Sync()) == "42601"


def test_the_client_is_told_of_a_writable_session(agent: Agent) -> None:
    client = Raw(agent.host, agent.port)
    try:
        greeting = client.log_in(agent)
        statuses = {m.name: m.value for m in greeting if isinstance(m, ParameterStatus)}
        assert statuses[b"default_transaction_read_only"] == b"off"
        assert statuses[b"sqlguard_proxy"] == b"on"
        keys = [m for m in greeting if isinstance(m, BackendKeyData)]
        client.send(Query(b"SELECT pg_backend_pid()"))
        assert DataRow((b"%d" % keys[0].pid,)) in client.until_ready()
    finally:
        client.close()


def test_protocol_options_and_versions_are_negotiated_once(wired_world: Wired, agent: Agent) -> None:
    client = Raw(agent.host, agent.port)
    try:
        greeting = client.log_in(agent, 3 << 16 | 9, **{"_pq_.one": "1", "_pq_.two": "2"})
        told = [m for m in greeting if isinstance(m, NegotiateProtocolVersion)]
        newest = PROTOCOL_3_2 if wired_world.database.server.version >= 18 else 3 << 16
        assert told == [NegotiateProtocolVersion(newest, (b"_pq_.one", b"_pq_.two"))]
        keys = [m for m in greeting if isinstance(m, BackendKeyData)]
        assert (len(keys[0].key) > 4) == (newest == PROTOCOL_3_2)
    finally:
        client.close()


def test_settings_that_can_not_be_brought_along(agent: Agent) -> None:
    for parameters in (
        {"search_path": "pg_temp"},
        {"options": "-c row_security=off"},
        {"options": "-crole=postgres"},
        {"replication": "database"},
        {"session_authorization": "postgres"},
    ):
        client = Raw(agent.host, agent.port)
        with pytest.raises(AssertionError) as caught:
            client.log_in(agent, **parameters)
        assert b"SG0" in repr(caught.value).encode()
        client.close()


def test_annotations_at_the_start_and_by_set(wired_world: Wired, agent: Agent) -> None:
    with raw(agent, **{"sqlguard.reason": "from the start", "application_name": "raw"}) as client:
        for text in (
            b"UPDATE orders SET note = 'a' WHERE id = 65",
            b"SET sqlguard.reason = 'later'",
            b"UPDATE orders SET note = 'b' WHERE id = 65 /*confidence='0.7',step='2'*/",
            b"BEGIN; SET LOCAL sqlguard.reason = 'inside'",
            b"UPDATE orders SET note = 'c' WHERE id = 65",
            b"COMMIT",
            b"UPDATE orders SET note = 'd' WHERE id = 65",
            b"SELECT set_config('sqlguard.reason', 'by function', false)",
            b"UPDATE orders SET note = 'e' WHERE id = 65",
            b"BEGIN; SET sqlguard.reason = 'lost'; ROLLBACK",
            b"UPDATE orders SET note = 'f' WHERE id = 65",
            b"RESET sqlguard.reason",
            b"UPDATE orders SET note = 'g' WHERE id = 65",
        ):
            client.send(Query(text))
            assert "E" not in kinds(client.until_ready()), text
    found = wired_world.actions(agent)
    assert [a["reason"] for a in found] == [
        "from the start",
        "later",
        "inside",
        "later",
        "by function",
        "by function",
        "from the start",
    ]
    assert (found[1]["confidence"], found[1]["step"]) == (0.7, "2")


def test_half_closed_clients_get_their_answers(wired_world: Wired, agent: Agent) -> None:
    with raw(agent) as client:
        client.send(
            Query(b"SELECT 1"), Query(b"UPDATE orders SET note = 'half' WHERE id = 66"), Query(b"SELECT 2")
        )
        client.socket.shutdown(1)
        assert kinds(client.rest()) == "TDCZCZTDCZ"
    assert wired_world.value("SELECT note FROM orders WHERE id = 66") == "half"


def test_terminate_ends_the_session(agent: Agent) -> None:
    with raw(agent) as client:
        client.send(Query(b"SELECT 1"), Terminate())
        assert kinds(client.rest()) == "TDCZ"


def test_nul_bytes(wired_world: Wired, agent: Agent) -> None:
    with raw(agent) as client:
        client.send(
            Parse(b"", b"SELECT $1::bytea", (17,)),
            bind(formats=(1,), values=(b"\0\1\0",), result_formats=(1,)),
            Execute(b""),
            Sync(),
        )
        assert DataRow((b"\0\1\0",)) in client.until_ready()
        assert code(
            client, Parse(b"", b"SELECT $1::text", (25,)), bind(values=(b"a\0b",)), Execute(b""), Sync()
        ) in ("22021", "22P05")


def test_a_server_that_ends_the_session_says_why(wired_world: Wired, agent: Agent) -> None:
    with raw(agent) as client:
        client.send(Query(b"SELECT pg_backend_pid()"))
        row = next(m for m in client.until_ready() if isinstance(m, DataRow))
        wired_world.database.execute(f"SELECT pg_terminate_backend({int(row.values[0] or b'0')})")
        told = client.rest()
        assert [m.get(b"C") for m in told if isinstance(m, ErrorResponse)] == [b"57P01"]


def test_a_prepared_statement_after_the_catalog_has_changed(wired_world: Wired, agent: Agent) -> None:
    from time import sleep  # noqa: PLC0415

    with raw(agent) as client:
        client.send(
            Parse(b"s", b"SELECT count(*) FROM staff"),
            Parse(b"w", b"UPDATE staff SET name = 'x' WHERE id = $1"),
            Sync(),
        )
        client.until_ready()
        wired_world.owner.execute("ALTER TABLE staff ADD COLUMN extra integer")
        try:
            sleep(1.0)
            client.send(
                bind(statement=b"s"),
                Execute(b""),
                Sync(),
                bind(statement=b"w", values=(b"1",)),
                Execute(b""),
                Sync(),
            )
            assert kinds(client.until_ready()) == "2DCZ"
            assert kinds(client.until_ready()) == "2CZ"
        finally:
            client.close()
            wired_world.owner.execute("ALTER TABLE staff DROP COLUMN extra")
