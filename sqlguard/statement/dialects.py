"""
Texts of other databases' dialects, carried over to PostgreSQL's grammar so that the same rules can look at them.

This is a lint and weaker than what the doors do: sqlglot reads more leniently than any server, and what it writes
is judged, not what would run. Whatever can't be carried over whole is not understood, which is refused.
"""

import logging
from collections.abc import Iterator
from typing import Any

import sqlglot
from sqlglot import ErrorLevel, exp
from sqlglot.dialects.dialect import Dialect
from sqlglot.errors import SqlglotError

from sqlguard.errors import NotConfigured, NotUnderstood

#: As for PostgreSQL's own texts; sqlglot needs more time for a byte.
_LONGEST = 100_000
#: sqlglot descends by recursion; a text nested deeper than this is not written by a person.
_DEEPEST = 200
_CLOSES = {"(": 1, ")": -1, "[": 1, "]": -1}


def names() -> tuple[str, ...]:
    """Return the names that `carry_over` takes."""
    return tuple(sorted(name for name in Dialect.classes if name))


def carry_over(text: str, dialect: str) -> Iterator[tuple[str, str | NotUnderstood]]:
    """
    Yield each statement of *text* with its form in PostgreSQL's grammar, or why there is none.

    Raises NotConfigured for a dialect that is not known.
    """
    if dialect not in names():
        raise NotConfigured(
            f"`{dialect}` is no dialect that can be read", hint=f"one of {', '.join(names())}"
        )
    try:
        trees = _parse(text, dialect)
    except NotUnderstood as fault:
        yield text, fault
        return
    for tree in trees:
        original = tree.sql(dialect, comments=False)
        try:
            yield original, _written(tree)
        except NotUnderstood as fault:
            yield original, fault


def _parse(text: str, dialect: str) -> list[exp.Expr]:
    if len(text) > _LONGEST:
        raise NotUnderstood("the text is too long to be read", hint="send the statements one by one")
    # What sqlglot has to say about a statement that it does not know is said by the refusal.
    logging.getLogger("sqlglot").setLevel(logging.ERROR)
    try:
        _look_at_tokens(sqlglot.tokenize(text, read=dialect))
        found = sqlglot.parse(text, read=dialect, error_level=ErrorLevel.RAISE)
    except (SqlglotError, RecursionError, ValueError) as fault:
        lines = str(fault).splitlines() or [type(fault).__name__]
        raise NotUnderstood(
            f"the text can't be read as {dialect}: {lines[0]}", hint="check the dialect and the syntax"
        ) from None
    return [tree for tree in found if tree is not None and not isinstance(tree, exp.Semicolon)]


def _look_at_tokens(tokens: list[Any]) -> None:
    depth = 0
    for token in tokens:
        depth += _CLOSES.get(token.text, 0)
        if depth > _DEEPEST:
            raise NotUnderstood("the text is nested too deeply", hint="write it flatter")
        # MySQL and MariaDB run what stands in /*! … */; sqlglot takes it for a comment.
        if any(comment.startswith(("!", "M!")) for comment in token.comments):
            raise NotUnderstood(
                "the text has a comment that a server would run (`/*! … */`)", hint="write it without"
            )


def _written(tree: exp.Expr) -> str:
    if any(isinstance(node, exp.Command) for node in tree.walk()):
        raise NotUnderstood("the statement has no counterpart in PostgreSQL", hint="run it as the owner")
    tree = tree.copy()
    for table in tree.find_all(exp.Table):
        # A database's or project's name in front: PostgreSQL has no statement over several databases.
        table.set("catalog", None)
    try:
        return str(tree.sql("postgres", unsupported_level=ErrorLevel.RAISE, comments=False))
    except (SqlglotError, RecursionError, ValueError) as fault:
        lines = str(fault).splitlines() or [type(fault).__name__]
        raise NotUnderstood(
            f"the statement can't be carried over to PostgreSQL: {lines[0]}",
            hint="write it in PostgreSQL's SQL",
        ) from None
