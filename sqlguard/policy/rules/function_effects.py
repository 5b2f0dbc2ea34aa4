"""Functions, operators, casts and aggregates that do more than compute."""

from collections.abc import Iterator

from sqlguard.policy import calls
from sqlguard.policy.context import Context
from sqlguard.policy.registry import QUERIES, rule
from sqlguard.policy.verdict import Finding
from sqlguard.statement.model import Session, Statement
from sqlguard.statement.walk import SETTER


@rule("function-effects", QUERIES)
def function_effects(statement: Statement, session: Session, context: Context) -> Iterator[Finding]:
    """
    Refuses calls of functions that are not known to be harmless, however they are spelled.

    ## Why
    `SELECT f(1)` can delete as well as DELETE can. Built-in functions are known one by one; users' functions
    pass when the policy lists them, or when their bodies only read.

    ## Finds
        SELECT pg_sleep(1)
        SELECT purge_all()
        SELECT a.purge_row FROM accounts a
        SELECT id FROM accounts WHERE id === 1
        SELECT 'x'::text::money_kind
        SELECT repeat('x', 1000000000)

    ## Ignores
        SELECT lower(email), count(*) FROM accounts GROUP BY 1
        SELECT replace(owner_name, 'a', 'b') FROM accounts
        SELECT (ROW(1, 2)).f1

    ## Misses
    Functions called by column defaults, checks, triggers and index expressions: their owner put them there.
    """
    # An INSERT draws numbers from sequences whether it names them or not.
    inserts = any(w.op == "insert" for w in statement.writes)
    seen: set[tuple[str, str | None]] = set()
    for call in statement.calls:
        if call.builtin and (call.name == SETTER or (call.name == "nextval" and inserts)):
            continue
        found = calls.objection(call, context, session.search_path)
        if found is None or (found.message, found.hint) in seen:
            continue
        seen.add((found.message, found.hint))
        yield Finding(
            "function-effects", found.effect, found.message, found.hint, found.detail, found.sqlstate
        )
