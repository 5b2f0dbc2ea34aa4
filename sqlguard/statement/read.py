"""The way from a message's text to its statements."""

from sqlguard.catalog import Catalog
from sqlguard.errors import NotUnderstood, SqlguardError
from sqlguard.statement.kinds import statement_of
from sqlguard.statement.model import Kind, Session, Statement
from sqlguard.statement.text import parse


def analyse(text: str, catalog: Catalog, session: Session) -> tuple[Statement, ...]:
    """
    Return the statements of *text*, in order; one of Kind.EMPTY when there is none.

    Raises SyntaxFault when PostgreSQL's grammar does not accept the text, NotUnderstood when a part of it
    can't be judged. Nothing else: what goes wrong in here is not understood either.
    """
    try:
        parsed = parse(text)
        if not parsed:
            return (Statement(Kind.EMPTY, text, 0, len(text.encode())),)
        return tuple(statement_of(one, catalog, session) for one in parsed)
    except SqlguardError:
        raise
    except RecursionError:
        raise NotUnderstood(
            "the statement is nested too deeply",
            hint="use fewer nested parentheses, operators in a row or UNION arms",
            rules=("text-limits",),
        ) from None
    except Exception as fault:
        raise NotUnderstood(
            "the statement could not be judged", rules=(f"fault:{type(fault).__name__}",)
        ) from fault
