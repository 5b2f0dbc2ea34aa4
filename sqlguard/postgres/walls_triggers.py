"""
The triggers that walls are made of: which ones a relation should have, and the statements that make them.

The one idea: what is wanted follows from the facts and the modes alone; what is there is compared with it, so
that guarding again changes nothing and an upgrade changes only what differs.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from sqlguard.catalog import DELETED_AT, DELETED_BY_AGENT, live_parent_trigger
from sqlguard.postgres.preflight import BEFORE, ROW, UPDATE
from sqlguard.postgres.walls_capture import PINNED, capture_body, function_name
from sqlguard.postgres.walls_facts import VERSION, Facts, Key, Relation, Trigger
from sqlguard.postgres.walls_held import BY_INDEX, held_body, held_name, held_types, kept_uniques
from sqlguard.postgres.walls_live_parent import live_parent_body
from sqlguard.task import ROLE_PREFIX

# The session's own login role, which SET ROLE and definer functions leave alone. Everyone else pays for this
# comparison only.
TASK_SESSION = sql.SQL("session_user OPERATOR(pg_catalog.~~) {}").format(
    sql.Literal(ROLE_PREFIX.replace("_", r"\_") + "%")
)
#: Fires after every other BEFORE trigger: PostgreSQL goes by name.
STAMP = "zz_sqlguard_stamp"


_SMUGGLING = sql.SQL("""
BEGIN
    IF {task} AND OLD.{at} IS NULL AND NOT record_image_eq(ROW({new}), ROW({old})) THEN
        RAISE EXCEPTION 'deleted_at and deleted_by_agent of `%.%` are set by the database alone',
            TG_TABLE_SCHEMA, TG_TABLE_NAME
            USING ERRCODE = 'SG002', HINT = 'use DELETE to delete rows; ask the operator to restore them';
    END IF;
    RETURN NULL;
END
""")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A trigger to have; `constraint` ones can't be replaced, only dropped and made again."""

    name: str
    statement: sql.Composed
    constraint: bool = False

    def mark(self, conn: psycopg.Connection[Any]) -> str:
        """Return the first half of the comment that tells whether the trigger is still the wanted one."""
        text = self.statement.as_string(conn)
        return f"sqlguard {VERSION} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    body: str
    #: Settings besides search_path.
    settings: tuple[tuple[str, str], ...] = ()
    #: The types of its arguments, for one that a row policy asks instead of a trigger.
    asked_with: tuple[str, ...] = ()
    #: The oid of the partitioned table whose row triggers call it.
    cloned_on: int | None = None

    def is_same(self, there: tuple[str, str | None] | None) -> bool:
        """Whether *there* (md5 of the source, comment) is this function."""
        return there == (hashlib.md5(self.body.encode(), usedforsecurity=False).hexdigest(), self._comment())

    def statements(self) -> Iterator[sql.Composed]:
        # The types are PostgreSQL's own print of them.
        types = sql.SQL(", ").join(sql.SQL(t) for t in self.asked_with)
        name = sql.SQL("{}({})").format(sql.Identifier("sqlguard", self.name), types)
        settings = sql.SQL(" ").join(
            sql.SQL("SET {} = {}").format(sql.Identifier(setting), sql.Literal(value))
            for setting, value in self.settings
        )
        yield sql.SQL(
            "CREATE OR REPLACE FUNCTION {} RETURNS {} LANGUAGE plpgsql {} SECURITY DEFINER"
            " SET search_path = pg_catalog, pg_temp {} AS {}"
        ).format(
            name,
            sql.SQL("boolean" if self.asked_with else "trigger"),
            sql.SQL("STABLE" if self.asked_with else ""),
            settings,
            sql.Literal(self.body),
        )
        # All walls act with the rights of one role, whoever of its members made them.
        yield sql.SQL(
            "DO $do$ BEGIN EXECUTE pg_catalog.format('ALTER FUNCTION sqlguard.%I(%s) OWNER TO %s', {name}, {types},"
            " (SELECT n.nspowner::regrole FROM pg_catalog.pg_namespace n WHERE n.nspname = 'sqlguard')); END $do$"
        ).format(name=sql.Literal(self.name), types=sql.Literal(", ".join(self.asked_with)))
        # Whoever may execute a trigger function may attach it to a table of his own, whose casts and row policies
        # it would then run with its owner's rights. Triggers that are there need no right.
        yield sql.SQL("REVOKE EXECUTE ON FUNCTION {} FROM PUBLIC").format(name)
        if self.asked_with:
            # A policy's expression is evaluated with the rights of who inserts.
            yield sql.SQL("GRANT EXECUTE ON FUNCTION {} TO sqlguard_agent").format(name)
        if self.cloned_on is not None:
            # PostgreSQL makes a row trigger anew on each new partition, with the rights of who makes that.
            yield sql.SQL(
                "DO $do$ BEGIN EXECUTE pg_catalog.format('GRANT EXECUTE ON FUNCTION sqlguard.%I() TO %s', {name},"
                " (SELECT c.relowner::regrole FROM pg_catalog.pg_class c WHERE c.oid = {table})); END $do$"
            ).format(name=sql.Literal(self.name), table=sql.Literal(self.cloned_on))
        yield sql.SQL("COMMENT ON FUNCTION {} IS {}").format(name, sql.Literal(self._comment()))

    def _comment(self) -> str:
        return f"sqlguard wall, version {VERSION}"


def name_of(relation: Relation) -> sql.Identifier:
    return sql.Identifier(relation.schema, relation.name)


def wanted_triggers(facts: Facts, relation: Relation, modes: Mapping[int, str]) -> list[Wanted]:
    """Return all triggers of ours that *relation* should have when the roots in *modes* are guarded."""
    root = facts.root(relation)
    mode = modes.get(root.oid)
    found: list[Wanted] = []
    if mode is not None:
        found += _capture(facts, relation)
    if mode == "soft":
        found += _bookkeeping(facts, relation)
        found += _deferred_checks(facts, relation)
    for key in facts.keys:
        parent = facts.relations.get(key.parent)
        if key.child == relation.oid and parent and modes.get(facts.root(parent).oid) == "soft":
            found += _live_parent(key, relation, soft=mode == "soft")
    return found


def wanted_functions(
    conn: psycopg.Connection[Any],
    facts: Facts,
    relation: Relation,
    modes: Mapping[int, str],
    *,
    shape: int,
) -> list[Function]:
    """Return the functions that the wanted triggers of *relation* call, besides the shared ones."""
    mode = modes.get(facts.root(relation).oid)
    found = []
    if mode is not None:
        body = capture_body(conn, facts, relation, mode=mode, shape=shape)
        found.append(Function(function_name(relation), body, PINNED))
    if mode == "soft" and not relation.is_partition and _others(relation):
        body = _smuggling_body(relation).as_string(conn)
        found.append(_row_function(function_name(relation, "smuggling"), body, relation))
    if mode == "soft" and kept_uniques(relation):
        body = held_body(relation).as_string(conn)
        found.append(Function(held_name(relation), body, BY_INDEX, asked_with=held_types(relation)))
    for key in facts.keys:
        parent = facts.relations.get(key.parent)
        if key.child == relation.oid and parent and modes.get(facts.root(parent).oid) == "soft":
            body = live_parent_body(key, relation, parent, soft=mode == "soft").as_string(conn)
            found.append(_row_function(_key_name(key, relation), body, relation))
    return found


def _row_function(name: str, body: str, relation: Relation) -> Function:
    return Function(name, body, cloned_on=relation.oid if relation.kind == "p" else None)


def trigger_changes(
    conn: psycopg.Connection[Any], relation: Relation, wanted: list[Wanted]
) -> list[sql.Composed]:
    """Return what turns the triggers of *relation* that are ours into the *wanted* ones; empty when they are."""
    there = {t.name: t for t in relation.triggers if t.ours and not t.inherited}
    statements = [_drop(relation, name) for name in there.keys() - {w.name for w in wanted}]
    for trigger in wanted:
        mark = trigger.mark(conn)
        old = there.get(trigger.name)
        if old is not None and _is_same(old, mark):
            continue
        if old is not None:
            statements.append(_drop(relation, trigger.name))
        statements.append(trigger.statement)
        statements.append(_comment(relation, trigger.name, mark))
    return statements


def left_behind(facts: Facts, modes: Mapping[int, str]) -> Iterator[Relation]:
    """Yield unguarded tables with triggers of ours: their foreign key to a soft table may be gone."""
    for relation in facts.relations.values():
        if facts.root(relation).oid not in modes and any(t.ours for t in relation.triggers):
            yield relation


def _is_same(there: Trigger, mark: str) -> bool:
    # The second half of the comment is what PostgreSQL printed when the trigger was made.
    return there.enabled in ("O", "A") and there.comment == f"{mark} {there.definition}"


def _drop(relation: Relation, name: str) -> sql.Composed:
    return sql.SQL("DROP TRIGGER IF EXISTS {} ON {}").format(sql.Identifier(name), name_of(relation))


def _comment(relation: Relation, name: str, mark: str) -> sql.Composed:
    # COMMENT takes a constant only, and the definition is known once the trigger is there.
    return sql.SQL(
        "DO $do$ BEGIN EXECUTE pg_catalog.format('COMMENT ON TRIGGER %I ON %I.%I IS %L', {name}, {schema},"
        " {table}, {mark} || ' ' || (SELECT pg_catalog.md5(pg_catalog.pg_get_triggerdef(t.oid))"
        " FROM pg_catalog.pg_trigger t WHERE t.tgname = {name} AND t.tgrelid = {oid})); END $do$"
    ).format(
        name=sql.Literal(name),
        schema=sql.Literal(relation.schema),
        table=sql.Literal(relation.name),
        mark=sql.Literal(mark),
        oid=sql.Literal(relation.oid),
    )


def _capture(facts: Facts, relation: Relation) -> Iterator[Wanted]:
    by_row = facts.inherits(facts.root(relation))
    for event, tables in (
        ("INSERT", "REFERENCING NEW TABLE AS sg_new"),
        ("UPDATE", "REFERENCING OLD TABLE AS sg_old NEW TABLE AS sg_new"),
        ("DELETE", "REFERENCING OLD TABLE AS sg_old"),
    ):
        yield _trigger(
            relation,
            f"sqlguard_{event.lower()}",
            f"AFTER {event} | " + ("FOR EACH ROW" if by_row else f"{tables} FOR EACH STATEMENT"),
            function=function_name(relation),
        )
    if by_row:
        # A new child's rows fire no trigger but the statement's.
        yield _trigger(
            relation,
            "sqlguard_children",
            "BEFORE UPDATE OR DELETE | FOR EACH STATEMENT",
            function="refuse_late",
        )
    yield _trigger(
        relation,
        "sqlguard_truncate",
        "BEFORE TRUNCATE | FOR EACH STATEMENT",
        function="refuse_truncate",
    )


def _bookkeeping(facts: Facts, relation: Relation) -> Iterator[Wanted]:
    """
    Refuse every change of the bookkeeping columns by a task but the soft delete of a live row.

    AFTER, with lists of columns, and with everything in WHEN: a right soft delete calls no function per row, and an
    update that does not name these columns pays next to nothing. (A BEFORE ROW trigger would lock each row first:
    18 % of a bulk UPDATE.) Only a statement that names other columns too can smuggle a change into a soft delete,
    so the comparison of whole rows, 12 % of a bulk delete, is a trigger of its own that others never reach. Its
    function makes it and asks whose session it is, not its WHEN: PostgreSQL reads a WHEN anew in every statement,
    the owner's as well.
    """
    if relation.is_partition:
        return  # row triggers of a partitioned table are cloned
    at, by = sql.Identifier(DELETED_AT), sql.Identifier(DELETED_BY_AGENT)
    when = sql.SQL(
        "NOT (OLD.{at} IS NULL AND NEW.{at} IS NOT NULL AND NEW.{at} = pg_catalog.statement_timestamp()"
        " AND NEW.{by} IS NOT NULL)"
        " AND (NEW.{at} IS DISTINCT FROM OLD.{at} OR NEW.{by} IS DISTINCT FROM OLD.{by}) AND {task}"
    ).format(at=at, by=by, task=TASK_SESSION)
    yield _trigger(
        relation,
        "sqlguard_bookkeeping",
        "AFTER UPDATE | FOR EACH ROW",
        columns=(DELETED_AT, DELETED_BY_AGENT),
        when=when,
        function="refuse_stamp",
    )
    yield from _smuggling(relation)
    if any(t.bits & BEFORE and t.bits & ROW for r in facts.tree(relation) for t in r.user_triggers(UPDATE)):
        when = sql.SQL("{task} AND OLD.{at} IS NULL AND NEW.{at} IS NOT NULL").format(
            at=at, task=TASK_SESSION
        )
        yield _trigger(relation, STAMP, "BEFORE UPDATE | FOR EACH ROW", when=when, function="stamp")


def _smuggling(relation: Relation) -> Iterator[Wanted]:
    others = _others(relation)
    if others:
        yield _trigger(
            relation,
            "sqlguard_smuggling",
            "AFTER UPDATE | FOR EACH ROW",
            columns=others,
            when=sql.SQL("NEW.{} IS NOT NULL").format(sql.Identifier(DELETED_AT)),
            function=function_name(relation, "smuggling"),
        )


def _others(relation: Relation) -> list[str]:
    """Return the columns that a soft delete must leave alone."""
    return [
        c.name for c in relation.columns if c.name not in (DELETED_AT, DELETED_BY_AGENT) and not c.generated
    ]


def _smuggling_body(relation: Relation) -> sql.Composed:
    others = _others(relation)
    return _SMUGGLING.format(
        task=TASK_SESSION,
        at=sql.Identifier(DELETED_AT),
        new=sql.SQL(", ").join(sql.SQL("NEW.{}").format(sql.Identifier(n)) for n in others),
        old=sql.SQL(", ").join(sql.SQL("OLD.{}").format(sql.Identifier(n)) for n in others),
    )


def _deferred_checks(facts: Facts, relation: Relation) -> Iterator[Wanted]:
    at = sql.Identifier(DELETED_AT)
    for key in facts.keys:
        if key.parent != relation.oid or key.on_delete != "a" or not key.deferrable:
            continue
        child = facts.relations.get(key.child)
        if child is None:
            continue
        # Constraint triggers share the key's name, so that SET CONSTRAINTS reaches both; on the key's own
        # table (a self-reference) PostgreSQL does not let them.
        name = key.name if key.child != key.parent else f"sqlguard_{_digest(key.name)}"
        statement = sql.SQL(
            "CREATE CONSTRAINT TRIGGER {name} AFTER UPDATE ON {table} FROM {child} DEFERRABLE INITIALLY {mode}"
            " FOR EACH ROW WHEN ({task} AND OLD.{at} IS NULL AND NEW.{at} IS NOT NULL)"
            " EXECUTE FUNCTION sqlguard.check_children({key})"
        ).format(
            name=sql.Identifier(name),
            table=name_of(relation),
            child=name_of(child),
            mode=sql.SQL("DEFERRED" if key.deferred else "IMMEDIATE"),
            task=TASK_SESSION,
            at=at,
            key=sql.Literal(key.name),
        )
        yield Wanted(name, statement, constraint=True)


def _live_parent(key: Key, child: Relation, *, soft: bool) -> Iterator[Wanted]:
    """No child may refer to a deleted parent, whoever writes it: what the key itself says after a real DELETE."""
    set_ = sql.SQL(" AND ").join(sql.SQL("NEW.{} IS NOT NULL").format(sql.Identifier(c)) for c in key.columns)
    moved = sql.SQL(" OR ").join(
        sql.SQL("NEW.{0} IS DISTINCT FROM OLD.{0}").format(sql.Identifier(c)) for c in key.columns
    )
    live = sql.SQL(" AND NEW.{} IS NULL").format(sql.Identifier(DELETED_AT)) if soft else sql.SQL("")
    inserted = sql.SQL("{}{}").format(set_, live)
    updated = sql.SQL("{}{} AND ({})").format(set_, live, moved)
    head = sql.SQL("TRIGGER")
    timing = sql.SQL("")
    if key.deferrable:
        head = sql.SQL("CONSTRAINT TRIGGER")
        timing = sql.SQL(
            "DEFERRABLE INITIALLY DEFERRED" if key.deferred else "DEFERRABLE INITIALLY IMMEDIATE"
        )
    for event, when in (("INSERT", inserted), ("UPDATE", updated)):
        name = live_parent_trigger(key.name, event.lower())
        statement = sql.SQL(
            "CREATE {head} {name} AFTER {event} ON {table} {timing} FOR EACH ROW WHEN ({when})"
            " EXECUTE FUNCTION sqlguard.{function}()"
        ).format(
            head=head,
            name=sql.Identifier(name),
            event=sql.SQL(event),
            table=name_of(child),
            timing=timing,
            when=when,
            function=sql.Identifier(_key_name(key, child)),
        )
        yield Wanted(name, statement, constraint=key.deferrable)


def _trigger(  # noqa: PLR0913 (the parts of the statement)
    relation: Relation,
    name: str,
    fires: str,
    *,
    function: str,
    when: sql.Composable = TASK_SESSION,
    columns: Sequence[str] = (),
) -> Wanted:
    event, level = fires.split(" | ")
    if columns:
        event += " OF"
    statement = sql.SQL("CREATE TRIGGER {} {} {} ON {} {} WHEN ({}) EXECUTE FUNCTION sqlguard.{}()").format(
        sql.Identifier(name),
        sql.SQL(event),
        sql.SQL(", ").join(map(sql.Identifier, columns)),
        name_of(relation),
        sql.SQL(level),
        when,
        sql.Identifier(function),
    )
    return Wanted(name, statement)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _key_name(key: Key, child: Relation) -> str:
    return function_name(child, f"live_{_digest(key.name)}")
