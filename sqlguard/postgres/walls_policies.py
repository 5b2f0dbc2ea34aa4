"""
Row-level security of a soft table: deleted rows don't exist for agents, and everything stays as it was for others.

The grace `= statement_timestamp()` lets the deleting UPDATE itself see its new rows (PostgreSQL applies SELECT
policies to them), so that RETURNING and the row count are right; the next statement no longer sees them. Only a
statement that could mark rows has it (`sqlguard.may_mark`, answered while planning): for all others PostgreSQL sees
the plain `deleted_at IS NULL`, and uses the partial indexes that guarding makes.
"""

from dataclasses import dataclass

from psycopg import sql

from sqlguard.postgres.walls_facts import Relation, RowPolicy
from sqlguard.postgres.walls_held import held_call
from sqlguard.postgres.walls_triggers import name_of

AGENTS = "sqlguard_agent"
_LIVE = "(deleted_at IS NULL)"
_LIVE_OR_NOW = "((deleted_at IS NULL) OR (deleted_at = statement_timestamp()))"
_SEEN = "((deleted_at IS NULL) OR (sqlguard.may_mark() AND (deleted_at = statement_timestamp())))"
_UNMARKED = "((deleted_at IS NULL) AND (deleted_by_agent IS NULL))"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A policy as PostgreSQL prints it; `command` is pg_policy.polcmd."""

    name: str
    command: str
    permissive: bool
    role: str
    using: str | None
    check: str | None

    def is_same(self, there: RowPolicy) -> bool:
        return (
            self.command == there.command
            and self.permissive == there.permissive
            and [self.role] == there.roles
            and self.using == there.using
            and self.check == there.check
        )


LIVE_ROWS = (
    Wanted("sqlguard_live_select", "r", permissive=False, role=AGENTS, using=_SEEN, check=None),
    Wanted("sqlguard_live_update", "w", permissive=False, role=AGENTS, using=_LIVE, check=_LIVE_OR_NOW),
    Wanted("sqlguard_live_delete", "d", permissive=False, role=AGENTS, using=_LIVE, check=None),
    Wanted("sqlguard_live_insert", "a", permissive=False, role=AGENTS, using=None, check=_UNMARKED),
)
#: Only where row-level security was not in use before: enabling it closes a table to everyone else.
EVERYONE = Wanted("sqlguard_everyone", "*", permissive=True, role="public", using="true", check="true")
HELD = "sqlguard_held_insert"
OURS = frozenset({*(p.name for p in (*LIVE_ROWS, EVERYONE)), HELD})
_COMMANDS = {"r": "SELECT", "w": "UPDATE", "d": "DELETE", "a": "INSERT", "*": "ALL"}


def policy_changes(relation: Relation, *, soft: bool) -> list[sql.Composed]:
    """Return what gives *relation* the policies of a soft table, or takes them away; empty when it is so."""
    there = {p.name: p for p in relation.policies if p.name in OURS}
    ours = EVERYONE.name in there
    wanted = []
    if soft:
        wanted = [*LIVE_ROWS, *_held(relation), *([EVERYONE] if ours or not relation.row_security else [])]
    elif ours and len(there) < len(relation.policies):
        # Row scopes of policies stay behind, and row-level security with them: others must go on seeing rows.
        wanted = [EVERYONE]
    statements = [_drop(relation, name) for name in there.keys() - {w.name for w in wanted}]
    for policy in wanted:
        old = there.get(policy.name)
        if old is None or not policy.is_same(old):
            if old is not None:
                statements.append(_drop(relation, policy.name))
            statements.append(_create(relation, policy))
    if soft and not relation.row_security:
        statements.append(_switch(relation, "ENABLE"))
    if not soft and ours and relation.row_security and len(there) == len(relation.policies):
        statements.append(_switch(relation, "DISABLE"))
    return statements


def _held(relation: Relation) -> list[Wanted]:
    call = held_call(relation)
    return [Wanted(HELD, "a", permissive=False, role=AGENTS, using=None, check=call)] if call else []


def _create(relation: Relation, policy: Wanted) -> sql.Composed:
    role = sql.SQL("PUBLIC") if policy.role == "public" else sql.Identifier(policy.role)
    return sql.SQL("CREATE POLICY {} ON {} AS {} FOR {} TO {}{}{}").format(
        sql.Identifier(policy.name),
        name_of(relation),
        sql.SQL("PERMISSIVE" if policy.permissive else "RESTRICTIVE"),
        sql.SQL(_COMMANDS[policy.command]),
        role,
        _clause("USING", policy.using),
        _clause("WITH CHECK", policy.check),
    )


def _clause(word: str, condition: str | None) -> sql.Composable:
    if condition is None:
        return sql.SQL("")
    return sql.SQL(f" {word} ({condition})")  # constants of this module, and a call with quoted names


def _drop(relation: Relation, name: str) -> sql.Composed:
    return sql.SQL("DROP POLICY {} ON {}").format(sql.Identifier(name), name_of(relation))


def _switch(relation: Relation, what: str) -> sql.Composed:
    return sql.SQL("ALTER TABLE {} {} ROW LEVEL SECURITY").format(
        name_of(relation), sql.SQL("ENABLE" if what == "ENABLE" else "DISABLE")
    )
