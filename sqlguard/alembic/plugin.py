"""
How Alembic finds sqlguard: as a plugin since 1.18, by the global registries before.

The entry point is loaded in the middle of Alembic's own import, when `alembic.autogenerate` is half there, and
in every program that imports Alembic. So this module names what carries the operations out and imports it at
the first use; nothing that it or the package imports at the top may ask `alembic.autogenerate` for names.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from alembic.autogenerate.render import renderers
from alembic.operations import Operations

from sqlguard.alembic.operations import GuardOp, LoosenOp, UnguardOp

#: Within the namespace that `autogenerate_plugins` switches on by default; `~` before it switches it off.
NAME = "alembic.autogenerate.sqlguard"


def setup(plugin: Any) -> None:
    """Register the comparators with *plugin*: Alembic's protocol for plugins."""
    from alembic.util import DispatchPriority  # noqa: PLC0415 (not there before 1.18)

    first, last = DispatchPriority.FIRST, DispatchPriority.LAST
    plugin.add_autogenerate_comparator(_later("compare", "leave_out_sqlguard"), "schema", priority=first)
    # Last: it reads what the comparison of tables has found.
    plugin.add_autogenerate_comparator(_later("compare", "compare_guards"), "schema", priority=last)


def register_operations() -> None:
    for op, word in ((GuardOp, "guard"), (UnguardOp, "unguard"), (LoosenOp, "loosen")):
        Operations.implementation_for(op)(_later("execute", word))
        renderers.dispatch_for(op)(_later("render", f"render_{word}"))


def register_comparator() -> None:
    """Register the comparators where no entry point did: before 1.18, or without an installation."""
    try:
        from alembic.autogenerate.compare import comparators  # noqa: PLC0415
    except ImportError:
        return  # Alembic is loading us at this moment, and will call `setup`
    try:
        from alembic.runtime import plugins  # noqa: PLC0415 (not there before 1.18)
    except ImportError:
        comparators.dispatch_for("schema")(_later("compare", "compare_guards"))
        return
    if NAME not in plugins._all_plugins:  # noqa: SLF001 (there is no question to ask instead)
        plugins.Plugin.setup_plugin_from_module(entry, NAME)


def _later(module: str, name: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        return getattr(import_module(f"sqlguard.alembic.{module}"), name)(*arguments)

    return call


class _Entry(ModuleType):
    """A module for Alembic from 1.19 on, and a collection of one module for 1.18, which iterates over it."""

    def __iter__(self) -> Iterator[ModuleType]:
        yield self


entry = _Entry(__name__, __doc__)
entry.setup = setup  # type: ignore[attr-defined]

register_operations()
