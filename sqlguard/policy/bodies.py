"""
Users' functions that the policy does not list: passed only when their bodies are read and found harmless.

SQL and plpgsql bodies of functions that are declared IMMUTABLE or STABLE go through the same analysis and
the same rules as an agent's own statements. Dynamic SQL, SECURITY DEFINER and other languages do not pass.
"""

import postgast

from sqlguard.catalog import Function
from sqlguard.errors import SqlguardError
from sqlguard.policy import plpgsql
from sqlguard.policy.context import Context
from sqlguard.policy.judge import decide
from sqlguard.policy.verdict import Effect
from sqlguard.statement import analyse
from sqlguard.statement.model import Kind, Session, Statement

#: Bodies that call one another are followed this far.
_DEPTH = 8
_READS = frozenset({Kind.SELECT, Kind.VALUES, Kind.EMPTY})
#: The catalog holds default arguments with every name qualified.
_NAMED = Session(search_path=())


def objection(  # noqa: PLR0911  one line per reason
    function: Function, context: Context, path: tuple[str, ...]
) -> str | None:
    """Return why *function* does not pass, None when it does; *path* is the search_path it is called with."""
    if function.kind == "p":
        return "is a procedure: what it does is not known"
    if function.kind != "f":
        return "is no plain function"
    if function.security_definer:
        return "runs with its owner's rights"
    if function.volatility == "v":
        return "may change data"
    if function.language not in ("sql", "plpgsql"):
        return f"is written in {function.language}, which can't be looked into"
    session = _session(function, path)
    if session is None:
        return "changes settings"
    open_ = context.judged.setdefault("open", [])
    if function.oid in open_:
        # Recursion: what is left of the body decides.
        return None
    if len(open_) >= _DEPTH:
        return "calls too many other functions"
    open_.append(function.oid)
    try:
        return _body(function, session, context)
    except (SqlguardError, postgast.PgQueryError, ValueError):
        return "has a body that can't be looked into"
    finally:
        open_.pop()


def _session(function: Function, path: tuple[str, ...]) -> Session | None:
    """Return the session its body runs in; None when its settings mean more than a search_path."""
    for setting in function.settings:
        name, _, value = setting.partition("=")
        if name != "search_path":
            return None
        path = tuple(part.strip().strip('"') for part in value.split(",") if part.strip())
        if "pg_catalog" in path and path[0] != "pg_catalog":
            return None
    return Session(search_path=tuple(p for p in path if p not in ("pg_catalog", "pg_temp")))


def _body(function: Function, session: Session, context: Context) -> str | None:
    if function.default_arguments:
        reason = _statements(f"SELECT {function.default_arguments}", _NAMED, context)
        if reason is not None:
            return reason
    if function.language == "sql":
        return _statements(_sql(function.source), session, context)
    for text in plpgsql.texts(function, session, context.catalog):
        reason = _statements(text, session, context)
        if reason is not None:
            return reason
    return None


def _sql(source: str) -> str:
    """A body in the standard's form is `RETURN expression` or `BEGIN ATOMIC … END`."""
    text = source.strip()
    upper = text.upper()
    if upper.startswith(("RETURN ", "RETURN(")):
        return f"SELECT {text[6:]}"
    if upper.startswith("BEGIN ATOMIC"):
        return text[len("BEGIN ATOMIC") :].removesuffix("END").removesuffix("end")
    return text


def _statements(text: str, session: Session, context: Context) -> str | None:
    for statement in analyse(text, context.catalog, session):
        reason = _reason(statement, session, context)
        if reason is not None:
            return reason
    return None


def _reason(statement: Statement, session: Session, context: Context) -> str | None:
    if statement.kind not in _READS or statement.writes or statement.locks_rows:
        return "changes data"
    found = decide(statement, session, context).decisive
    if found is not None and found.effect > Effect.ALLOW:
        return f"does what is not allowed here: {found.message}"
    return None
