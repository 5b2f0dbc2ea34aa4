"""Embedded servers: closed to strangers, quick to go, and nothing left however their user ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import trustme

from sqlguard.embedded import EmbeddedServer, find_bindir, major_version
from sqlguard.embedded import account as accounts
from sqlguard.embedded.binaries import require_bindir
from sqlguard.embedded.home import sweep
from sqlguard.errors import NotConfigured

FAST = {"fsync": "off"}
#: Starts a server in a process of its own, says where, and waits.
CHILD = """
import sys, time
from pathlib import Path
from sqlguard.embedded import EmbeddedServer
folder = Path(sys.argv[1]) if sys.argv[1:] else None
server = EmbeddedServer.start(data_dir=folder, settings={"fsync": "off"})
print(server.dsn(), server.data_dir, server._keeper.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that the server's account can reach, unlike pytest's private ones under root."""
    path = tmp_path_factory.mktemp("server")
    if os.geteuid() == 0:
        for part in (path, *path.parents):
            if part.stat().st_uid == 0 and "pytest" in str(part):
                part.chmod(part.stat().st_mode | 0o011)
    return path


def test_it_answers_on_loopback_with_a_password_only() -> None:
    with EmbeddedServer.start(settings=FAST) as server:
        with psycopg.connect(server.dsn()) as conn:
            shown = conn.execute(
                "SELECT current_setting('listen_addresses'), current_setting('server_encoding'),"
                " (SELECT array_agg(DISTINCT auth_method) FROM pg_hba_file_rules),"
                " upper('é'), 'B' < 'a' COLLATE \"default\""
            ).fetchone()
        assert shown == ("127.0.0.1", "UTF8", ["scram-sha-256"], "É", True)
        for refused in ("wrong", ""):
            with pytest.raises(psycopg.OperationalError):
                psycopg.connect(server.dsn(user="postgres", password=refused))
        if server.socket_directory is not None:
            with pytest.raises(psycopg.OperationalError, match="password"):
                psycopg.connect(f"host={server.socket_directory} port={server.port} user=postgres")
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(server.dsn())
    assert not server.data_dir.parent.exists()
    server.stop()


def test_its_secrets_are_private() -> None:
    with EmbeddedServer.start(settings=FAST) as server:
        home = server.data_dir.parent
        password = home / "superuser-password"
        assert (password.stat().st_mode & 0o777, password.read_text()) == (0o600, server.password)
        assert server.data_dir.stat().st_mode & 0o077 == 0
        assert not (home / "initdb-password").exists()
        assert server.password not in Path(f"/proc/{server_pid(server.data_dir)}/cmdline").read_text()


def test_data_in_a_given_folder_stays(folder: Path) -> None:
    with EmbeddedServer.start(data_dir=folder / "kept", settings=FAST) as server:
        with psycopg.connect(server.dsn(), autocommit=True) as conn:
            conn.execute("CREATE TABLE t AS SELECT 7 AS n")
        with pytest.raises(NotConfigured, match="another process"):
            EmbeddedServer.start(data_dir=folder / "kept")
    with (
        EmbeddedServer.start(data_dir=folder / "kept", settings=FAST) as again,
        psycopg.connect(again.dsn()) as conn,
    ):
        assert conn.execute("SELECT n FROM t").fetchone() == (7,)


def test_the_server_goes_when_its_user_is_killed() -> None:
    child, _, data, _ = run_child()
    pid = server_pid(data)
    child.kill()
    child.wait()
    wait_until(lambda: not alive(pid))
    wait_until(lambda: not data.parent.exists())


def test_the_next_start_ends_what_was_left(folder: Path) -> None:
    child, _, data, keeper = run_child(str(folder / "kept"))
    orphan = server_pid(data)
    os.kill(keeper, signal.SIGKILL)
    child.kill()
    child.wait()
    assert alive(orphan)
    with EmbeddedServer.start(data_dir=folder / "kept", settings=FAST) as server:
        assert not alive(orphan)
        with psycopg.connect(server.dsn()) as conn:
            assert conn.execute("SELECT 1").fetchone() == (1,)


def test_temporary_folders_of_the_dead_are_swept() -> None:
    child, _, data, keeper = run_child()
    orphan = server_pid(data)
    with EmbeddedServer.start(settings=FAST) as living:
        os.kill(keeper, signal.SIGKILL)
        child.kill()
        child.wait()
        sweep(data.parent.parent)
        assert not alive(orphan)
        assert not data.parent.exists()
        assert living.data_dir.exists()


def test_a_pid_file_with_a_foreign_number_hurts_nobody(folder: Path) -> None:
    with EmbeddedServer.start(data_dir=folder / "kept", settings=FAST):
        pass
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as bystander:
        (folder / "kept" / "data" / "postmaster.pid").write_text(f"{bystander.pid}\n")
        try:
            with EmbeddedServer.start(data_dir=folder / "kept", settings=FAST):
                assert bystander.poll() is None
        finally:
            bystander.kill()


def test_a_certificate_works_where_the_server_has_openssl(folder: Path) -> None:
    bindir = find_bindir(15)
    if bindir is None:
        pytest.skip("no server with OpenSSL is installed")
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    certificate, key, trusted = (folder / name for name in ("crt", "key", "ca"))
    issued.cert_chain_pems[0].write_to_path(str(certificate))
    issued.private_key_pem.write_to_path(str(key))
    authority.cert_pem.write_to_path(str(trusted))
    with (
        EmbeddedServer.start(bindir, ssl=(certificate, key), settings=FAST) as server,
        psycopg.connect(server.dsn(), sslmode="verify-full", sslrootcert=str(trusted)) as conn,
    ):
        assert conn.pgconn.ssl_in_use


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(NotConfigured, match="did not start") as caught:
        EmbeddedServer.start(settings={"shared_buffers": "many"})
    assert "shared_buffers" in (caught.value.detail or "")


def test_a_port_that_is_taken_is_an_error_when_it_was_asked_for() -> None:
    with EmbeddedServer.start(settings=FAST) as server, pytest.raises(NotConfigured) as caught:
        EmbeddedServer.start(port=server.port)
    assert "in use" in (caught.value.detail or "")


def test_programs_that_the_account_can_not_reach_are_copied(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root runs the server as somebody else")
    account = accounts.choose()
    bindir = accounts.usable_bindir(require_bindir(18), account, folder / "first")
    private = folder / "private"
    private.mkdir(mode=0o700)
    package = bindir.parent.parent
    (private / package.name).symlink_to(package)
    (private / f"{package.name}.libs").symlink_to(package.with_name(f"{package.name}.libs"))
    hidden = private / package.name / "pginstall" / "bin"
    assert not account.can_run(hidden / "postgres", "--version")
    with EmbeddedServer.start(hidden, settings=FAST) as server, psycopg.connect(server.dsn()) as conn:
        assert server.bindir.is_relative_to(server.data_dir.parent)
        assert conn.execute("SELECT 1").fetchone() == (1,)


def test_a_closed_data_folder_is_an_error_that_says_so(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root runs the server as somebody else")
    private = folder / "private"
    private.mkdir(mode=0o700)
    with pytest.raises(NotConfigured, match="can't reach"):
        EmbeddedServer.start(data_dir=private / "data")


def test_a_bindir_without_programs_is_an_error(folder: Path) -> None:
    assert major_version(folder) is None
    with pytest.raises(NotConfigured, match="no working programs"):
        EmbeddedServer.start(folder)


def test_no_programs_at_all_names_the_extra() -> None:
    with pytest.raises(NotConfigured) as caught:
        require_bindir(9)
    assert "pip install 'sqlguard-pg[demo]'" in str(caught.value.hint)


def run_child(*arguments: str) -> tuple["subprocess.Popen[str]", str, Path, int]:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stdout is not None
    with child.stdout:
        dsn, data, keeper = child.stdout.readline().split()
    return child, dsn, Path(data), int(keeper)


def server_pid(data: Path) -> int:
    return int((data / "postmaster.pid").read_text().split("\n")[0])


def alive(pid: int) -> bool:
    """Tell whether *pid* runs; a process that waits for its parent has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: object, seconds: float = 20) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
