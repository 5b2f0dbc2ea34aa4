"""Statements that are refused as a whole: what they are for, and what to do instead."""

from collections.abc import Iterator

from sqlguard.policy.context import Context
from sqlguard.policy.registry import rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Kind, Session, Statement

_KINDS = (
    Kind.DDL,
    Kind.TRUNCATE,
    Kind.DO,
    Kind.OTHER,
    Kind.LISTEN,
    Kind.CREATE_TEMP,
)
_WHY = {
    Kind.DDL: (
        "{verb} changes the schema, which agents do not",
        "describe the change for the operator's migration",
    ),
    Kind.TRUNCATE: (
        "TRUNCATE removes every row for good",
        "DELETE the rows that have to go, named by their key",
    ),
    Kind.DO: ("a DO block hides what it does", "send its statements one by one"),
    Kind.OTHER: ("{verb} acts on the server or on other sessions", "leave it to the operator"),
    Kind.LISTEN: ("LISTEN is not available here", "query for the news instead"),
    Kind.CREATE_TEMP: ("temporary tables are not available here", "use a WITH query"),
}


@rule("refused-kind", _KINDS)
def refused_kind(statement: Statement, _session: Session, _context: Context) -> Iterator[Finding]:
    """
    Refuses DDL, TRUNCATE, DO, maintenance, LISTEN and temporary tables, and says why.

    ## Why
    None of them can be undone row by row, and a task needs none of them. A temporary table would hide the
    table of that name from every later statement.

    ## Finds
        DROP TABLE accounts
        TRUNCATE accounts
        DO $$ BEGIN NULL; END $$
        VACUUM FULL accounts
        CREATE TEMP TABLE accounts (id int)

    ## Ignores
        SELECT 1
        DELETE FROM orders WHERE id = 1

    ## Misses
    Nothing: what is not listed here is refused without a reason.
    """
    message, hint = _WHY[statement.kind]
    verb = str(statement.details.get("verb", "this"))
    yield Finding("refused-kind", Effect.REFUSE, message.format(verb=verb), hint)
