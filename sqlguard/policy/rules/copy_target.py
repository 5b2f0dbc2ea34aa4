"""COPY to and from files and programs of the server."""

from collections.abc import Iterator

from sqlguard.policy.context import Context
from sqlguard.policy.registry import rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Kind, Session, Statement


@rule("copy-target", (Kind.COPY_OUT, Kind.COPY_IN))
def copy_target(statement: Statement, _session: Session, _context: Context) -> Iterator[Finding]:
    """
    Refuses COPY to or from a file or program of the server, and COPY of a statement that writes.

    ## Why
    A file on the server outlives every roll-back, and a program is a shell.

    ## Finds
        COPY accounts TO '/tmp/out.csv'
        COPY (SELECT 1) TO PROGRAM 'cat'
        COPY (DELETE FROM orders WHERE id = 1 RETURNING id) TO STDOUT
        COPY kv FROM '/etc/passwd'
        COPY kv FROM PROGRAM 'cat /etc/passwd'

    ## Ignores
        COPY accounts TO STDOUT
        COPY (SELECT id FROM accounts) TO STDOUT
        COPY kv FROM STDIN

    ## Misses
    Nothing known.
    """
    if statement.details.get("program") or statement.details.get("file"):
        inward = statement.kind is Kind.COPY_IN
        yield Finding(
            "copy-target",
            Effect.REFUSE,
            f"COPY can't {'read' if inward else 'write'} files of the server here",
            "COPY … FROM STDIN" if inward else "COPY … TO STDOUT",
        )
    if statement.writes and statement.kind is Kind.COPY_OUT:
        yield Finding(
            "copy-target",
            Effect.REFUSE,
            "COPY can't carry out a statement that writes",
            "send the statement itself, with RETURNING",
        )
