"""
Leases: the names, the times and the settings of a task's short-lived login roles.

Pure: the clock and all randomness are arguments. A lease ends with its task; a task may be renewed, never
past the moment that was fixed when it was opened.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

#: Both prefixes are in the triggers and policies of guarded databases: never change them.
GROUP_PREFIX = "sg_po_"
ROLE_PREFIX = "sg_tk_"
#: PostgreSQL cuts longer names.
LONGEST_NAME = 63
#: VALID UNTIL lies so much later, lest a server whose clock is a little ahead refuses the last log-in in time.
LOGIN_GRACE = timedelta(seconds=2)
#: What has been opening for so long has lost the process that was opening it.
OPENING_PATIENCE = timedelta(seconds=30)
#: How soon a lease that could not be removed is tried again.
RETRY_AFTER = timedelta(seconds=60)
SHORTEST_TTL = timedelta(seconds=1)


def role_name(task_id: str, suffix: str = "") -> str:
    """Return the login role of a task; *suffix* tells a further lease from the first."""
    return f"{ROLE_PREFIX}{task_id}" + (f"_{suffix}" if suffix else "")


def group_name(policy: str, version: int, database: int | None = None) -> str:
    """
    Return the name of a policy version's group role.

    Roles belong to the whole cluster: give *database*, its oid, when another database has taken the name.
    """
    return f"{GROUP_PREFIX}{policy}_{version}" + ("" if database is None else f"_{database}")


def expiry(now: datetime, ttl: timedelta, latest: datetime) -> datetime:
    """Return when a lease of *ttl* from *now* ends; ValueError when *ttl* is shorter than a second."""
    if ttl < SHORTEST_TTL:
        raise ValueError("a TTL has at least one second")
    # Far dates can't be added up: only what is less than the limit is.
    return latest if now >= latest or ttl >= latest - now else now + ttl


def valid_until(expires_at: datetime) -> datetime:
    """Return the VALID UNTIL of a role whose lease ends at *expires_at*."""
    return expires_at + LOGIN_GRACE


#: What has to hold for a text to mean to PostgreSQL what it means to the guard, whatever the database has set.
MEANING = (("standard_conforming_strings", "on"), ("transform_null_equals", "off"))


def settings(
    search_path: Sequence[str],
    statement_timeout: timedelta | None,
    lock_timeout: timedelta | None,
    idle_in_transaction_timeout: timedelta | None,
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """
    Return what a lease's sessions start with, as name and values; None leaves the server's own value.

    A session can change all of these: they help, and no wall depends on them. (But for `MEANING`, which the guard
    lets no session change.)
    """
    times = {
        "statement_timeout": statement_timeout,
        "lock_timeout": lock_timeout,
        "idle_in_transaction_session_timeout": idle_in_transaction_timeout,
    }
    found: list[tuple[str, tuple[str, ...]]] = [("search_path", tuple(search_path))] if search_path else []
    found += [(name, (value,)) for name, value in MEANING]
    found += [(name, (milliseconds(value),)) for name, value in times.items() if value is not None]
    return tuple(found)


def path_text(search_path: Sequence[str]) -> str:
    """Return a search_path as one value, quoted where it must be."""
    plain = frozenset("abcdefghijklmnopqrstuvwxyz_0123456789")
    return ", ".join(
        name if name and plain.issuperset(name) else '"' + name.replace('"', '""') + '"'
        for name in search_path
    )


def milliseconds(value: timedelta) -> str:
    """Return *value* as PostgreSQL takes a time setting; 0 would mean no limit, so that is 1 ms."""
    return f"{max(1, round(value / timedelta(milliseconds=1)))}ms"
