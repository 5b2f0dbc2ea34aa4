"""
Fixtures: `server` and `database` are real PostgreSQL; `--pg 15,16,18` says which versions (default 18).

A test that takes `database` (or `server`) runs once for every version asked for. `chinook` and
`guard_schema` are the same database with the given data in it, if the data is beside the project.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import structlog
from servers import Database, Servers, create, fit_to_server, fresh_database, shared_folder

from sqlguard.embedded import EmbeddedServer
from sqlguard.postgres.migrate import migrate

ROOT = Path(__file__).resolve().parent.parent

# How long an example takes says something of the machine's other work only.
hypothesis.settings.register_profile(
    "sqlguard", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("sqlguard")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pg",
        default=os.environ.get("SQLGUARD_TEST_PG", "18"),
        help="PostgreSQL versions to test with, such as 15,16,18 (default: SQLGUARD_TEST_PG, or 18)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "server" in metafunc.fixturenames:
        versions = [int(part) for part in metafunc.config.getoption("--pg").split(",")]
        metafunc.parametrize(
            "server", versions, indirect=True, scope="session", ids=[f"pg{version}" for version in versions]
        )


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """A command that runs in the tests' own process sets up logging for all that come after it."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """The servers of this test process; they outlive the parameter changes of `server`."""
    running = Servers()
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="session")
def server(servers: Servers, request: pytest.FixtureRequest) -> EmbeddedServer:
    return servers.get(request.param)


@pytest.fixture
def database(server: EmbeddedServer) -> Iterator[Database]:
    with fresh_database(server) as made:
        yield made


@pytest.fixture
def migrated(database: Database) -> Database:
    """A database of the test's own with the schema `sqlguard`."""
    migrate(database.dsn)
    return database


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of given cases and data beside the project; a test that needs it skips without it."""
    folder = shared_folder(ROOT)
    if not folder.is_dir():
        pytest.skip(f"there is no folder `{folder.name}` beside the project")
    return folder


@pytest.fixture(scope="session")
def chinook_template(servers: Servers, server: EmbeddedServer, shared: Path) -> str:
    path = shared / "data" / "chinook.sql"
    if not path.is_file():
        pytest.skip("the Chinook sample database is not there")
    name = "template_chinook"
    if (server.version, name) not in servers.templates:
        create(server, name)
        Database(server, name).load(path.read_text(encoding="utf-8"), dsn=Database(server, name).owner_dsn)
        servers.templates.add((server.version, name))
    return name


@pytest.fixture
def chinook(server: EmbeddedServer, chinook_template: str) -> Iterator[Database]:
    """A database with the Chinook sample data, owned by `app_owner`."""
    with fresh_database(server, chinook_template) as made:
        yield made


@pytest.fixture
def guard_schema(database: Database, shared: Path) -> Database:
    """A database with the schema that the guard cases speak about; its roles begin with `sg_`."""
    path = shared / "corpus" / "guard_schema.sql"
    if not path.is_file():
        pytest.skip("the schema of the guard cases is not there")
    with database.connect() as conn:
        text, missing = fit_to_server(path.read_text(encoding="utf-8"), conn)
        if "cube" in missing:
            pytest.skip(f"PostgreSQL {database.server.version} is here without the extension cube")
        conn.execute(text)
    return database
