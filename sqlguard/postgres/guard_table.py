"""
Guard tables: put the walls on them, or take them off. Safe to repeat, and to go on with after a crash.

Theory of operation. Everything is read once (walls_facts), judged (preflight), and a mode is chosen for each
table and for those that its deletes reach. Then each step compares what is wanted with what is there and runs
only the difference, in a short transaction of its own, children before parents. The row in
`sqlguard.guarded_table` comes last: it is what switches the rewriter on.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from sqlguard.catalog import BOOKKEEPING_COMMENT, DELETED_AT
from sqlguard.errors import GuardError
from sqlguard.postgres import walls_unique, walls_views
from sqlguard.postgres.preflight import BOOKKEEPING, Note, Weight, choose, judge
from sqlguard.postgres.walls_facts import VERSION, Facts, Relation, read_facts
from sqlguard.postgres.walls_policies import policy_changes
from sqlguard.postgres.walls_run import Runner, one_at_a_time
from sqlguard.postgres.walls_triggers import (
    left_behind,
    name_of,
    trigger_changes,
    wanted_functions,
    wanted_triggers,
)


@dataclass(frozen=True, slots=True)
class GuardReport:
    """What was done to one table: `mode` is soft, journal or none, `changed` whether anything had to be."""

    table: str
    mode: str
    changed: bool
    notes: tuple[Note, ...] = ()
    #: The table whose deletes reach this one, when it was not asked for itself.
    because: str | None = None

    def as_dict(self) -> dict[str, object]:
        return {
            "table": self.table,
            "mode": self.mode,
            "changed": self.changed,
            "because": self.because,
            "notes": [n.as_dict() for n in self.notes],
        }


@dataclass(frozen=True, slots=True)
class _Choice:
    root: Relation
    mode: str
    notes: list[Note]
    because: str | None


def user_tables(conn: psycopg.Connection[Any]) -> list[str]:
    """Return every table that can be guarded, `schema.name`; partitions go with their root."""
    facts = read_facts(conn)
    return [
        r.label
        for r in facts.relations.values()
        if not any(p in facts.relations for p in r.parents) and r.extension is None
    ]


def guard_table(
    conn: psycopg.Connection[Any],
    table: str,
    mode: str | None = None,
    *,
    unique: str = "partial",
    accept: Collection[str] = (),
) -> GuardReport:
    """Guard one *table* (see guard_tables); tables that its deletes reach are guarded with it."""
    reports = guard_tables(conn, [table], mode, unique=unique, accept=accept)
    return next(r for r in reports if r.because is None)


def guard_tables(  # noqa: PLR0913 (what the command line offers)
    conn: psycopg.Connection[Any],
    tables: Sequence[str],
    mode: str | None = None,
    *,
    unique: str = "partial",
    accept: Collection[str] = (),
    fix_views: bool = False,
) -> list[GuardReport]:
    """
    Guard *tables* as `soft`, `journal`, or (None) whichever fits, and unguarded tables that their deletes
    reach by CASCADE, SET NULL or SET DEFAULT.

    *conn* must be in autocommit mode. `unique="keep"` leaves unique indexes as they are. *accept* names reason
    codes that do not matter here. *fix_views* sets `security_invoker` on the views over soft tables. Raises
    GuardError before anything is changed when a table can't be guarded so.
    """
    runner = Runner(conn)
    with one_at_a_time(conn):
        facts = read_facts(conn)
        choices = _choose_all(facts, tables, mode, accept)
        changed = {c.root.oid: _columns_and_uniques(runner, facts, c, unique) for c in choices}
        if any(changed.values()):
            facts = read_facts(conn)  # with the columns that are there now
        modes = {g.relid: g.mode for g in facts.guarded.values()} | {c.root.oid: c.mode for c in choices}
        done: set[int] = set()
        for choice in choices:
            root = facts.relations[choice.root.oid]
            changed[root.oid] |= _walls(runner, facts, root, modes, done)
            mended = walls_views.mend(runner, facts, root) if fix_views and choice.mode == "soft" else []
            options = {"unique": unique if choice.mode == "soft" else "keep"}
            options |= walls_views.kept_options(_options(facts, root), accept, mended)
            changed[root.oid] |= _register(runner, facts, root, choice.mode, options)
        for relation in left_behind(facts, modes):
            _walls_of(runner, facts, relation, modes, done)
        if fix_views:
            facts = read_facts(conn)  # mended views need no note
        return [
            GuardReport(
                c.root.label, c.mode, changed[c.root.oid], tuple(_all_notes(facts, c, unique)), c.because
            )
            for c in choices
        ]


def unguard_tables(
    conn: psycopg.Connection[Any], tables: Sequence[str], *, keep_columns: bool = False
) -> list[GuardReport]:
    """
    Take the walls off *tables*, put replaced unique constraints back and drop the bookkeeping columns.

    Raises GuardError while a table still holds deleted rows: without the walls they would come back to life.
    """
    runner = Runner(conn)
    with one_at_a_time(conn):
        facts = read_facts(conn)
        roots = [_find(facts, table) for table in tables]
        for root in roots:
            if root.oid in facts.guarded:
                _refuse_tombstones(conn, root)
        modes = {g.relid: g.mode for g in facts.guarded.values()}
        for root in roots:
            modes.pop(root.oid, None)
        done: set[int] = set()
        reports = []
        for root in roots:
            walls_views.put_back(runner, _options(facts, root))
            changed = _forget(runner, facts, root)
            changed |= _walls(runner, facts, root, modes, done)
            walls_unique.restore(runner, facts, root)
            if changed and not keep_columns:
                _drop_columns(runner, root)
            reports.append(GuardReport(root.label, "none", changed))
        _drop_functions(runner, facts)
        return reports


def _find(facts: Facts, table: str) -> Relation:
    """Return the root of the tree that *table* (`name` or `schema.name`, `public` assumed) is in."""
    for relation in facts.relations.values():
        if table in (relation.label, f'"{relation.schema}"."{relation.name}"') or (
            relation.schema == "public" and table in (relation.name, f'"{relation.name}"')
        ):
            return facts.root(relation)
    raise GuardError(
        f"there is no table `{table}` to guard",
        hint="name it as `schema.table`, or take `--all`; views, foreign and temporary tables can't be guarded",
    )


def _choose_all(
    facts: Facts, tables: Iterable[str], mode: str | None, accept: Collection[str]
) -> list[_Choice]:
    """Choose a mode for each table and those reached from it; children first, so that parents can rely on them."""
    modes = {g.relid: g.mode for g in facts.guarded.values()}
    chosen: dict[int, _Choice] = {}

    def add(root: Relation, wanted: str | None, because: str | None) -> None:
        if root.oid in chosen:
            return
        notes = judge(facts, root, modes)
        was = modes.get(root.oid)
        now = choose(root, notes, wanted or (None if because is None else was), accept)
        chosen[root.oid] = _Choice(root, now, notes, because)
        modes[root.oid] = now

    asked = _parents_first(facts, [_find(facts, table) for table in tables])
    for root in asked:
        guarded = facts.guarded.get(root.oid)
        add(root, mode or (guarded.mode if guarded else None), None)
    waiting = list(asked)
    while waiting:
        parent = waiting.pop(0)
        for child in _reached(facts, parent):
            if child.oid not in modes:
                add(child, None, parent.label)
                waiting.append(child)
    order = _parents_first(facts, [c.root for c in chosen.values()])
    return [chosen[root.oid] for root in reversed(order)]


def _reached(facts: Facts, root: Relation) -> Iterator[Relation]:
    """Yield the tables whose rows a delete in *root* changes."""
    for key in facts.keys_to(root):
        child = facts.relations.get(key.child)
        if child is not None and key.on_delete in ("c", "n", "d"):
            yield facts.root(child)


def _parents_first(facts: Facts, roots: Sequence[Relation]) -> list[Relation]:
    """Order *roots* so that referenced tables come first; a cycle is cut where it is met."""
    wanted = {r.oid: r for r in roots}
    done: dict[int, Relation] = {}
    path: set[int] = set()

    def visit(root: Relation) -> None:
        if root.oid in done or root.oid in path:
            return
        path.add(root.oid)
        for key in facts.keys_of(root):
            parent = facts.relations.get(key.parent)
            if parent is not None and facts.root(parent).oid in wanted:
                visit(facts.root(parent))
        done[root.oid] = root

    for root in sorted(wanted.values(), key=lambda r: r.label):
        visit(root)
    return list(done.values())


def _all_notes(facts: Facts, choice: _Choice, unique: str) -> Iterator[Note]:
    shows = any(kind in "vm" for _, kind in facts.relations[choice.root.oid].dependents)
    yield from (note for note in choice.notes if shows or note.code != walls_views.CODE)
    if choice.mode == "soft":
        yield from walls_unique.unique_notes(facts, choice.root, convert=unique == "partial")
    if choice.because is not None:
        yield Note(
            "reached_by_cascade",
            Weight.NOTE,
            f"guarded because deletes in `{choice.because}` change its rows",
        )


def _columns_and_uniques(runner: Runner, facts: Facts, choice: _Choice, unique: str) -> bool:
    """Add the bookkeeping columns and convert unique indexes; return whether anything was missing."""
    root = choice.root
    was = facts.guarded.get(root.oid)
    if choice.mode != "soft":
        if was is not None and was.mode == "soft":
            _refuse_tombstones(runner.conn, root)
            walls_unique.restore(runner, facts, root)
        return False
    missing = [name for name in BOOKKEEPING if root.column(name) is None]
    if missing:
        # One ALTER, one lock. No default, ever: it would mark all rows that are there.
        parts = sql.SQL(", ").join(
            sql.SQL("ADD COLUMN IF NOT EXISTS {} {}").format(
                sql.Identifier(name), sql.SQL("timestamptz" if name == DELETED_AT else "text")
            )
            for name in missing
        )
        # The comments tell `unguard` which columns it may drop.
        comments = [
            sql.SQL("COMMENT ON COLUMN {} IS {}").format(
                sql.Identifier(root.schema, root.name, name), sql.Literal(BOOKKEEPING_COMMENT)
            )
            for name in missing
        ]
        runner.run([sql.SQL("ALTER TABLE {} {}").format(name_of(root), parts), *comments])
    due = walls_unique.convertible(facts, root) if unique == "partial" else []
    for relation, index in due:
        walls_unique.convert(runner, facts, relation, index)
    broken = walls_unique.invalid(facts, root)
    for relation, index in broken:
        walls_unique.rebuild(runner, relation, index)
    return bool(missing or due or broken)


def _walls(runner: Runner, facts: Facts, root: Relation, modes: dict[int, str], done: set[int]) -> bool:
    """
    Bring functions, triggers and policies of the tree, and the checks on its children, to what is wanted.

    *done* remembers relations that were seen: what is wanted of one does not depend on who asks.
    """
    changed = False
    children = [facts.relations[k.child] for k in facts.keys_to(root) if k.child in facts.relations]
    for relation in (*facts.tree(root), *children):
        changed |= _walls_of(runner, facts, relation, modes, done)
    for relation in facts.tree(root):
        statements = policy_changes(relation, soft=modes.get(root.oid) == "soft")
        runner.run(statements)
        changed |= bool(statements)
    return changed


def _walls_of(
    runner: Runner, facts: Facts, relation: Relation, modes: dict[int, str], done: set[int]
) -> bool:
    if relation.oid in done:
        return False
    done.add(relation.oid)
    statements = trigger_changes(runner.conn, relation, wanted_triggers(facts, relation, modes))
    changed = _functions(runner, facts, relation, modes) or bool(statements)
    runner.run(statements)
    return changed


def _functions(runner: Runner, facts: Facts, relation: Relation, modes: dict[int, str]) -> bool:
    row = runner.conn.execute("SELECT sqlguard.shape_key(%s::oid::regclass)", [relation.oid]).fetchone()
    shape = int(row[0]) if row else 0
    if facts.root(relation).oid in modes:
        runner.conn.execute(
            "SELECT sqlguard.keep_shape(%(shape)s, %(oid)s::oid)"
            " WHERE NOT EXISTS (SELECT FROM sqlguard.shape WHERE id = %(shape)s)",
            {"shape": shape, "oid": relation.oid},
        )
    statements: list[sql.Composed] = []
    for function in wanted_functions(runner.conn, facts, relation, modes, shape=shape):
        if not function.is_same(facts.functions.get(function.name)):
            statements.extend(function.statements())
    runner.run(statements)
    return bool(statements)


def _options(facts: Facts, root: Relation) -> dict[str, Any]:
    was = facts.guarded.get(root.oid)
    return was.options if was else {}


def _register(runner: Runner, facts: Facts, root: Relation, mode: str, options: dict[str, Any]) -> bool:
    was = facts.guarded.get(root.oid)
    primary = root.primary_key
    options = {**options, "key_match": primary.match if primary else None}
    now = (mode, VERSION, root.key_columns, options)
    if was is not None and (was.mode, was.version, was.key_columns, was.options) == now:
        return False
    with runner.conn.transaction():
        runner.conn.execute(
            "INSERT INTO sqlguard.guarded_table"
            " (relid, schema_name, table_name, mode, version, key_columns, options)"
            " VALUES (%s, %s, %s, %s, %s, %s, %s)"
            " ON CONFLICT (relid) DO UPDATE SET schema_name = excluded.schema_name,"
            " table_name = excluded.table_name, mode = excluded.mode, version = excluded.version,"
            " key_columns = excluded.key_columns, options = excluded.options",
            [root.oid, root.schema, root.name, mode, VERSION, root.key_columns, Jsonb(options)],
        )
    return True


def _refuse_tombstones(conn: psycopg.Connection[Any], root: Relation) -> None:
    if root.column(DELETED_AT) is None:
        return
    count = sql.SQL("SELECT count(*) FROM {} WHERE deleted_at IS NOT NULL")
    row = conn.execute(count.format(name_of(root))).fetchone()
    if row and row[0]:
        raise GuardError(
            f"`{root.label}` still holds {row[0]} deleted rows, which would come back to life",
            hint="run `sqlguard purge` or `sqlguard restore` for it first",
        )


def _forget(runner: Runner, facts: Facts, root: Relation) -> bool:
    if root.oid not in facts.guarded:
        return False
    with runner.conn.transaction():
        runner.conn.execute("DELETE FROM sqlguard.guarded_table WHERE relid = %s", [root.oid])
    return True


def _drop_columns(runner: Runner, root: Relation) -> None:
    parts = [
        sql.SQL("DROP COLUMN {}").format(sql.Identifier(column.name))
        for column in root.columns
        if column.name in BOOKKEEPING and column.comment == BOOKKEEPING_COMMENT
    ]
    if parts:
        runner.run([sql.SQL("ALTER TABLE {} {}").format(name_of(root), sql.SQL(", ").join(parts))])


def _drop_functions(runner: Runner, facts: Facts) -> None:
    """Drop the functions of ours that no trigger or policy calls any more."""
    for name, (_, comment) in facts.functions.items():
        if not (comment or "").startswith("sqlguard wall"):
            continue
        used = runner.conn.execute(
            "SELECT FROM pg_catalog.pg_trigger t JOIN pg_catalog.pg_proc p ON p.oid = t.tgfoid"
            " WHERE p.pronamespace = 'sqlguard'::regnamespace AND p.proname = %(name)s"
            " UNION ALL SELECT FROM pg_catalog.pg_depend d JOIN pg_catalog.pg_proc p ON p.oid = d.refobjid"
            " WHERE p.pronamespace = 'sqlguard'::regnamespace AND p.proname = %(name)s"
            " AND d.refclassid = 'pg_proc'::regclass AND d.classid = 'pg_policy'::regclass",
            {"name": name},
        ).fetchone()
        if used is None:
            runner.run([sql.SQL("DROP FUNCTION IF EXISTS sqlguard.{}").format(sql.Identifier(name))])
