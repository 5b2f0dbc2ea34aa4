"""What ties a session to its server connection: state on the server that can't be made again on another one."""

from sqlguard.plan import Decision
from sqlguard.statement.model import Kind, Statement

#: Session-level locks, the random seed, settings by function, the session's own sequence values.
_TYING = frozenset(
    {
        "currval",
        "lastval",
        "pg_advisory_lock",
        "pg_advisory_lock_shared",
        "pg_try_advisory_lock",
        "pg_try_advisory_lock_shared",
        "set_config",
        "setseed",
    }
)


def ties(decision: Decision) -> bool:
    """Say whether the server remembers something of *decision* beyond its transaction that is not known here."""
    return _ties(decision.statement)


def _ties(statement: Statement) -> bool:
    if statement.kind in (Kind.LISTEN, Kind.PREPARE, Kind.CALL, Kind.DO):
        return True
    # What a function of the user's does nobody sees here.
    if any(call.candidates or call.name in _TYING for call in statement.calls):
        return True
    return statement.inner is not None and _ties(statement.inner)
