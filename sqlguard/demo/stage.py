"""Sets the demo's stage: embedded PostgreSQL, shop, migrations, policy, proxy; and clears it away again."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any

import psycopg
from alembic import command
from alembic.config import Config
from rich.console import Console

from sqlguard.demo.story import Stage
from sqlguard.dsn import url
from sqlguard.embedded import EmbeddedServer
from sqlguard.errors import NotConfigured
from sqlguard.policy import parse_policy
from sqlguard.policy.model import duration
from sqlguard.ports import free_port
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.tasks import open_task
from sqlguard.postgres.undo import undo

HERE = files("sqlguard.demo")
#: Seconds that the proxy may take to listen: a cold start compiles byte code.
_PATIENCE = 30.0


@contextmanager
def set_up(folder: Path, console: Console) -> Iterator[Stage]:
    """Yield a stage whose server and proxy end with the block."""
    began = time.monotonic()
    with EmbeddedServer.start(settings={"fsync": "off"}) as server:
        version = load(server)
        console.print(f"PostgreSQL {version} started, a shop of 9,128 rows loaded")
        done = migrate(server.dsn("shop"))
        console.print(
            f"[cyan]owner>[/] sqlguard migrate             [dim]{len(done)} migrations: the schema sqlguard[/]"
        )
        guard_the_shop(server.dsn("shop"))
        console.print(
            "[cyan]owner>[/] alembic upgrade head         [dim]op.guard_table for customers, orders, items …[/]"
        )
        with psycopg.connect(server.dsn("shop"), autocommit=True) as owner:
            apply_policy(
                owner, parse_policy(HERE.joinpath("policy.toml").read_text(encoding="utf-8"), "policy.toml")
            )
            console.print("[cyan]owner>[/] sqlguard policy apply support")
            with proxy(server.dsn("shop"), folder) as port:
                console.print(
                    f"[cyan]owner>[/] sqlguard serve               [dim]ready after {time.monotonic() - began:.1f} s[/]"
                )
                yield _stage(owner, server, port, console)


def load(server: EmbeddedServer) -> str:
    """Create the shop and return the server's version."""
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as conn:
        conn.execute("CREATE DATABASE shop")
    with psycopg.connect(server.dsn("shop"), autocommit=True) as conn:
        conn.execute(HERE.joinpath("shop.sql").read_bytes())
        return conn.info.parameter_status("server_version") or "?"


def guard_the_shop(dsn: str) -> None:
    """Run the demo's own Alembic migration, as a project of a user would."""
    config = Config()
    config.set_main_option("script_location", str(HERE.joinpath("migrations")))
    config.attributes["dsn"] = dsn
    command.upgrade(config, "head")


@contextmanager
def proxy(dsn: str, folder: Path) -> Iterator[int]:
    """Run `sqlguard serve` as a process of its own and yield its port."""
    with proxy_process(dsn, folder) as (port, _):
        yield port


@contextmanager
def proxy_process(dsn: str, folder: Path, **environment: str) -> Iterator[tuple[int, int]]:
    """Do the same with more settings, and yield port and process number."""
    port = free_port()
    log = folder / "proxy.log"
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
            [sys.executable, "-m", "sqlguard", "serve", "--listen", f"127.0.0.1:{port}"],
            env={**os.environ, "SQLGUARD_DSN": dsn, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        _wait_for(port, process, log)
        yield port, process.pid
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        try:
            psycopg.connect(
                host="127.0.0.1", port=port, user="nobody", dbname="shop", connect_timeout=2
            ).close()
        except psycopg.OperationalError as fault:
            if "refused" not in str(fault) or "sqlguard" in str(fault):
                return
        time.sleep(0.05)
    raise NotConfigured(
        "the proxy did not start", detail=log.read_text(encoding="utf-8", errors="replace")[-2000:]
    )


def _stage(owner: psycopg.Connection[Any], server: EmbeddedServer, port: int, console: Console) -> Stage:
    def task(ttl: str) -> dict[str, Any]:
        length = duration(ttl)
        assert isinstance(length, timedelta)  # noqa: S101 (the story's own texts)
        opened = open_task(owner, agent="demo-agent", policy="support", ttl=length, purpose="the demo")
        login = {"host": "127.0.0.1", "user": opened.role, "password": opened.password, "dbname": "shop"}
        return {
            "task": opened.task.id,
            "role": opened.role,
            "dsn": url(port=port, **login),
            "direct_dsn": url(port=server.port, **login),
        }

    return Stage(
        owner=owner,
        task=task,
        undo=lambda t: undo(owner, task=t).as_dict(),
        console=console,
        owner_dsn=server.dsn("shop"),
    )
