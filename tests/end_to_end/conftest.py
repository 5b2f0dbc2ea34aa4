"""One guarded shop with a running proxy per module and PostgreSQL version: starting one takes seconds."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from end_to_end.attack_lab import Lab, attacked
from end_to_end.shop import Task, World, shop_world
from end_to_end.wired import Agent, Wired, wired_shop
from servers import Database, fit_to_server, fresh_database
from structlog.typing import EventDict

from sqlguard.embedded import EmbeddedServer

NODE_PACKAGES = ("pg@8.23.0", "pg-cursor@2.22.1", "pg-copy-streams@7.0.0")


@pytest.fixture(scope="module")
def shop(server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with fresh_database(server) as database, shop_world(database, tmp_path_factory.mktemp("shop")) as world:
        yield world


@pytest.fixture
def task(shop: World) -> Iterator[Task]:
    opened = shop.task()
    yield opened
    shop.end(opened)


@pytest.fixture(scope="module")
def guard_schema_module(server: EmbeddedServer, shared: Path) -> Iterator[Database]:
    """The handed schema in a database of this module."""
    path = shared / "corpus" / "guard_schema.sql"
    if not path.is_file():
        pytest.skip("the schema of the guard cases is not there")
    with fresh_database(server) as database:
        with database.connect() as conn:
            text, missing = fit_to_server(path.read_text(encoding="utf-8"), conn)
            if "cube" in missing:
                pytest.skip(f"PostgreSQL {server.version} is here without the extension cube")
            conn.execute(text.encode())
        yield database


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


# By module: roles belong to the whole server, and the tests of leases count them.
@pytest.fixture(scope="module")
def wired_world(server: EmbeddedServer) -> Iterator[Wired]:
    with fresh_database(server) as database, wired_shop(database) as made:
        yield made


@pytest.fixture
def agent(wired_world: Wired) -> Iterator[Agent]:
    with wired_world.visiting() as visitor:
        yield visitor


@pytest.fixture(scope="session")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("node")
    (folder / "package.json").write_text('{"private": true}')
    done = subprocess.run(
        [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", *NODE_PACKAGES],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"node-postgres could not be installed: {done.stderr.strip()[-200:]}")
    return folder


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def lab(server: EmbeddedServer) -> Iterator[Lab]:
    with attacked(server) as made:
        yield made


@pytest.fixture
def mallory(lab: Lab) -> Iterator[Agent]:
    with lab.visit() as agent:
        yield agent


@pytest.fixture
def logged() -> Iterator[list[EventDict]]:
    """What is logged meanwhile. (`capture_logs` is for one thread's loggers that are made then.)"""
    entries: list[EventDict] = []
    processors = structlog.get_config()["processors"]
    before = list(processors)

    def keep(_: object, __: str, event: EventDict) -> EventDict:
        entries.append(dict(event))
        return event

    processors.insert(0, keep)
    try:
        yield entries
    finally:
        processors[:] = before
