"""
Row types: a soft table's type has the hidden columns in it, wherever its values come from.
"""

from typing import Any

from sqlguard.errors import Refused
from sqlguard.rewrite.work import Work


def refuse_call(work: Work, call: Any) -> None:
    """Refuse an expression that calls a function which returns rows of a soft table; in FROM it may stand."""
    names = [n.string.sval for n in call.funcname]
    table = work.tables.returned_by(names)
    if table is not None:
        raise Refused(
            f"`{names[-1]}` returns whole rows of `{table.name}`",
            hint="call it in FROM and name the columns you want",
            rules=("function_reads_managed_table",),
        )


def refuse_cast(work: Work, cast: Any) -> None:
    """Refuse a cast to the row type of a soft table, which has more columns than an agent knows of."""
    names = [n.string.sval for n in cast.type_name.names]
    schema = names[-2] if len(names) > 1 else None
    catalog, path = work.tables.catalog, work.tables.session.search_path
    table = catalog.table(schema, names[-1], path) if names else None
    if table is not None and work.tables.is_soft(table):
        raise Refused(
            f"the row type of `{table.name}` is not the one you know",
            hint="use a record with a list of columns, or the columns themselves",
            rules=("bookkeeping_column_read",),
        )
