"""
Uniqueness among live rows: unique indexes become partial, `WHERE deleted_at IS NULL`, where PostgreSQL can.

Order of steps, so that there is never a moment without the rule: the new index is built CONCURRENTLY under a
name of its own, found valid (or dropped and built again), and then takes the old one's place and name in one
short transaction. What it replaced is written in its comment, for `unguard`.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from psycopg import sql

from sqlguard.postgres.preflight import Note, Weight
from sqlguard.postgres.walls_facts import Facts, Index, Relation
from sqlguard.postgres.walls_run import Runner
from sqlguard.postgres.walls_triggers import name_of

_LIVE = "(deleted_at IS NULL)"
_COMMENT = "sqlguard replaces "


def is_live_only(index: Index) -> bool:
    """Whether *index* holds live rows only already."""
    return index.predicate is not None and (
        index.predicate == _LIVE or index.predicate.endswith(f" AND {_LIVE})")
    )


def is_replacement(index: Index) -> bool:
    """Whether *index* stands in the place of a constraint or an index over all rows."""
    return (index.comment or "").startswith(_COMMENT)


def original(index: Index, above: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """
    Return what a replacement stands for: `constraint` (its name, or None), `definition`, `predicate`, `tablespace`.

    A partition that came after the guard has an index that PostgreSQL made from that of the table *above*: it
    stands for what PostgreSQL would have made without the guard.
    """
    if is_replacement(index) or above is None:
        kept: dict[str, Any] = json.loads((index.comment or "").removeprefix(_COMMENT))
        return kept
    constraint = index.name if above["constraint"] else None
    predicate = (
        None if index.predicate == _LIVE else (index.predicate or "").removesuffix(f" AND {_LIVE})")[1:]
    )
    body = index.definition.removesuffix(f" WHERE {index.predicate}")
    return {
        "constraint": constraint,
        "definition": body if predicate is None else f"{body} WHERE {predicate}",
        "predicate": predicate,
        "tablespace": index.tablespace,
    }


def convertible(facts: Facts, root: Relation) -> list[tuple[Relation, Index]]:
    """Return the indexes to convert, with their tables; those of partitions go with their parent's."""
    return [
        (relation, index)
        for relation in facts.tree(root)
        for index in relation.indexes
        if not is_live_only(index) and index.parent_index is None and _reason_to_keep(index) is None
    ]


def invalid(facts: Facts, root: Relation) -> list[tuple[Relation, Index]]:
    """
    Return the indexes over live rows that some failed REINDEX or copy has left without force.

    Half-built replacements are not among them: `convert` drops those and builds them again.
    """
    return [
        (relation, index)
        for relation in facts.tree(root)
        for index in relation.indexes
        if is_live_only(index)
        and not index.valid
        and relation.kind == "r"
        and index.name not in {_new_name(i.name) for i in relation.indexes}
    ]


def rebuild(runner: Runner, relation: Relation, index: Index) -> None:
    """Build an *invalid* index anew, under its own name."""
    runner.run_concurrently(sql.SQL("REINDEX INDEX CONCURRENTLY {}").format(_in(relation, index.name)))


def unique_notes(facts: Facts, root: Relation, *, convert: bool) -> Iterator[Note]:
    """Say which unique values deleted rows keep, why, and whose ON CONFLICT will need a predicate."""
    for relation in facts.tree(root):
        for index in relation.indexes:
            if index.parent_index is not None:
                continue
            reason = "uniqueness is kept as asked" if not convert else _reason_to_keep(index)
            columns = ", ".join(index.columns) or "an expression"
            if index.is_primary:
                yield Note(
                    "primary_key_held_by_tombstone",
                    Weight.NOTE,
                    f"a deleted row keeps its primary key ({columns}) of `{relation.label}`",
                    "purge it to use the key again",
                )
            elif reason is not None:
                yield Note(
                    "unique_value_held_by_tombstone",
                    Weight.NOTE,
                    f"a deleted row keeps its values in `{index.name}` ({columns}): {reason}",
                    "purge it to use the values again, or guard the table with `--mode journal`",
                )
            elif not is_live_only(index):
                yield Note(
                    "on_conflict_needs_predicate",
                    Weight.NOTE,
                    f"`{index.name}` becomes partial: ON CONFLICT ({columns}) of other clients needs "
                    "`WHERE deleted_at IS NULL`, and ON CONSTRAINT works no more",
                    "change those clients first, or use `--unique keep`",
                )


def convert(runner: Runner, facts: Facts, relation: Relation, index: Index) -> None:
    """Put an index over live rows in the place of *index*, under its name. Safe to repeat after a crash."""
    swaps = _build(runner, facts, relation, index)
    steps: list[sql.Composed] = []
    if index.constraint_name is not None:
        steps.append(
            sql.SQL("ALTER TABLE {} DROP CONSTRAINT {}").format(
                name_of(relation), sql.Identifier(index.constraint_name)
            )
        )
    else:
        steps.append(sql.SQL("DROP INDEX {}").format(_in(relation, index.name)))
    for owner, new, old in swaps:
        steps.append(sql.SQL("ALTER INDEX {} RENAME TO {}").format(_in(owner, new), sql.Identifier(old.name)))
        steps.append(
            sql.SQL("COMMENT ON INDEX {} IS {}").format(
                _in(owner, old.name), sql.Literal(_COMMENT + json.dumps(_original(old)))
            )
        )
    runner.run(steps)


def restore(runner: Runner, facts: Facts, root: Relation) -> None:
    """Put the indexes and constraints back that `convert` replaced. There must be no deleted rows."""
    for relation in facts.tree(root):
        for index in relation.indexes:
            if is_replacement(index) and index.parent_index is None:
                _put_back(runner, facts, relation, index)


def _reason_to_keep(index: Index) -> str | None:
    if index.is_primary:
        return "primary keys have to hold for all rows"
    if index.referenced_by:
        return f"foreign key `{index.referenced_by[0]}` refers to it"
    if index.exclusion:
        return "exclusion constraints can't be made partial in place"
    if not index.immediate:
        return "it is DEFERRABLE, which only a constraint can be"
    if index.replica_identity:
        return "it is the replica identity"
    return None


def _build(
    runner: Runner, facts: Facts, relation: Relation, index: Index
) -> list[tuple[Relation, str, Index]]:
    """Build the new index of *relation* and its partitions; return table, new name and old index of each."""
    new = _new_name(index.name)
    if relation.kind == "r":
        if _state(runner, relation, new) is False:
            runner.run_concurrently(sql.SQL("DROP INDEX CONCURRENTLY {}").format(_in(relation, new)))
        if _state(runner, relation, new) is None:
            runner.run_concurrently(_definition(index, new, concurrently=True))
        return [(relation, new, index)]
    # CONCURRENTLY stops at a partitioned table: the partitions' indexes are built one by one and attached.
    built: list[tuple[Relation, str, Index]] = []
    for child, old in _parts(facts, relation, index):
        built += _build(runner, facts, child, old)
    if _state(runner, relation, new) is None:
        runner.run([_definition(index, new, concurrently=False)])
    for owner, name, old in built:
        if old.parent_index == index.oid:
            attach = sql.SQL("ALTER INDEX {} ATTACH PARTITION {}")
            runner.run([attach.format(_in(relation, new), _in(owner, name))])
    return [*built, (relation, new, index)]


def _state(runner: Runner, relation: Relation, name: str) -> bool | None:
    """Return whether the index *name* is valid, None when there is none."""
    row = runner.conn.execute(
        "SELECT i.indisvalid FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid"
        " WHERE i.indrelid = %s AND c.relname = %s",
        [relation.oid, name],
    ).fetchone()
    return None if row is None else bool(row[0])


def _definition(index: Index, name: str, *, concurrently: bool) -> sql.Composed:
    """Return PostgreSQL's own definition of *index* under another name and for live rows only."""
    where = _LIVE if index.predicate is None else f"{index.predicate} AND {_LIVE}"
    return sql.SQL("CREATE UNIQUE INDEX {}{} {} WHERE {}").format(
        sql.SQL("CONCURRENTLY " if concurrently else ""),
        sql.Identifier(name),
        _body(index.definition, index.predicate, index.tablespace),
        _own(where),
    )


def _body(definition: str, predicate: str | None, tablespace: str | None) -> sql.Composable:
    """Return what stands between an index's name and its WHERE."""
    start = definition.index(" ON ") + 1  # the name is quoted if it holds a blank …
    if definition.startswith('CREATE UNIQUE INDEX "'):
        quoted = definition.removeprefix('CREATE UNIQUE INDEX "')
        end = _end_of_quoted(quoted)
        start = len(definition) - len(quoted) + end + 2  # … so its end is looked for, not its ON
    body = _own(definition[start:].removesuffix(f" WHERE {predicate}"))
    if tablespace is None:
        return body
    return sql.SQL("{} TABLESPACE {}").format(body, sql.Identifier(tablespace))


def _end_of_quoted(text: str) -> int:
    """Return where the quoted identifier ends that *text* starts inside of; a doubled quote is none."""
    at = 0
    while True:
        at = text.index('"', at)
        if text[at + 1 : at + 2] != '"':
            return at
        at += 2


def _own(text: str) -> sql.SQL:
    return sql.SQL(text)  # PostgreSQL's own print of an index it has


def _original(index: Index) -> dict[str, Any]:
    return {
        "constraint": index.constraint_name,
        "definition": index.definition,
        "predicate": index.predicate,
        "tablespace": index.tablespace,
    }


def _put_back(runner: Runner, facts: Facts, relation: Relation, index: Index) -> None:
    old = original(index)
    _build_full(runner, facts, relation, index, old)
    # Dropping a partitioned index drops its parts.
    drop = sql.SQL("DROP INDEX {}").format(_in(relation, index.name))
    runner.run([drop, *_take_place(facts, relation, index, old)])


def _build_full(
    runner: Runner, facts: Facts, relation: Relation, index: Index, old: Mapping[str, Any]
) -> None:
    """Build what *index* and its parts stand for beside them, each table's own CONCURRENTLY."""
    if relation.kind == "p":
        for child, part in _parts(facts, relation, index):
            _build_full(runner, facts, child, part, original(part, old))
        return
    new = _new_name(index.name)
    if _state(runner, relation, new) is False:
        runner.run_concurrently(sql.SQL("DROP INDEX CONCURRENTLY {}").format(_in(relation, new)))
    if _state(runner, relation, new) is None:
        runner.run_concurrently(_full(old, new, concurrently=True))


def _take_place(
    facts: Facts, relation: Relation, index: Index, old: Mapping[str, Any]
) -> Iterator[sql.Composed]:
    """Yield what makes the built indexes what was there before; nothing here reads the tables."""
    name = old["constraint"] or index.name
    table, constraint = name_of(relation), sql.Identifier(name)
    if relation.kind == "r":
        yield sql.SQL("ALTER INDEX {} RENAME TO {}").format(
            _in(relation, _new_name(index.name)), sql.Identifier(index.name)
        )
        if old["constraint"] is not None:
            yield sql.SQL("ALTER TABLE {} ADD CONSTRAINT {} UNIQUE USING INDEX {}").format(
                table, constraint, sql.Identifier(index.name)
            )
        return
    # ONLY leaves the parts to be attached; both are valid when all of them are.
    if old["constraint"] is None:
        yield _full(old, name, concurrently=False)
    else:
        columns, nulls = old["definition"].split(" USING btree ", 1)[1], ""
        if columns.endswith(" NULLS NOT DISTINCT"):
            columns, nulls = columns.removesuffix(" NULLS NOT DISTINCT"), "NULLS NOT DISTINCT "
        yield sql.SQL("ALTER TABLE ONLY {} ADD CONSTRAINT {} UNIQUE {}{}").format(
            table, constraint, _own(nulls), _own(columns)
        )
    for child, part in _parts(facts, relation, index):
        was = original(part, old)
        yield from _take_place(facts, child, part, was)
        yield sql.SQL("ALTER INDEX {} ATTACH PARTITION {}").format(
            _in(relation, name), _in(child, was["constraint"] or part.name)
        )


def _parts(facts: Facts, relation: Relation, index: Index) -> Iterator[tuple[Relation, Index]]:
    """Yield the partitions of *relation* with their parts of *index*."""
    for oid in relation.children:
        child = facts.relations[oid]
        yield child, next(i for i in child.indexes if i.parent_index == index.oid)


def _full(old: Mapping[str, Any], name: str, *, concurrently: bool) -> sql.Composed:
    statement = sql.SQL("CREATE UNIQUE INDEX {}{} {}").format(
        sql.SQL("CONCURRENTLY " if concurrently else ""),
        sql.Identifier(name),
        _body(old["definition"], old["predicate"], old["tablespace"]),
    )
    if old["predicate"] is None:
        return statement
    return sql.SQL("{} WHERE {}").format(statement, _own(old["predicate"]))


def _new_name(name: str) -> str:
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"sg_{name.encode()[:45].decode(errors='ignore')}_{digest}"


def _in(relation: Relation, index: str) -> sql.Identifier:
    return sql.Identifier(relation.schema, index)
