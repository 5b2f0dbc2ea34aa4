"""What a task may read of the server's own catalogs."""

from collections.abc import Iterator

from sqlguard.policy import catalogs
from sqlguard.policy.context import Context
from sqlguard.policy.registry import QUERIES, rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Session, Statement

_OURS = "sqlguard"


@rule("system-relations", QUERIES)
def system_relations(statement: Statement, _session: Session, _context: Context) -> Iterator[Finding]:
    """
    Lets catalogs be read that describe the database; asks or refuses where they show passwords, other
    sessions, samples of data or the server's configuration. The journal's own tables are not for agents.

    ## Why
    Agents and drivers look at the schema first, and need nothing beyond that.

    ## Finds
        SELECT * FROM pg_authid
        SELECT * FROM pg_stat_activity
        SELECT * FROM pg_catalog.pg_hba_file_rules

    ## Ignores
        SELECT relname FROM pg_class
        SELECT table_name FROM information_schema.tables

    ## Misses
    Extensions' views in other schemas are tables like any other: the policy grants them or not.
    """
    for write in statement.writes:
        if write.table.schema == _OURS:
            yield Finding(
                "system-relations",
                Effect.REFUSE,
                "the journal is not for agents to write",
                "leave its tables out",
            )
    for relation in statement.reads:
        if relation.schema == _OURS and relation.via is None:
            yield Finding(
                "system-relations",
                Effect.REFUSE,
                "the journal is not for agents to read",
                "leave its tables out",
            )
        if not relation.system:
            continue
        effect = catalogs.effect(relation.schema or "pg_catalog", relation.name)
        if effect is not Effect.ALLOW:
            yield Finding(
                "system-relations",
                effect,
                f"`{relation.name}` shows more than the database's schema",
                "use the catalogs that describe tables, such as pg_class or information_schema",
            )
