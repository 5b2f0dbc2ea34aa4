"""sqlguard: nothing an agent sends can destroy data that its owner can't get back."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlguard.connection import GuardedConnection as GuardedConnection
    from sqlguard.connection import connect as connect
    from sqlguard.engine import create_async_engine as create_async_engine
    from sqlguard.engine import create_engine as create_engine
    from sqlguard.plan import Outcome as Outcome

__all__ = ["GuardedConnection", "Outcome", "connect", "create_async_engine", "create_engine"]
_HOME = {
    "GuardedConnection": "sqlguard.connection",
    "connect": "sqlguard.connection",
    "create_async_engine": "sqlguard.engine",
    "create_engine": "sqlguard.engine",
    "Outcome": "sqlguard.plan",
}


def __getattr__(name: str) -> Any:
    """Import the public names when they are asked for: the core must not pull in psycopg (STYLE 2.3)."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module `sqlguard` has no attribute `{name}`")
