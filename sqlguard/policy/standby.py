"""
Which reads a standby answers as the primary would: plain ones, of tables that are replicated, by functions that look at
nothing else.

What a standby refuses (row locks, sequences, transaction numbers) is left out here, and so is what is allowed there and
is another thing there: the server's and the session's own state, advisory locks, other servers, notifications.
"""

from sqlguard.catalog import Catalog
from sqlguard.functions import data
from sqlguard.functions.model import FunctionEffect
from sqlguard.policy import calls
from sqlguard.statement.model import Call, Kind, Relation, Statement

_KINDS = frozenset({Kind.SELECT, Kind.VALUES, Kind.COPY_OUT})
#: Read out of the statement's own rows and arguments; the time and memory that some of them take is judged elsewhere.
_EFFECTS = frozenset({FunctionEffect.HARMLESS, FunctionEffect.DENIAL_OF_SERVICE})
#: Tables, partitioned ones, views and materialized ones. A foreign table is another server's.
_REPLICATED = frozenset("rpvm")
#: Stable functions with these beginnings tell of a server, a session or a transaction.
_OWN_STATE = (
    "pg_",
    "txid_",
    "inet_",
    "current_setting",
    "query_to_",
    "table_to_",
    "cursor_to_",
    "database_to_",
)


def is_standby_read(statement: Statement, catalog: Catalog) -> bool:
    """Say whether *statement*, which has been judged, may be run on a standby."""
    if statement.kind not in _KINDS or statement.is_write or statement.locks_rows:
        return False
    if statement.inner is not None and not is_standby_read(statement.inner, catalog):
        return False
    return all(_is_replicated(r, catalog) for r in statement.reads) and all(map(_is_steady, statement.calls))


def _is_replicated(relation: Relation, catalog: Catalog) -> bool:
    if relation.temporary or relation.system or relation.schema == "sqlguard":
        return False
    table = catalog.tables.get(relation.oid)
    return table is not None and table.kind in _REPLICATED


def _is_steady(call: Call) -> bool:
    """Say whether a call gives the same on both servers, as far as their rows are the same."""
    if call.candidates:
        return False  # a user's: what it does nobody sees here
    if calls.classify(call).effect not in _EFFECTS:
        return False
    if call.what != "function":
        return True
    entries = data.builtins().get((call.schema or "pg_catalog", call.name), ())
    fitting = [e for e in entries if e.takes(call.arguments)] or entries
    # No entry: syntax that is written like a function.
    return all(
        e.volatility == "i" or (e.volatility == "s" and not e.name.startswith(_OWN_STATE)) for e in fitting
    )
