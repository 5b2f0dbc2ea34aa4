"""
Guards as Alembic operations: `op.guard_table`, `op.unguard_table`, `op.loosen_guard` and their plurals,
`op.add_soft_delete` and `op.drop_soft_delete`, with autogenerate.

Importing this package registers everything; docs/guarding.md shows the few lines for env.py.
"""

# First of all: Alembic loads its plugins, and so the modules below, in the middle of its own import.
import alembic  # noqa: F401

from sqlguard.alembic.declared import Declaration, declaration, declare_policies
from sqlguard.alembic.filters import include_name, include_object
from sqlguard.alembic.operations import GuardOp, LoosenOp, UnguardOp
from sqlguard.alembic.plugin import register_comparator

__all__ = [
    "Declaration",
    "GuardOp",
    "LoosenOp",
    "UnguardOp",
    "declaration",
    "declare_policies",
    "include_name",
    "include_object",
]

register_comparator()
