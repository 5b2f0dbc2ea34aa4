"""
Which settings a session may change, and to what.

The list is of what psql, psycopg, pgjdbc, asyncpg, SQLAlchemy, Django, node-postgres, Npgsql and poolers
send by themselves, and of what can only make the session's own answers look different or end sooner.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from sqlguard.policy.context import Context
from sqlguard.statement.model import Session, Statement
from sqlguard.task import ROLE_PREFIX


@dataclass(frozen=True, slots=True)
class Objection:
    message: str
    hint: str | None = None


Check = Callable[[tuple[str, ...], Context], str | None]


def _any(_values: tuple[str, ...], _context: Context) -> str | None:
    return None


def _one_of(*allowed: str) -> Check:
    def check(values: tuple[str, ...], _context: Context) -> str | None:
        if len(values) == 1 and values[0].lower() in allowed:
            return None
        return f"use {' or '.join(f'`{a}`' for a in allowed)}"

    return check


def _at_most(limit: Callable[[Context], timedelta | None]) -> Check:
    """A time-out may be lowered: above the policy's, or 0 (none at all), only where the policy has no limit."""

    def check(values: tuple[str, ...], context: Context) -> str | None:
        given = milliseconds(values[0]) if len(values) == 1 else None
        if given is None:
            return "write it in milliseconds, or as `5s` or `2min`"
        most = limit(context)
        if most is None:
            return None
        bound = int(most.total_seconds() * 1000)
        return None if 0 < given <= bound else f"a session may have at most {bound} ms"

    return check


_UNITS = {"us": 0.001, "ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000, "d": 86_400_000, "": 1}


def milliseconds(text: str) -> int | None:
    """Read a time as PostgreSQL does, rounded up; None when it is none."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([a-z]*)\s*", text)
    if match is None or match[2] not in _UNITS:
        return None
    value = float(match[1]) * _UNITS[match[2]]
    # What PostgreSQL would round to 0 would be no limit.
    return int(value) if value == int(value) else int(value) + 1


#: In a search_path: the schema that is called like the role. A task's role has none, so it finds nothing.
_OWN_SCHEMA = "$user"


def _search_path(values: tuple[str, ...], context: Context) -> str | None:
    if not any(schema.startswith(ROLE_PREFIX) for schema in context.catalog.schemas):
        values = tuple(value for value in values if value != _OWN_SCHEMA)
    # A shorter path finds the same relations or none, and a roll-back that undoes it changes no answer either:
    # so the guard may always resolve names with the policy's whole path.
    allowed = context.policy.defaults.search_path
    if values and values == allowed[: len(values)]:
        return None
    return f"use {', '.join(allowed)}, or write the schema in front of each name"


_YES = _one_of("on", "true", "yes", "1")
_SMALL_DIGITS = frozenset(str(n) for n in range(-15, 4))

ALLOWED: Mapping[str, Check] = {
    "application_name": _any,
    "client_encoding": _one_of("utf8", "utf-8", "unicode", "unicode_utf8"),
    "client_min_messages": _any,
    "datestyle": _any,
    "intervalstyle": _any,
    "timezone": _any,
    "extra_float_digits": lambda v, _: None if v and v[0] in _SMALL_DIGITS else "use -15 to 3",
    "bytea_output": _one_of("hex", "escape"),
    "lc_messages": _any,
    "lc_monetary": _any,
    "lc_numeric": _any,
    "lc_time": _any,
    "xmlbinary": _any,
    "xmloption": _any,
    "default_text_search_config": _any,
    "search_path": _search_path,
    "statement_timeout": _at_most(lambda c: c.policy.defaults.statement_timeout),
    "lock_timeout": _at_most(lambda c: c.policy.defaults.lock_timeout),
    "idle_in_transaction_session_timeout": _at_most(lambda c: c.policy.defaults.idle_in_transaction_timeout),
    "transaction_timeout": _at_most(lambda c: c.policy.defaults.max_ttl),
    # Their only safe values are the server's own defaults, which drivers like to repeat.
    "standard_conforming_strings": _YES,
    "row_security": _YES,
    "default_transaction_read_only": _YES,
    "transaction_read_only": _YES,
    "synchronous_commit": _YES,
    "default_transaction_deferrable": _any,
    "transaction_deferrable": _any,
    "default_transaction_isolation": _any,
    "geqo": _any,
    "jit": _any,
    "plan_cache_mode": _any,
    "sqlguard.reason": _any,
    "sqlguard.confidence": _any,
    "sqlguard.idempotency_key": _any,
    "sqlguard.step": _any,
    "sqlguard.dry_run": _one_of("on", "off", "true", "false", "yes", "no", "1", "0"),
}


def free(name: str) -> bool:
    """Whether the setting may have any value."""
    return ALLOWED.get(name) is _any


def _closed(name: str) -> Objection:
    own = ", ".join(f"`{known}`" for known in ALLOWED if known.startswith("sqlguard."))
    hint = f"settings of a task are {own}" if name.startswith("sqlguard.") else "leave the setting as it is"
    return Objection(f"`{name}` may not be changed here", hint)


def objection(name: str, values: tuple[str, ...], context: Context, *, local: bool) -> Objection | None:
    """Return why the setting *name* can't be given *values*, None when it can."""
    check = ALLOWED.get(name)
    if check is None:
        return _closed(name)
    if name == "search_path" and local:
        return Objection(
            "the search_path can't be set for one transaction", "write the schema in front of each name"
        )
    hint = check(values, context)
    return None if hint is None else Objection(f"`{name}` can't be set to that", hint)


def of_statement(statement: Statement, _session: Session, context: Context) -> Objection | None:
    """The same for a SET or RESET statement."""
    kind, name = statement.details["kind"], statement.subject or ""
    if kind == "VAR_RESET_ALL":
        return None
    if kind in ("VAR_RESET", "VAR_SET_DEFAULT"):
        # Back to what the role or the start of the session gave, which was decided then.
        return None if name in ALLOWED else _closed(name)
    if kind == "VAR_SET_MULTI":
        return _transaction(name, statement)
    values = statement.details["values"]
    if values is None or any(v is None for v in values):
        return Objection(f"`{name}` can only be set to a constant", "write the value out")
    return objection(name, values, context, local=statement.details["local"])


_MODES = frozenset({"transaction_isolation", "transaction_deferrable", "transaction_read_only"})


def _transaction(name: str, statement: Statement) -> Objection | None:
    modes = statement.details["modes"]
    if name == "transaction snapshot":
        return Objection("another session's snapshot can't be used here", "use the transaction's own")
    if set(modes) - _MODES:
        return Objection("these transaction modes are not known", "set the isolation level or READ ONLY")
    if modes.get("transaction_read_only") in ("0", "off"):
        return Objection(
            "a transaction can't be made READ WRITE after it has begun",
            "end it, then BEGIN without READ ONLY",
        )
    return None
