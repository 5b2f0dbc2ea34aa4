"""Relations that do not exist: answered as PostgreSQL would."""

from collections.abc import Iterator

from sqlguard.policy.context import Context
from sqlguard.policy.registry import QUERIES, rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Relation, Session, Statement


@rule("unknown-name", QUERIES)
def unknown_name(statement: Statement, _session: Session, _context: Context) -> Iterator[Finding]:
    """
    Refuses a statement about a relation that the catalog does not have.

    ## Why
    What is not known can't be judged. The answer is PostgreSQL's own, so that clients treat it as they are
    used to.

    ## Finds
        SELECT * FROM "Accounts"
        DELETE FROM nowhere WHERE id = 1

    ## Ignores
        SELECT * FROM accounts
        WITH nowhere AS (SELECT 1) SELECT * FROM nowhere

    ## Misses
    Nothing that the doors find: before they refuse a name, they look whether it was made since, once a second.
    """
    seen: set[Relation] = set()
    for relation in (*statement.reads, *(w.table for w in statement.writes if w.op != "call")):
        if relation.oid or relation.temporary or relation.system or relation in seen:
            continue
        seen.add(relation)
        yield Finding(
            "unknown-name",
            Effect.REFUSE,
            f'relation "{relation.shown}" does not exist',
            "check the name and its schema; names in double quotes keep their capitals; what was made just now is"
            " known within a second",
            sqlstate="42P01",
        )
