"""
Users' functions that the policy does not list: passed only when their bodies are read and found harmless.

SQL and plpgsql bodies of functions that are declared IMMUTABLE or STABLE go through the same analysis and
the same rules as an agent's own statements. Dynamic SQL, SECURITY DEFINER and other languages do not pass.
"""

from collections.abc import Iterator
from typing import Any

import postgast

from sqlguard.catalog import Function
from sqlguard.errors import SqlguardError
from sqlguard.policy.context import Context
from sqlguard.policy.judge import decide
from sqlguard.policy.verdict import Effect
from sqlguard.statement import analyse
from sqlguard.statement.model import Kind, Session, Statement

#: Bodies that call one another are followed this far.
_DEPTH = 8
_READS = frozenset({Kind.SELECT, Kind.VALUES, Kind.EMPTY})


def objection(function: Function, context: Context) -> str | None:  # noqa: PLR0911  one line per reason
    """Return why *function* does not pass, None when it does."""
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
    session = _session(function, context)
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


def _session(function: Function, context: Context) -> Session | None:
    """Return the session its body runs in; None when its settings mean more than a search_path."""
    path = context.policy.defaults.search_path
    for setting in function.settings:
        name, _, value = setting.partition("=")
        if name != "search_path":
            return None
        path = tuple(part.strip().strip('"') for part in value.split(",") if part.strip())
        if "pg_catalog" in path and path[0] != "pg_catalog":
            return None
    return Session(search_path=tuple(p for p in path if p not in ("pg_catalog", "pg_temp")))


def _body(function: Function, session: Session, context: Context) -> str | None:
    if function.language == "sql":
        return _statements(_sql(function.source), session, context)
    for text in _plpgsql(function):
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


# --- plpgsql -----------------------------------------------------------------------------------------------

#: Statements of plpgsql that only compute and read; everything else does not pass.
_HARMLESS = frozenset(
    {
        "PLpgSQL_function",
        "PLpgSQL_stmt_block",
        "PLpgSQL_stmt_assign",
        "PLpgSQL_stmt_if",
        "PLpgSQL_if_elsif",
        "PLpgSQL_stmt_case",
        "PLpgSQL_case_when",
        "PLpgSQL_stmt_loop",
        "PLpgSQL_stmt_while",
        "PLpgSQL_stmt_fori",
        "PLpgSQL_stmt_fors",
        "PLpgSQL_stmt_foreach_a",
        "PLpgSQL_stmt_exit",
        "PLpgSQL_stmt_return",
        "PLpgSQL_stmt_return_next",
        "PLpgSQL_stmt_return_query",
        "PLpgSQL_stmt_raise",
        "PLpgSQL_raise_option",
        "PLpgSQL_stmt_assert",
        "PLpgSQL_stmt_perform",
        "PLpgSQL_stmt_execsql",
        "PLpgSQL_stmt_getdiag",
        "PLpgSQL_diag_item",
        "PLpgSQL_exception_block",
        "PLpgSQL_exception",
        "PLpgSQL_condition",
        "PLpgSQL_expr",
        "PLpgSQL_var",
        "PLpgSQL_type",
        "PLpgSQL_row",
        "PLpgSQL_rec",
        "PLpgSQL_recfield",
    }
)
#: RawParseMode of an expression: 0 a statement, 2 an expression, 3 to 5 assignments.
_STATEMENT = 0
_EXPRESSION = 2


def _plpgsql(function: Function) -> Iterator[str]:
    """Yield every SQL text of a plpgsql body as statements. Raises ValueError for what is not known."""
    arguments = ", ".join(function.arg_type_names)
    returns = "SETOF record" if function.returns_set else "record"
    quote = "$sqlguard_body$"
    if quote in function.source:
        raise ValueError(function.oid)
    text = f"CREATE FUNCTION f({arguments}) RETURNS {returns} LANGUAGE plpgsql AS {quote}{function.source}{quote}"
    yield from _texts(postgast.parse_plpgsql(text))


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, list):
        for item in node:
            yield from _texts(item)
    elif isinstance(node, dict):
        for name, value in node.items():
            if name.startswith("PLpgSQL_") and name not in _HARMLESS:
                raise ValueError(name)
            if name == "PLpgSQL_expr":
                yield _text(value)
            elif name == "dynquery":
                raise ValueError(name)
            else:
                yield from _texts(value)


def _text(expression: dict[str, Any]) -> str:
    query, mode = str(expression["query"]), expression.get("parseMode", _STATEMENT)
    if mode == _STATEMENT:
        return query
    if mode == _EXPRESSION:
        return f"SELECT {query}"
    # An assignment: `variable := expression`.
    target, sign, value = query.partition(":=")
    if not sign:
        target, sign, value = query.partition("=")
    if not sign or not target.strip():
        raise ValueError(query)
    return f"SELECT {value}"
