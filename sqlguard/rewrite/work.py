"""
What one rewrite works on and what it has found so far.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlguard.catalog import Table
from sqlguard.errors import Refused
from sqlguard.rewrite.edits import Edits
from sqlguard.rewrite.names import SoftTables
from sqlguard.rewrite.scope import Columns
from sqlguard.rewrite.source import Source

#: CTEs in sight, by name.
Ctes = Mapping[str, Columns]


@dataclass
class Work:
    """`marked`: tables with a DELETE that became an UPDATE; `keyed`: those that get rows with given keys."""

    source: Source
    tables: SoftTables
    #: Expressions, select lists and FROM are known to have nothing to change or to refuse (`plain`).
    only_deletes: bool = False
    edits: Edits = field(default_factory=Edits)
    marked: list[Table] = field(default_factory=list)
    keyed: list[Table] = field(default_factory=list)


def reads(column: str, table: str | None = None) -> Refused:
    """Return the refusal of a statement that looks at a bookkeeping column."""
    of = f" of `{table}`" if table else ""
    return Refused(
        f"column `{column}`{of} does not exist for you",
        hint="deleted rows are hidden already; leave the column out",
        rules=("bookkeeping_column_read",),
    )


def writes(column: str, table: str) -> Refused:
    """Return the refusal of a statement that sets a bookkeeping column."""
    return Refused(
        f"column `{column}` of `{table}` does not exist for you",
        hint="to delete rows, send a DELETE with a WHERE",
        rules=("bookkeeping_column_write",),
    )
