"""A streaming standby of a test's server."""

import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from servers import SETTINGS, in_memory

from sqlguard.embedded import EmbeddedServer

#: Statements are cancelled at once where the replay needs their rows; and it is told when it is done with them.
CONFLICTS = {"max_standby_streaming_delay": "0", "hot_standby_feedback": "off"}


@dataclass
class Standby:
    primary: EmbeddedServer
    server: EmbeddedServer

    def execute(self, text: str, dbname: str = "postgres") -> list[tuple[Any, ...]]:
        for _ in range(20):
            # What the replay is in the way of is cancelled at once here, our own questions too.
            with suppress(psycopg.errors.SerializationFailure):
                return self._execute(text, dbname)
        raise AssertionError("the replay is always in the way")

    def _execute(self, text: str, dbname: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.server.dsn(dbname), autocommit=True) as conn:
            cursor = conn.execute(text.encode())
            return cursor.fetchall() if cursor.description else []

    def pause(self) -> None:
        self.execute("SELECT pg_wal_replay_pause()")
        for _ in range(200):
            if self.execute("SELECT pg_get_wal_replay_pause_state()") == [("paused",)]:
                return
            time.sleep(0.05)
        raise AssertionError("the replay goes on")

    def go_on(self) -> None:
        self.execute("SELECT pg_wal_replay_resume()")

    def catch_up(self) -> None:
        """Wait until the standby has all that the primary has by now."""
        with psycopg.connect(self.primary.dsn(), autocommit=True) as conn:
            conn.execute("SELECT pg_switch_wal()")  # an end that has been flushed
            end = conn.execute("SELECT pg_current_wal_flush_lsn()").fetchone()
        assert end is not None
        for _ in range(400):
            if self.execute(f"SELECT pg_last_wal_replay_lsn() >= '{end[0]}'") == [(True,)]:
                return
            time.sleep(0.05)
        raise AssertionError("the standby does not catch up")


@contextmanager
def standby(primary: EmbeddedServer, **settings: str) -> Iterator[Standby]:
    """Run a standby of *primary*, which keeps what it needs by a slot; both go behind the block."""
    program = primary.bindir / "pg_basebackup"
    if not program.is_file():
        pytest.skip(f"there is no pg_basebackup of PostgreSQL {primary.version} here")
    slot = f"standby_{secrets.token_hex(4)}"
    with in_memory():
        folder = Path(tempfile.mkdtemp(prefix="sqlguard-standby-"))
    folder.chmod(0o755)
    try:
        copy = [
            program,
            "-D",
            folder / "data",
            "-R",
            "-X",
            "stream",
            "-C",
            "-S",
            slot,
            "-c",
            "fast",
            "--no-sync",
        ]
        done = subprocess.run(
            [*copy, "-d", primary.dsn()], capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
        account = primary._home.account
        for path in [folder / "data", *(folder / "data").rglob("*")]:
            account.give(path)
        (folder / "superuser-password").write_text(primary.password, encoding="ascii")
        server = EmbeddedServer.start(
            primary.bindir, folder, settings={**SETTINGS, "hot_standby": "on", **settings}
        )
        try:
            yield Standby(primary, server)
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _drop(primary, slot)


def _drop(primary: EmbeddedServer, slot: str) -> None:
    with psycopg.connect(primary.dsn(), autocommit=True) as conn:
        for _ in range(100):
            found = conn.execute(
                "SELECT active FROM pg_replication_slots WHERE slot_name = %s", [slot]
            ).fetchone()
            if found is None:
                return
            if not found[0]:
                conn.execute("SELECT pg_drop_replication_slot(%s)", [slot])
                return
            time.sleep(0.05)
    raise AssertionError("the standby's slot is still in use")
