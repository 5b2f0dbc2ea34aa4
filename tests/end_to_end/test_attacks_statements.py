"""
Statements and pipelines that once got past the guard, or were refused without a reason, through the proxy.

A write that gets past it shows as a changed row without an entry in the journal.
"""

import psycopg
import pytest
from end_to_end.raw import Raw, bind, kinds, raw
from end_to_end.wired import Agent, Wired

from sqlguard.wire.messages import Bind, Close, Execute, FrontendMessage, Parse, Query, Sync

Batch = list[FrontendMessage]
Batches = list[Batch]


def _run(text: bytes) -> Batch:
    return [Parse(b"", text), bind(), Execute(b""), Sync()]


_READ = b"SELECT id FROM orders WHERE id < 3"
_WRITE = b"UPDATE orders SET note = 'unseen' WHERE id = 5 RETURNING id"
#: Makes the transaction of a pipeline writable, so that nothing behind it has to wait.
_OPENS = Parse(b"", b"UPDATE orders SET note = 'never run' WHERE id = 6")
#: Before BEGIN, then in the block: a name stands for a read when its use is judged, and for a write when it runs.
SWAPS: dict[str, tuple[Batches, Batches]] = {
    "a statement, EXECUTE in a Query": (
        [[Parse(b"n", _READ), Sync()]],
        [[_OPENS, Close(is_portal=False, name=b"n"), Parse(b"n", _WRITE), Query(b"EXECUTE n")]],
    ),
    "a statement, EXECUTE in a Parse": (
        [[Parse(b"n", _READ), Sync()]],
        [
            [_OPENS, Close(is_portal=False, name=b"n"), Parse(b"n", _WRITE), *_run(b"EXECUTE n")],
        ],
    ),
    "a portal, FETCH in a Query": (
        [[Parse(b"w", _WRITE), Parse(b"r", _READ), Sync()]],
        [
            [Bind(b"p", b"r"), Sync()],
            [_OPENS, Close(is_portal=True, name=b"p"), Bind(b"p", b"w"), Query(b"FETCH ALL FROM p")],
        ],
    ),
    "a portal, FETCH in a Parse": (
        [[Parse(b"w", _WRITE), Parse(b"r", _READ), Sync()]],
        [
            [Bind(b"p", b"r"), Sync()],
            [_OPENS, Close(is_portal=True, name=b"p"), Bind(b"p", b"w"), *_run(b"FETCH ALL FROM p")],
        ],
    ),
    "a statement, EXECUTE prepared before": (
        [[Parse(b"n", _READ), Sync()], [Parse(b"e", b"EXECUTE n"), Sync()]],
        [
            [Close(is_portal=False, name=b"n"), Parse(b"n", _WRITE), Sync()],
            [bind(statement=b"e"), Execute(b""), Sync()],
        ],
    ),
    "a statement, EXECUTE bound before": (
        [[Parse(b"n", _READ), Sync()], [Parse(b"e", b"EXECUTE n"), Sync()]],
        [
            [Bind(b"p", b"e"), Sync()],
            [Close(is_portal=False, name=b"n"), Parse(b"n", _WRITE), Sync()],
            [Execute(b"p"), Sync()],
        ],
    ),
    "a statement of SQL's, EXECUTE prepared before": (
        [[Query(b"PREPARE n AS " + _READ)], [Parse(b"e", b"EXECUTE n"), Sync()]],
        [
            [Query(b"DEALLOCATE n")],
            [Query(b"PREPARE n AS " + _WRITE)],
            [bind(statement=b"e"), Execute(b""), Sync()],
        ],
    ),
    "a statement, EXPLAIN ANALYZE EXECUTE prepared before": (
        [[Parse(b"n", _READ), Sync()], [Parse(b"e", b"EXPLAIN ANALYZE EXECUTE n"), Sync()]],
        [
            [Close(is_portal=False, name=b"n"), Parse(b"n", _WRITE), Sync()],
            [bind(statement=b"e"), Execute(b""), Sync()],
        ],
    ),
    "a cursor, FETCH prepared before": (
        [[Parse(b"w", _WRITE), Sync()]],
        [
            [Query(b"DECLARE p CURSOR FOR " + _READ)],
            [Parse(b"f", b"FETCH ALL FROM p"), Sync()],
            [Query(b"CLOSE p")],
            [Bind(b"p", b"w"), bind(statement=b"f"), Execute(b""), Sync()],
        ],
    ),
    # A roll-back to a savepoint does not open again what was closed behind it.
    "a cursor, closed behind a savepoint": (
        [[Parse(b"w", _WRITE), Sync()]],
        [
            [Query(b"DECLARE p CURSOR FOR " + _READ)],
            [Query(b"SAVEPOINT s")],
            [Query(b"CLOSE p")],
            [Query(b"ROLLBACK TO s")],
            [Bind(b"p", b"w"), Sync()],
            [Query(b"FETCH ALL FROM p")],
        ],
    ),
    "a cursor, closed by the protocol behind a savepoint": (
        [[Parse(b"w", _WRITE), Sync()]],
        [
            [Query(b"DECLARE p CURSOR FOR " + _READ)],
            [Query(b"SAVEPOINT s")],
            [Close(is_portal=True, name=b"p"), Sync()],
            [Query(b"ROLLBACK TO s")],
            [Bind(b"p", b"w"), Sync()],
            [Query(b"MOVE ALL FROM p")],
        ],
    ),
}


def _say(client: Raw, *batches: Batch) -> str:
    told = ""
    for batch in batches:
        client.send(*batch)
        told += kinds(client.until_ready())
    return told


def _journaled(world: Wired, agent: Agent, times: int = 1) -> None:
    """The row is as it was, or the journal says who changed it."""
    changed = world.value("SELECT note FROM orders WHERE id = 5") is not None
    assert world.outcomes(agent).count("committed") == times * changed


@pytest.mark.parametrize("name", SWAPS)
def test_a_name_that_is_given_to_a_write_meanwhile(name: str, wired_world: Wired, agent: Agent) -> None:
    before, inside = SWAPS[name]
    with raw(agent) as client:
        assert "E" not in _say(client, *before)
        _say(client, [Query(b"BEGIN")], *inside, [Query(b"COMMIT")])
    _journaled(wired_world, agent)


def test_what_is_prepared_in_the_same_pipeline_can_be_run(agent: Agent) -> None:
    """EXECUTE and FETCH wait until it is known what they run."""
    with raw(agent) as client:
        told = _say(
            client,
            [Parse(b"n", _READ), Bind(b"p", b"n"), *_run(b"FETCH ALL FROM p")],
            _run(b"EXECUTE n"),
        )
    assert told == "1212DDCZ12DDCZ"


@pytest.mark.parametrize("end", [b"COMMIT", b"ROLLBACK"])
def test_the_end_of_a_transaction_that_no_begin_opened(end: bytes, wired_world: Wired, agent: Agent) -> None:
    """In a pipeline it ends what was done since the last Sync: the journal must not say the contrary."""
    behind = b"UPDATE orders SET note = 'behind' WHERE id = 7"
    with raw(agent) as client:
        told = _say(client, [*_run(_WRITE)[:-1], *_run(end)[:-1], *_run(behind)])
        assert told == "12DC12NC12CZ"
    stands = end == b"COMMIT"
    changed = wired_world.owner.execute("SELECT id FROM orders WHERE note IN ('unseen', 'behind')").fetchall()
    assert ((5,) in changed, (7,) in changed) == (stands, True)
    assert wired_world.outcomes(agent) == ["committed" if stands else "rolled_back", "committed"]


def test_a_write_that_sql_has_prepared_is_executed_by_the_extended_protocol(
    wired_world: Wired, agent: Agent
) -> None:
    with raw(agent) as client:
        _say(client, [Query(b"PREPARE n AS " + _WRITE)])
        assert _say(client, _run(b"EXECUTE n")) == "12DCZ"
        assert (
            _say(client, [Parse(b"e", b"EXECUTE n"), bind(statement=b"e"), Execute(b""), Sync()]) == "12DCZ"
        )
    _journaled(wired_world, agent, 2)


def test_an_encoding_that_can_t_be_judged_is_refused_at_the_start(agent: Agent) -> None:
    with pytest.raises(psycopg.OperationalError, match="client_encoding `SJIS` is not accepted"):
        agent.connect(client_encoding="SJIS")


def test_a_query_behind_a_pipeline_without_a_sync(wired_world: Wired, agent: Agent) -> None:
    """PostgreSQL loses the write then, having answered it: the Sync is sent in between."""
    with raw(agent) as client:
        _say(client, [Query(b"SELECT 1")])
        for query in (b"SELECT 1", b"SELECT 0", b"SELECT 1; SELECT 2", b";"):
            assert _say(client, [*_run(_WRITE)[:-1], Query(query)], [Sync()], [Query(b"SELECT 2")])[-1] == "Z"
    _journaled(wired_world, agent, 4)


def test_one_name_in_two_encodings(wired_world: Wired, agent: Agent) -> None:
    """`é` is another byte in LATIN1 than in UTF8, and one name to PostgreSQL: what is judged is what runs."""
    with raw(agent, client_encoding="LATIN1") as client:
        latin, utf8 = b"\xe9", b"\xc3\xa9"
        _say(
            client,
            [Parse(latin, _READ), Sync()],
            [Query(b"SET client_encoding = 'UTF8'")],
            [Close(is_portal=False, name=utf8), Parse(utf8, _WRITE), Sync()],
            [Query(b"RESET client_encoding")],
            [Query(b"BEGIN")],
            [bind(statement=latin), Execute(b""), Sync()],
            [Query(b"COMMIT")],
        )
    _journaled(wired_world, agent)


def test_names_in_other_letters_are_names(agent: Agent) -> None:
    name = "größe".encode()
    with raw(agent) as client:
        assert _say(client, [Parse(name, _READ), Bind(name, name), Execute(name), Sync()]) == "12DDCZ"


def test_the_guard_s_own_name_is_taken(agent: Agent) -> None:
    """What an error of ours leaves prepared under it must not be the client's to run, with values of its own."""
    name = b"sqlguard own"
    with raw(agent) as client:
        assert _say(client, [Parse(name, _READ), Sync()]) == "EZ"
        assert _say(client, [Parse(b"", _READ), Bind(name, b""), Sync()]) == "1EZ"
        assert _say(client, [Query(b'PREPARE "sqlguard own" AS SELECT 1')]) == "EZ"


@pytest.mark.parametrize("whose", ["database", "role"])
def test_what_a_text_means_is_not_the_database_s_to_say(whose: str, wired_world: Wired, agent: Agent) -> None:
    """Where a backslash escapes a quote, a text that is one string to the guard is a write to PostgreSQL."""
    world, name = wired_world, agent.task.role if whose == "role" else wired_world.database.name
    settings = {
        "standard_conforming_strings": "off",
        "transform_null_equals": "on",
        "search_path": "pg_catalog",
    }
    for setting, value in settings.items():
        world.database.execute(f'ALTER {whose} "{name}" SET {setting} = {value}')
    try:
        with agent.connect() as conn:
            conn.execute("BEGIN")
            hidden = rb"SELECT 'a\' AS p, '; UPDATE orders SET note = $$unseen$$ WHERE id = 5 --' AS q"
            assert conn.execute(hidden).fetchone() == (
                "a\\",
                "; UPDATE orders SET note = $$unseen$$ WHERE id = 5 --",
            )
            conn.execute("COMMIT")
            for reset in ("SELECT 1", "RESET ALL", "DISCARD ALL", "RESET standard_conforming_strings"):
                conn.execute(reset.encode())
                assert conn.execute(r"SELECT 'a\'").fetchone() == ("a\\",)
                assert conn.execute("SELECT 1 WHERE NULL = NULL").fetchone() is None
                assert conn.execute("SHOW search_path").fetchone() == ("public",)
    finally:
        for setting in settings:
            world.database.execute(f'ALTER {whose} "{name}" RESET {setting}')
    _journaled(world, agent)
