"""set_config() is SET in a function's clothes."""

from collections.abc import Iterator

from sqlguard.policy import setting
from sqlguard.policy.context import Context
from sqlguard.policy.registry import QUERIES, rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Session, Statement
from sqlguard.statement.walk import SETTER

_OURS = "sqlguard."


@rule("set-config", QUERIES)
def set_config(statement: Statement, _session: Session, context: Context) -> Iterator[Finding]:
    """
    Judges set_config() with constant arguments as the SET that it is, and refuses any other.

    ## Why
    Django and psql set the time zone and the like with it; it can as well set the role or the search_path.

    ## Finds
        SELECT set_config('role', 'sg_group', false)
        SELECT set_config('search_path', 'pg_temp', false)
        SELECT set_config(status, 'x', false) FROM accounts
        SELECT set_config('sqlguard.reason', status, false) FROM accounts

    ## Ignores
        SELECT set_config('TimeZone', 'UTC', false)
        SET TimeZone = 'UTC'

    ## Misses
    Nothing known.
    """
    for call in statement.calls:
        if call.name != SETTER or not call.builtin:
            continue
        name, value = (*call.values, None, None)[:2]
        # What ours are set to the guard has to know itself.
        if isinstance(name, str) and setting.free(name.lower()) and not name.lower().startswith(_OURS):
            continue
        if not isinstance(name, str) or not isinstance(value, str | int) or name.lower() == "search_path":
            yield Finding(
                "set-config",
                Effect.REFUSE,
                "set_config() may only set harmless settings to constant values here",
                "use SET with a constant",
            )
            continue
        found = setting.objection(name.lower(), (str(value),), context, local=False)
        if found is not None:
            yield Finding("set-config", Effect.REFUSE, found.message, found.hint)
