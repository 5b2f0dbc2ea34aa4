"""What operators do with a proxy: look at it, reload it, stop it, run several of it."""

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
import trustme
from end_to_end.serving import served
from end_to_end.wired import POLICY, Wired, wired_shop
from servers import fresh_database

from sqlguard.embedded import EmbeddedServer
from sqlguard.policy import parse_policy
from sqlguard.ports import free_port
from sqlguard.postgres.policy_apply import apply_policy


@pytest.fixture(scope="module")
def world(server: EmbeddedServer) -> Iterator[Wired]:
    with fresh_database(server) as database, wired_shop(database) as made:
        yield made


def get(port: int, page: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{page}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as fault:
        with fault:
            return fault.code, fault.read().decode()


def numbers(port: int) -> dict[str, float]:
    _, text = get(port, "/metrics")
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line and not line.startswith("#")
    }


def test_metrics_count_what_happens(world: Wired, tmp_path: Path) -> None:
    port = free_port()
    with served(world, tmp_path, "--metrics-listen", f"127.0.0.1:{port}") as (_, agent):
        assert get(port, "/healthz") == (200, "ok\n")
        assert get(port, "/readyz") == (200, "ready\n")
        assert get(port, "/nothing")[0] == 404
        with agent.connect(prepare_threshold=None) as conn:
            for _ in range(3):
                conn.execute(b"SELECT 1 AS counted")
            conn.execute("INSERT INTO plain (id, t) VALUES (700001, 'x')")
            conn.execute("DELETE FROM plain WHERE id = 700001")
            with pytest.raises(psycopg.DatabaseError):
                conn.execute("DROP TABLE plain")
            found = numbers(port)
        assert found['sqlguard_decisions_total{verdict="refuse"}'] == 1
        assert found['sqlguard_decisions_total{verdict="rewrite"}'] == 1
        assert found['sqlguard_decisions_total{verdict="allow"}'] >= 2
        assert found['sqlguard_decision_lookups_total{result="hit"}'] >= 2
        assert found["sqlguard_sessions"] == 1
        assert found["sqlguard_backends"] == 1
        assert found['sqlguard_leases{state="live"}'] >= 1
        assert found["sqlguard_journal_commit_seconds_count"] >= 2
        assert found["sqlguard_decision_seconds_count"] >= 3
        assert found["sqlguard_journal_lag_seconds"] < 5
        assert found['sqlguard_logins_total{outcome="ok"}'] >= 1


def test_an_open_transaction_is_given_time_at_the_end(world: Wired, tmp_path: Path) -> None:
    with served(world, tmp_path, "--shutdown-grace", "20") as (running, agent):
        idle = agent.connect()
        busy = agent.connect(autocommit=False)
        busy.execute("INSERT INTO plain (id, t) VALUES (700002, 'in time')")
        running.process.terminate()
        time.sleep(0.5)
        with pytest.raises(psycopg.OperationalError) as refused:
            idle.execute("SELECT 1")
        assert refused.value.sqlstate in ("57P01", None)
        with pytest.raises(psycopg.OperationalError):
            agent.connect(connect_timeout=3)
        busy.execute("UPDATE plain SET t = 'still in time' WHERE id = 700002")
        busy.commit()
        assert running.process.wait(timeout=10) == 0
        idle.close()
        busy.close()
    assert world.value("SELECT t FROM plain WHERE id = 700002") == "still in time"


def test_a_second_signal_cuts_the_time_short(world: Wired, tmp_path: Path) -> None:
    with served(world, tmp_path, "--shutdown-grace", "60") as (running, agent):
        busy = agent.connect(autocommit=False)
        busy.execute("SELECT 1")
        running.process.terminate()
        time.sleep(0.5)
        running.process.terminate()
        assert running.process.wait(timeout=15) == 0
        busy.close()


def test_certificates_are_read_again_without_dropping_clients(world: Wired, tmp_path: Path) -> None:
    def issue() -> trustme.CA:
        authority = trustme.CA()
        made = authority.issue_cert("127.0.0.1", "localhost")
        (tmp_path / "key.pem").write_bytes(made.private_key_pem.bytes())
        (tmp_path / "cert.pem").write_bytes(b"".join(b.bytes() for b in made.cert_chain_pems))
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        return authority

    issue()
    words = ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    strict: dict[str, Any] = {"sslmode": "verify-ca", "sslrootcert": str(tmp_path / "ca.pem")}
    with served(world, tmp_path, *words) as (running, agent), agent.connect(**strict) as first:
        issue()
        with pytest.raises(psycopg.OperationalError, match="certificate verify failed"):
            agent.connect(**strict)
        running.process.send_signal(signal.SIGHUP)
        time.sleep(1)
        with agent.connect(**strict, channel_binding="require") as second:
            assert second.execute("SELECT 2").fetchone() == (2,)
        (tmp_path / "cert.pem").write_text("no certificate")
        running.process.send_signal(signal.SIGHUP)
        time.sleep(1)
        with agent.connect(**strict) as third:
            assert third.execute("SELECT 3").fetchone() == (3,)
        assert first.execute("SELECT 1").fetchone() == (1,)


def test_a_new_version_of_a_policy_drops_nobody(world: Wired) -> None:
    """Who is connected goes on as before; a task that is opened from then on has the new one, without a reload."""
    changing = b"UPDATE orders SET status = 'paid' WHERE id = 11"
    with world.visiting() as before, before.connect() as conn:
        assert conn.execute(changing).statusmessage == "UPDATE 1"
        narrow = POLICY.replace("update = true", 'update = ["note"]')
        apply_policy(world.owner, parse_policy(narrow, "wired.toml"))
        try:
            assert conn.execute(changing).statusmessage == "UPDATE 1"
            with before.connect() as second:
                assert second.execute(changing).statusmessage == "UPDATE 1"
            with world.visiting() as after, after.connect() as third:
                with pytest.raises(psycopg.Error) as caught:
                    third.execute(changing)
                assert caught.value.sqlstate == "SG002"
                assert third.execute("UPDATE orders SET note = 'x' WHERE id = 12").statusmessage == "UPDATE 1"
        finally:
            apply_policy(world.owner, parse_policy(POLICY, "wired.toml"))
        assert conn.execute(changing).statusmessage == "UPDATE 1"


def test_a_unix_socket(world: Wired, tmp_path: Path) -> None:
    with served(world, tmp_path, "--unix-socket", str(tmp_path)) as (running, agent):
        with agent.connect(host=str(tmp_path)) as conn:
            assert conn.execute("SELECT 1").fetchone() == (1,)
        assert running.end() == 0, running.log.read_text()
    assert not list(tmp_path.glob(".s.PGSQL.*"))


def test_a_cancel_finds_its_session_in_any_worker(
    world: Wired, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also once the session has given its connection back, and only one worker knows where it is now."""
    monkeypatch.setenv("SQLGUARD_IDLE_RELEASE", "0.3")
    endless = "SELECT count(*) FROM generate_series(1, 90000) a, generate_series(1, 90000) b"
    with served(world, tmp_path, "--workers", "3") as (_, agent):
        for _ in range(6):
            with agent.connect() as conn:
                first = conn.execute("SELECT pg_backend_pid()").fetchone()
                for _ in range(100):
                    time.sleep(0.8)
                    if conn.execute("SELECT pg_backend_pid()").fetchone() != first:
                        break
                else:
                    raise AssertionError("it keeps its connection")
                timer = threading.Timer(0.3, conn.cancel_safe)
                timer.start()
                began = time.monotonic()
                with pytest.raises(psycopg.errors.QueryCanceled):
                    conn.execute(endless)
                assert time.monotonic() - began < 15
                timer.join()


def test_workers_share_the_statements_of_a_minute(world: Wired, tmp_path: Path) -> None:
    apply_policy(
        world.owner, parse_policy(POLICY + "\n[budgets]\nstatements_per_minute = 12\n", "wired.toml")
    )
    try:
        with served(world, tmp_path, "--workers", "2") as (running, _), ExitStack() as open_:
            agent = world.agent(port=running.port)
            conns = [open_.enter_context(agent.connect()) for _ in range(8)]
            codes = []
            for number in range(15):
                try:
                    conns[number % 8].execute("SELECT 1")
                except psycopg.Error as fault:
                    codes.append((number, fault.sqlstate))
            assert codes == [(n, "SG006") for n in (12, 13, 14)]
    finally:
        apply_policy(world.owner, parse_policy(POLICY, "wired.toml"))


def test_one_of_several_workers_is_killed_under_load(world: Wired, tmp_path: Path) -> None:
    """Nothing that was acknowledged is lost, the others go on, and clients that come again are served."""
    with served(world, tmp_path, "--workers", "2") as (running, agent):
        acknowledged: list[int] = []
        broken: list[str] = []
        stop = threading.Event()

        def work(first: int) -> None:
            number = first
            while not stop.is_set():
                with suppress(psycopg.OperationalError):
                    with agent.connect() as conn:
                        while not stop.is_set():
                            number += 1
                            try:
                                conn.execute(f"INSERT INTO plain (id, t) VALUES ({number}, 'kept')")
                            except psycopg.OperationalError as fault:
                                broken.append(str(fault))
                                raise
                            acknowledged.append(number)

        threads = [threading.Thread(target=work, args=(800_000 + 10_000 * n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        time.sleep(1.5)
        victim = children(running.process.pid)[0]
        os.kill(victim, signal.SIGKILL)
        before = len(acknowledged)
        time.sleep(3)
        stop.set()
        for thread in threads:
            thread.join()
        assert len(acknowledged) > before
        there = {row[0] for row in world.owner.execute("SELECT id FROM plain WHERE id >= 800000")}
        assert set(acknowledged) <= there
        journaled = world.value(
            f"SELECT count(*) FROM sqlguard.change_set WHERE task_id = '{agent.task.task.id}'"
        )
        assert journaled >= len(acknowledged)
        assert len(children(running.process.pid)) == 2
        assert victim not in children(running.process.pid)
        assert running.end() == 0


def children(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout
    return [int(line) for line in found.split()]


def test_check_says_what_is_wrong(world: Wired, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "sqlguard", "serve", "--check", "--dsn", world.database.owner_dsn]
    assert "ok" in subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    wrong = subprocess.run(
        [*words, "--tls-cert", "no.pem", "--tls-key", "no.pem"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert wrong.returncode != 0
    assert "--tls-cert" in wrong.stderr
