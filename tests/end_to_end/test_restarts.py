"""
PostgreSQL is restarted under load, as `pg_ctl restart` does it: agents that write, with keys and without, in
transactions, read and copy both ways are told what PostgreSQL tells, lose nothing that was acknowledged and go on by
themselves; the journal settles what it has not seen the end of.
"""

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from end_to_end.chaos_load import (
    OF_THE_KIND,
    CopiesIn,
    CopiesOut,
    KeyedWriter,
    Reader,
    Transactions,
    Writer,
    loaded,
    value,
    waited,
)
from end_to_end.inprocess import proxy
from end_to_end.wired import Wired, wired_shop
from psycopg.conninfo import make_conninfo
from servers import SETTINGS, fresh_database, in_memory, make_owner

from sqlguard.embedded import EmbeddedServer
from sqlguard.embedded.binaries import require_bindir
from sqlguard.janitor import Janitor
from sqlguard.postgres import journal
from sqlguard.postgres.reconcile import Reconciler
from sqlguard.proxy.sightings import Sightings

pytestmark = pytest.mark.slow

ALL = (Writer, KeyedWriter, Transactions, CopiesIn, CopiesOut, Reader)
UNSETTLED = """
    SELECT count(*) FROM sqlguard.action a WHERE a.verdict IN ('allow', 'rewrite')
    AND NOT EXISTS (SELECT FROM sqlguard.event e WHERE e.action_id = a.id AND e.kind <> 'started')"""
#: What `pg_ctl restart -m` sends the server's first process.
MODES = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}


@pytest.fixture(scope="module")
def world(server: EmbeddedServer) -> Iterator[Wired]:
    """A shop on a server that finds its data again."""
    settings = {**SETTINGS, "synchronous_commit": "on"}
    with ExitStack() as stack:
        stack.enter_context(in_memory())
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sqlguard-restart-")))
        home.chmod(0o755)
        bindir = require_bindir(server.version)
        own = stack.enter_context(EmbeddedServer.start(bindir, data_dir=home / "pg", settings=settings))
        make_owner(own)
        with fresh_database(own) as database, wired_shop(database) as made:
            yield made


def restart(world: Wired, mode: str) -> None:
    server = world.database.server
    first = int((server.data_dir / "postmaster.pid").read_text(encoding="ascii").split()[0])
    os.kill(first, MODES[mode])
    waited(lambda: not Path(f"/proc/{first}").exists())
    server._release()
    server._run_on_a_port(server.port)
    world.owner = world.database.connect(world.database.owner_dsn)


@pytest.mark.parametrize("mode", MODES)
def test_the_server_is_restarted(world: Wired, mode: str) -> None:
    if not Path("/proc/self").exists():
        pytest.skip("whether the server has ended is seen in /proc")
    with loaded(world, ALL) as workers:
        for _ in range(2):
            for worker in workers:
                worker.states_before = len(worker.states)
            restart(world, mode)
            waited(lambda: all(len(w.states) > w.states_before or w.wrong for w in workers))
    # The proxy's own connections have come back, too; what nobody saw the end of is settled by what is there.
    with Janitor(world.database.owner_dsn, interval=0.1, reconciler=Reconciler(timedelta())):
        waited(lambda: value(world, UNSETTLED) == 0)
    with psycopg.connect(world.database.dsn) as conn:
        assert journal.verify(conn).ok
        # Every row is an action's, and every action that is said to be committed has its rows.
        lost = (
            "SELECT id FROM plain EXCEPT SELECT r.key[1]::int FROM sqlguard.change_set c CROSS JOIN LATERAL"
        )
        lost += " sqlguard.row_changes(c.id) r WHERE c.table_name = 'plain' AND c.action_id IS NOT NULL"
        assert conn.execute(lost.encode()).fetchall() == []


@pytest.mark.parametrize("mode", MODES)
def test_who_listens_through_an_observing_proxy_is_told(world: Wired, mode: str) -> None:
    dsn = world.database.owner_dsn
    sightings = Sightings(dsn, "wired", ("nobody",))
    sightings.start()
    try:
        with proxy(dsn, sightings=sightings) as running:
            there = make_conninfo(dsn, port=running.port)
            with psycopg.connect(there, autocommit=True) as conn:
                conn.execute("LISTEN news")
                restart(world, mode)
                with pytest.raises(psycopg.OperationalError) as told:
                    list(conn.notifies(timeout=30))
                assert told.value.sqlstate in OF_THE_KIND
            with psycopg.connect(there, autocommit=True) as conn:
                conn.execute("LISTEN news; NOTIFY news, 'again'")
                assert [n.payload for n in conn.notifies(timeout=20, stop_after=1)] == ["again"]
    finally:
        sightings.stop()
