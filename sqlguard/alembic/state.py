"""
How the guarded tables of a database are: the mode of each, and what is not as guarding would leave it now.

The one idea: the comparator asks the very functions that guarding itself compares with, so that autogenerate
is quiet exactly when guarding again would change nothing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg

from sqlguard.alembic.filters import BOOKKEEPING
from sqlguard.catalog import BOOKKEEPING_COMMENT
from sqlguard.postgres import walls_unique, walls_views
from sqlguard.postgres.walls_facts import VERSION, Facts, Guarded, Index, Relation, read_facts
from sqlguard.postgres.walls_policies import policy_changes
from sqlguard.postgres.walls_triggers import trigger_changes, wanted_functions, wanted_triggers

_MIGRATED = "SELECT pg_catalog.to_regclass('sqlguard.guarded_table') IS NOT NULL"
_SHAPES = "SELECT r, sqlguard.shape_key(r::oid::regclass) FROM unnest(%s::bigint[]) AS r"


@dataclass(frozen=True, slots=True)
class State:
    """A guarded table; `stale` says what guarding again would mend, `replaced` are the indexes now partial."""

    schema: str
    name: str
    mode: str
    unique: str
    added_columns: tuple[str, ...] = ()
    replaced: tuple[Index, ...] = ()
    stale: tuple[str, ...] = field(default=())
    #: Views over it read with their owner's rights: they show deleted rows.
    owner_views: bool = False


def is_migrated(conn: psycopg.Connection[Any]) -> bool:
    """Whether the database has the schema `sqlguard`."""
    row = conn.execute(_MIGRATED).fetchone()
    return row is not None and bool(row[0])


def read_states(conn: psycopg.Connection[Any]) -> dict[tuple[str, str], State]:
    """Return every guarded table by schema and name; none where sqlguard was never migrated."""
    if not is_migrated(conn):
        return {}
    facts = read_facts(conn)
    modes = {guarded.relid: guarded.mode for guarded in facts.guarded.values()}
    shapes: dict[int, int] = {}
    if modes:
        shapes = dict(conn.execute(_SHAPES, [list(facts.relations)]).fetchall())
    reader = _Reader(conn, facts, modes, shapes)
    states = (reader.state(facts.relations[relid]) for relid in modes if relid in facts.relations)
    return {(state.schema, state.name): state for state in states}


@dataclass(frozen=True, slots=True)
class _Reader:
    conn: psycopg.Connection[Any]
    facts: Facts
    modes: Mapping[int, str]
    shapes: Mapping[int, int]

    def state(self, root: Relation) -> State:
        guarded = self.facts.guarded[root.oid]
        return State(
            root.schema,
            root.name,
            guarded.mode,
            guarded.options.get("unique", "partial"),
            tuple(c.name for c in root.columns if c.comment == BOOKKEEPING_COMMENT),
            tuple(filter(walls_unique.is_replacement, root.indexes)),
            tuple(self._stale(root, guarded)),
            owner_views=guarded.mode == "soft" and bool(walls_views.owner_views(self.conn, self.facts, root)),
        )

    def _stale(self, root: Relation, guarded: Guarded) -> Iterator[str]:
        tree = list(self.facts.tree(root))
        children = (self.facts.relations.get(key.child) for key in self.facts.keys_to(root))
        around = {relation.oid: relation for relation in (*tree, *children) if relation is not None}
        if (guarded.version, guarded.key_columns) != (VERSION, root.key_columns):
            yield "version"
        if any(self._triggers_differ(relation) for relation in around.values()):
            yield "triggers"
        if any(self._functions_differ(relation) for relation in around.values()):
            yield "functions"
        soft = guarded.mode == "soft"
        if any(policy_changes(relation, soft=soft) for relation in tree):
            yield "policies"
        if soft and any(relation.column(name) is None for relation in tree for name in BOOKKEEPING):
            yield "columns"
        if soft and guarded.options.get("unique") == "partial" and self._uniques_differ(root):
            yield "unique indexes"

    def _triggers_differ(self, relation: Relation) -> bool:
        return bool(trigger_changes(self.conn, relation, wanted_triggers(self.facts, relation, self.modes)))

    def _functions_differ(self, relation: Relation) -> bool:
        wanted = wanted_functions(
            self.conn, self.facts, relation, self.modes, shape=self.shapes[relation.oid]
        )
        return any(not function.is_same(self.facts.functions.get(function.name)) for function in wanted)

    def _uniques_differ(self, root: Relation) -> bool:
        return bool(walls_unique.convertible(self.facts, root) or walls_unique.invalid(self.facts, root))
