"""How the operations look in a generated revision: one line where it fits, a list where it does not."""

from collections.abc import Iterable
from typing import Any

from alembic.autogenerate.api import AutogenContext

from sqlguard.alembic.operations import GuardOp, LoosenOp, UnguardOp

#: Registers the operations; a revision must not depend on what env.py imports.
IMPORT = "import sqlguard.alembic  # op.guard_table and its kin"
_WIDTH = 78


def render_guard(context: AutogenContext, op: GuardOp) -> str:
    options: dict[str, Any] = {"schema": op.schema, "mode": op.mode}
    if op.unique != "partial":
        options["unique"] = op.unique
    options["accept"] = list(op.accept) or None
    options["fix_views"] = op.fix_views or None
    options["existing_mode"] = op.existing_mode
    return _call(context, "guard_table", op.tables, options)


def render_unguard(context: AutogenContext, op: UnguardOp) -> str:
    options = {"schema": op.schema, "purge": op.purge or None, "restore": op.restore or None}
    return _call(context, "unguard_table", op.tables, options)


def render_loosen(context: AutogenContext, op: LoosenOp) -> str:
    return _call(context, "loosen_guard", op.tables, {"schema": op.schema})


def _call(context: AutogenContext, function: str, tables: tuple[str, ...], options: dict[str, Any]) -> str:
    context.imports.add(IMPORT)
    prefix = context.opts.get("alembic_module_prefix") or ""
    keywords = [f"{name}={value!r}" for name, value in options.items() if value is not None]
    if len(tables) == 1:
        return f"{prefix}{function}({_comma([repr(tables[0]), *keywords])})"
    names = _comma(map(repr, tables))
    line = f"{prefix}{function}s({_comma([f'[{names}]', *keywords])})"
    if len(line) <= _WIDTH:
        return line
    rows = "".join(f"        {name!r},\n" for name in tables)
    return f"{prefix}{function}s(\n    [\n{rows}    ],\n" + "".join(f"    {k},\n" for k in keywords) + ")"


def _comma(parts: Iterable[str]) -> str:
    return ", ".join(parts)
