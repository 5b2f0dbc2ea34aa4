"""EXPLAIN ANALYZE runs what it explains."""

from collections.abc import Iterator

from sqlguard.policy.context import Context
from sqlguard.policy.registry import rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Kind, Session, Statement

_READS = frozenset({Kind.SELECT, Kind.VALUES})
_PLANNED = _READS | {Kind.INSERT, Kind.UPDATE, Kind.DELETE, Kind.MERGE, Kind.EXECUTE}


@rule("explain-write", (Kind.EXPLAIN,))
def explain_write(statement: Statement, _session: Session, _context: Context) -> Iterator[Finding]:
    """
    Refuses EXPLAIN ANALYZE of anything that writes.

    ## Why
    It runs the statement, and EXPLAIN ANALYZE of CREATE TABLE AS persists even out of a READ ONLY transaction.

    ## Finds
        EXPLAIN ANALYZE DELETE FROM orders WHERE id = 1
        EXPLAIN (ANALYZE false, ANALYZE true) INSERT INTO kv VALUES ('a', 'b')
        EXPLAIN ANALYZE CREATE TEMP TABLE accounts AS SELECT 1 AS id

    ## Ignores
        EXPLAIN DELETE FROM orders WHERE id = 1
        EXPLAIN (ANALYZE, BUFFERS) SELECT * FROM accounts

    ## Misses
    Nothing known.
    """
    inner = statement.inner
    if inner is None or inner.kind not in _PLANNED:
        yield Finding(
            "explain-write", Effect.REFUSE, "EXPLAIN can't carry this out", "EXPLAIN the query itself"
        )
    elif statement.details.get("analyze") and (statement.writes or inner.details.get("into")):
        yield Finding(
            "explain-write",
            Effect.REFUSE,
            "EXPLAIN ANALYZE would carry the write out",
            "use EXPLAIN without ANALYZE, or preview the statement",
        )
