"""One guarded shop with a running proxy per module and PostgreSQL version: starting one takes seconds."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import fresh_database

from sqlguard.embedded import EmbeddedServer

from end_to_end.shop import Task, World, shop_world


@pytest.fixture(scope="module")
def shop(server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with fresh_database(server) as database, shop_world(database, tmp_path_factory.mktemp("shop")) as world:
        yield world


@pytest.fixture
def task(shop: World) -> Iterator[Task]:
    opened = shop.task()
    yield opened
    shop.run("undo", "--task", opened.id)
    shop.run("task", "end", opened.id)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
