"""Alembic loads the entry point in the middle of its own import: whatever comes first, all is registered once."""

import subprocess
import sys

import pytest
from alembic_world import PLUGINS

# Stands in for the installed entry point, so that the test does not depend on how the project was installed.
PROBE = """
import importlib.metadata as metadata

real = metadata.entry_points

class Entry:
    name = "alembic.autogenerate.sqlguard"

    def load(self):
        from sqlguard.alembic.plugin import entry
        return entry

metadata.entry_points = lambda **wanted: {installed} if wanted == {{"group": "alembic.plugins"}} else real(**wanted)

{first}
import alembic
import sqlguard.alembic
from alembic.autogenerate import renderers
from alembic.operations import Operations

try:
    from alembic.runtime.plugins import _all_plugins
except ImportError:
    from alembic.autogenerate.compare import comparators
    registered = [found.__module__ for found in comparators._registry["schema", "default"]]
    assert registered.count("sqlguard.alembic.plugin") == 1, registered
else:
    assert [name for name in _all_plugins if "sqlguard" in name] == ["alembic.autogenerate.sqlguard"]
assert all(hasattr(Operations, name) for name in (
    "guard_table", "guard_tables", "unguard_table", "unguard_tables", "add_soft_delete", "drop_soft_delete",
    "loosen_guard", "loosen_guards"))
assert renderers.dispatch(sqlguard.alembic.GuardOp(["a"]))
"""
FIRST = [
    "import alembic",
    "import alembic.autogenerate",
    "import alembic.operations",
    *(["import alembic.runtime.plugins"] if PLUGINS else []),
    "from alembic import op",
    "import sqlguard.alembic",
    "import sqlguard.alembic.plugin",
    "import sqlguard.alembic.compare",
    "import sqlguard.postgres.migrate",
]


@pytest.mark.parametrize("installed", ["[Entry()]", "[]"], ids=["entry point", "none"])
@pytest.mark.parametrize("first", FIRST)
def test_every_order_of_imports(first: str, installed: str) -> None:
    program = PROBE.format(first=first, installed=installed)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_importing_alembic_does_not_import_what_it_may_never_need() -> None:
    program = (
        "import sys, sqlguard.alembic; "
        "print([m for m in ('psycopg', 'pydantic', 'sqlglot', 'sqlguard.postgres') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
