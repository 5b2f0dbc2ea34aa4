"""
How Alembic finds sqlguard: as a plugin since 1.18, by the global registries before.

The entry point is loaded in the middle of Alembic's own import, when `alembic.autogenerate` is half there; so
nothing here or in the modules it imports may ask that package for names at the top.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from alembic.autogenerate.render import renderers
from alembic.operations import Operations

from sqlguard.alembic import execute
from sqlguard.alembic.compare import compare_guards, leave_out_sqlguard
from sqlguard.alembic.operations import GuardOp, LoosenOp, UnguardOp
from sqlguard.alembic.render import render_guard, render_loosen, render_unguard

#: Within the namespace that `autogenerate_plugins` switches on by default; `~` before it switches it off.
NAME = "alembic.autogenerate.sqlguard"


def setup(plugin: Any) -> None:
    """Register the comparator with *plugin*: Alembic's protocol for plugins."""
    from alembic.util import DispatchPriority  # noqa: PLC0415 (not there before 1.18)

    plugin.add_autogenerate_comparator(leave_out_sqlguard, "schema", priority=DispatchPriority.FIRST)
    # Last: it reads what the comparison of tables has found.
    plugin.add_autogenerate_comparator(compare_guards, "schema", priority=DispatchPriority.LAST)


def register_operations() -> None:
    Operations.implementation_for(GuardOp)(execute.guard)
    Operations.implementation_for(UnguardOp)(execute.unguard)
    renderers.dispatch_for(GuardOp)(render_guard)
    Operations.implementation_for(LoosenOp)(execute.make_way)
    renderers.dispatch_for(UnguardOp)(render_unguard)
    renderers.dispatch_for(LoosenOp)(render_loosen)


def register_comparator() -> None:
    """Register the comparator where Alembic's entry points did not: before 1.18, or without an installation."""
    try:
        from alembic.autogenerate.compare import comparators  # noqa: PLC0415
    except ImportError:
        return  # Alembic is loading us at this moment, and will call `setup`
    try:
        from alembic.runtime import plugins  # noqa: PLC0415 (not there before 1.18)
    except ImportError:
        comparators.dispatch_for("schema")(compare_guards)
        return
    if NAME not in plugins._all_plugins:  # noqa: SLF001 (there is no question to ask instead)
        plugins.Plugin.setup_plugin_from_module(entry, NAME)


class _Entry(ModuleType):
    """A module for Alembic from 1.19 on, and a collection of one module for 1.18, which iterates over it."""

    def __iter__(self) -> Iterator[ModuleType]:
        yield self


entry = _Entry(__name__, __doc__)
entry.setup = setup  # type: ignore[attr-defined]

register_operations()
