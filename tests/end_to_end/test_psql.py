"""psql through the proxy: its own commands, its own way of sending, and protocol 3.2 where it can."""

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from end_to_end.wired import Agent, Wired


def psql(world: Wired, agent: Agent, script: str, *flags: str, stop: bool = True, **environment: str) -> str:
    done = subprocess.run(
        [
            str(world.database.server.bindir / "psql"),
            "-X",
            *flags,
            *(["-v", "ON_ERROR_STOP=1"] if stop else []),
            agent.dsn,
        ],
        input=script,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not stop or done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(autouse=True)
def _has_psql(wired_world: Wired) -> None:
    if not (wired_world.database.server.bindir / "psql").exists():
        pytest.skip("these binaries come without psql")


#: The family of \d: what needs no more than the catalog. `\dconfig` is there since 15.
DESCRIBING = (
    "\\d", "\\d+", "\\d orders", "\\d+ customers", "\\dt+", "\\di+", "\\dv+", "\\ds+", "\\df", "\\df+", "\\dn+", "\\dp",
    "\\dp orders", "\\ddp", "\\du+", "\\dT+", "\\dx+", "\\dD", "\\dc", "\\dC", "\\do+", "\\da", "\\dA+", "\\dL", "\\dP",
    "\\dRp", "\\dO", "\\dF+", "\\dFd", "\\dFp", "\\dFt", "\\dm", "\\dE", "\\dS pg_class", "\\l", "\\sf+ lower(text)", "\\z",
    "\\encoding", "\\dconfig work_mem", "\\dg", "\\det", "\\des", "\\dew", "\\dy", "\\dX", "\\dAc", "\\dAf", "\\dAo", "\\dAp",
)  # fmt: skip


def test_describing(wired_world: Wired, agent: Agent) -> None:
    """As the same role sees it without the guard between, byte for byte."""
    script = "".join(f"\\echo {word.replace(chr(92), '')}\n{word}\n" for word in DESCRIBING)
    said = psql(wired_world, agent, script)
    assert "orders_customer_id_fkey" in said
    assert said == psql(wired_world, replace(agent, port=wired_world.database.server.port), script)


def test_what_shows_more_than_the_schema(wired_world: Wired, agent: Agent) -> None:
    for word in ("\\db", "\\dl", "\\dRs", "\\drds"):
        said = psql(wired_world, agent, f"{word}\n", stop=False)
        assert "this needs an approval" in said, word
    assert "shows more than the database's schema" in psql(wired_world, agent, "\\deu\n", stop=False)


def test_pg_dump_is_told_no(wired_world: Wired, agent: Agent) -> None:
    """It switches time-outs and row security off and reads the columns that the guard keeps: it is the operator's."""
    done = subprocess.run(
        [str(wired_world.database.server.bindir / "pg_dump"), "--schema=public", agent.dsn],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "HINT" in done.stderr
    assert wired_world.outcomes(agent) == ["refused"]
    said = psql(wired_world, agent, "BEGIN;\nLOCK TABLE orders IN ACCESS SHARE MODE;\n", stop=False)
    assert "LOCK acts on the server or on other sessions" in said


def test_statements_and_their_tags(wired_world: Wired, agent: Agent) -> None:
    said = psql(
        wired_world,
        agent,
        "DELETE FROM customers WHERE id = 95 RETURNING id;\nUPDATE orders SET note = 'x' WHERE id = 50;\n"
        "BEGIN;\nDELETE FROM customers WHERE id = 96;\nROLLBACK;\nSELECT count(*) FROM customers WHERE id IN (95, 96);\n",
        "-At",
    )
    assert said.splitlines() == ["95", "DELETE 1", "UPDATE 1", "BEGIN", "DELETE 1", "ROLLBACK", "1"]


def test_errors_show_where(wired_world: Wired, agent: Agent) -> None:
    said = psql(
        wired_world,
        agent,
        "SELECT nmae FROM customers;\nSELECT 1;\nDROP TABLE orders;\nSELECT 2;\n",
        "-At",
        stop=False,
    )
    assert "LINE 1: SELECT nmae FROM customers;" in said
    assert "HINT" in said
    assert said.splitlines()[0] == "1"
    assert "2" in said.splitlines()


def test_copy(wired_world: Wired, agent: Agent, tmp_path: Path) -> None:
    out = tmp_path / "orders.csv"
    psql(wired_world, agent, f"\\copy (SELECT id, status FROM orders ORDER BY id) TO '{out}' CSV\n")
    assert out.read_text().count("\n") == 2400
    said = psql(
        wired_world, agent, f"\\copy plain (id, t) FROM '{out}' CSV\nSELECT count(*) FROM plain;\n", "-At"
    )
    assert said.splitlines()[-2:] == ["COPY 2400", "2400"]
    said = psql(
        wired_world,
        agent,
        f"\\copy plain (id, deleted_at) FROM '{out}' CSV\nSELECT 'on';\n",
        "-At",
        stop=False,
    )
    assert "kept by the database" in said
    assert "on" in said.splitlines()


def test_bind_and_pipelines(wired_world: Wired, agent: Agent) -> None:
    if wired_world.database.server.version < 16:
        pytest.skip("psql has \\bind since 16")
    said = psql(
        wired_world,
        agent,
        "DELETE FROM customers WHERE id = $1 \\bind 97 \\g\nSELECT $1::int + 1 \\bind 1 \\g\n",
        "-At",
    )
    assert said.splitlines() == ["DELETE 1", "2"]
    if wired_world.database.server.version < 18:
        return
    said = psql(
        wired_world,
        agent,
        "\\startpipeline\nSELECT 1 \\bind \\sendpipeline\nUPDATE orders SET note = $1 WHERE id = 51 \\bind piped \\sendpipeline\n"
        "\\syncpipeline\nSELECT note FROM orders WHERE id = 51 \\bind \\sendpipeline\n\\endpipeline\n"
        "SELECT id FROM orders WHERE id = $1 \\parse kept\n\\bind_named kept 7 \\g\n\\close_prepared kept\n",
        "-At",
    )
    assert [line for line in said.splitlines() if line] == ["1", "UPDATE 1", "piped", "7"]


def test_fetching_in_pieces(wired_world: Wired, agent: Agent) -> None:
    said = psql(wired_world, agent, "\\set FETCH_COUNT 100\nSELECT id FROM orders ORDER BY id;\n", "-At")
    assert said.splitlines() == [str(n) for n in range(1, 2401)]


def test_several_statements_on_one_line(wired_world: Wired, agent: Agent) -> None:
    said = psql(
        wired_world, agent, "SELECT 1\\; UPDATE orders SET note = 'y' WHERE id = 52\\; SELECT 2;\n", "-At"
    )
    assert said.splitlines() == ["1", "UPDATE 1", "2"]


@pytest.mark.parametrize("version", ["3.0", "3.2", "latest"])
def test_protocol_versions(wired_world: Wired, agent: Agent, version: str) -> None:
    if wired_world.database.server.version < 18:
        pytest.skip("libpq can choose since 18")
    said = psql(
        wired_world,
        agent,
        "SELECT 1;\nDELETE FROM customers WHERE id = 98;\n\\conninfo\n",
        "-At",
        PGMAXPROTOCOLVERSION=version,
    )
    assert said.splitlines()[:2] == ["1", "DELETE 1"]
    expected = "3.0" if version == "3.0" else "3.2"
    assert f"Protocol Version|{expected}" in said


def test_a_newer_client_than_the_server(wired_world: Wired, agent: Agent) -> None:
    """libpq 18 asks for 3.2; where the server is older it is told so, once."""
    from sqlguard.embedded.binaries import require_bindir  # noqa: PLC0415

    newest = require_bindir(18) / "psql"
    done = subprocess.run(
        [str(newest), "-XAt", "-c", "SELECT 1", agent.dsn],
        env={**os.environ, "PGMAXPROTOCOLVERSION": "latest"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_debians_psql(agent: Agent) -> None:
    found = shutil.which("psql")
    if found is None:
        pytest.skip("no psql is installed")
    done = subprocess.run(
        [found, "-XAt", "-c", "SELECT 1", agent.dsn], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
