"""
Guards as Alembic operations: `op.guard_table`, `op.unguard_table`, `op.guard_tables`, `op.unguard_tables`,
`op.add_soft_delete` and `op.drop_soft_delete`, with autogenerate.

Importing this package registers everything; docs/guarding.md shows the few lines for env.py.
"""

from sqlguard.alembic.declared import Declaration, declaration, declare_policies
from sqlguard.alembic.filters import include_name, include_object
from sqlguard.alembic.operations import GuardOp, UnguardOp
from sqlguard.alembic.plugin import register_comparator

__all__ = [
    "Declaration",
    "GuardOp",
    "UnguardOp",
    "declaration",
    "declare_policies",
    "include_name",
    "include_object",
]

register_comparator()
