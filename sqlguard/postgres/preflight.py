"""
The pre-flight of `guard`: what speaks for and against each mode, as data with reason codes (SOFT_DELETE 5.3).

The one idea: `soft` is chosen when nothing speaks against it, `journal` otherwise; what neither can make right
is refused, and every note says the way out.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

from sqlguard.catalog import DELETED_AT, DELETED_BY_AGENT
from sqlguard.errors import GuardError
from sqlguard.postgres.walls_facts import Facts, Relation

#: The bookkeeping columns and their types as PostgreSQL prints them.
BOOKKEEPING = {DELETED_AT: "timestamp with time zone", DELETED_BY_AGENT: "text"}
ROW, BEFORE, DELETE, UPDATE = 1, 2, 8, 16


class Weight(IntEnum):
    """
    note: to know. prefer: auto takes journal. against: soft is refused unless the code is accepted.
    never: soft is refused. refuse: the table can't be guarded at all.
    """

    NOTE = 0
    PREFER = 1
    AGAINST = 2
    NEVER = 3
    REFUSE = 4

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Note:
    """One reason, with its code; `hint` is the way out."""

    code: str
    weight: Weight
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        return f"{self.message} ({self.code})"

    def as_dict(self) -> dict[str, object]:
        return {
            "code": self.code,
            "weight": str(self.weight),
            "message": self.message,
            "hint": self.hint,
        }


def judge(facts: Facts, root: Relation, modes: Mapping[int, str]) -> list[Note]:
    """Return what is to be known about guarding the tree below *root*, the strongest first."""
    notes = [
        *_rights(facts, root),
        *_columns(facts, root),
        *_behaviour(facts, root),
        *_references(facts, root, modes),
        *_readers(facts, root),
    ]
    return sorted(notes, key=lambda n: -n.weight)


def choose(root: Relation, notes: list[Note], mode: str | None, accept: Collection[str] = ()) -> str:
    """
    Return the mode that *root* is guarded in.

    Raises GuardError with the first reason when the asked mode, or any guarding, can't be made right.
    """
    for note in notes:
        if note.weight is Weight.REFUSE:
            raise GuardError(f"`{root.label}` can't be guarded: {note}", hint=note.hint)
    if mode == "journal":
        return "journal"
    standing = [n for n in notes if n.code not in accept or n.weight is Weight.NEVER]
    if mode is None:
        return "journal" if any(n.weight >= Weight.PREFER for n in standing) else "soft"
    for note in standing:
        if note.weight >= Weight.AGAINST:
            raise GuardError(
                f"`{root.label}` can't be guarded as soft: {note}",
                hint=note.hint or "guard it with `--mode journal`",
            )
    return "soft"


def _rights(facts: Facts, root: Relation) -> Iterator[Note]:
    for relation in facts.tree(root):
        if any(child not in facts.relations for child in relation.children):
            yield Note(
                "foreign_partition",
                Weight.REFUSE,
                f"`{relation.label}` has foreign tables below it, whose changes PostgreSQL can't collect",
                "detach them, or guard the tables on their own server",
            )
        if not relation.operator_may:
            yield Note(
                "operator_is_not_owner",
                Weight.REFUSE,
                f"`{relation.label}` belongs to `{relation.owner}`",
                f"make the operator a member: GRANT {relation.owner} TO CURRENT_USER",
            )
        elif not relation.definer_may:
            yield Note(
                "schema_owner_is_not_member",
                Weight.REFUSE,
                f"the owner of the schema `sqlguard` has no rights of `{relation.owner}`, who owns "
                f"`{relation.label}`",
                f"grant it the role `{relation.owner}`",
            )
        if relation.row_security_forced and not relation.definer_bypasses:
            yield Note(
                "row_security_forced",
                Weight.NEVER,
                f"row-level security of `{relation.label}` is forced on its owner, so referential actions "
                "and checks of soft deletes would not see all rows",
                "ALTER TABLE … NO FORCE ROW LEVEL SECURITY, or guard it with `--mode journal`",
            )


def _columns(facts: Facts, root: Relation) -> Iterator[Note]:
    if root.primary_key is None:
        yield Note(
            "primary_key_missing",
            Weight.PREFER,
            f"`{root.label}` has no primary key: an undo finds rows by their whole contents, so those that somebody"
            " changed since can't be forced back, and of more than 1000 in one statement one such row keeps all",
            "add a primary key",
        )
    for relation in facts.tree(root):
        for name, wanted in BOOKKEEPING.items():
            column = relation.column(name)
            if column is None:
                continue
            if column.type != wanted or column.not_null or column.has_default or column.generated:
                yield Note(
                    "column_name_taken",
                    Weight.NEVER,
                    f"`{relation.label}` has a column `{name}` that is not a nullable {wanted} without default",
                    "rename that column, or guard the table with `--mode journal`",
                )


def _behaviour(facts: Facts, root: Relation) -> Iterator[Note]:
    for relation in facts.tree(root):
        for trigger in relation.user_triggers(DELETE):
            yield Note(
                "user_delete_trigger",
                Weight.AGAINST,
                f"trigger `{trigger.name}` of `{relation.label}` waits for DELETE and would not fire",
                "guard it with `--mode journal`, or accept the code if the trigger is harmless",
            )
        for trigger in relation.user_triggers(UPDATE):
            if not trigger.bits & DELETE:
                # What a BEFORE ROW trigger does to the row is put back; others act outside of it.
                kept = trigger.bits & ROW and trigger.bits & BEFORE
                yield Note(
                    "update_trigger_blocks_soft_delete",
                    Weight.PREFER if kept else Weight.AGAINST,
                    f"trigger `{trigger.name}` of `{relation.label}` would fire for a soft delete",
                    "guard it with `--mode journal`, or accept the code if the trigger is harmless",
                )
        for rule in relation.rules:
            yield Note(
                "rule_on_table",
                Weight.AGAINST,
                f"rule `{rule}` of `{relation.label}` rewrites statements",
                "replace the rule by a trigger, or guard the table with `--mode journal`",
            )


def _references(facts: Facts, root: Relation, modes: Mapping[int, str]) -> Iterator[Note]:
    for key in facts.keys_to(root):
        child = facts.relations.get(key.child)
        name = child.label if child else "a table"
        if key.temporal:
            yield Note(
                "temporal_key",
                Weight.NEVER,
                f"foreign key `{key.name}` of `{name}` is over periods",
                "guard it with `--mode journal`",
            )
    for key in facts.keys_of(root):
        parent = facts.relations.get(key.parent)
        if parent is None or key.on_delete not in ("a", "r"):
            continue
        if modes.get(facts.root(parent).oid) == "journal" and facts.root(parent).oid != root.oid:
            yield Note(
                "parent_deletes_for_real",
                Weight.PREFER,
                f"rows of `{parent.label}` are really deleted, which deleted rows here would hinder "
                f"(`{key.name}`)",
                f"guard `{parent.label}` as soft too",
            )


def _readers(facts: Facts, root: Relation) -> Iterator[Note]:
    functions = [name for name, kind in root.dependents if kind == "function"]
    if functions and not all(root.column(name) for name in BOOKKEEPING):
        yield Note(
            "function_returns_row",
            Weight.AGAINST,
            f"{', '.join(functions)} return rows of `{root.label}` and break when columns are added",
            "recreate them afterwards and accept the code, or guard the table with `--mode journal`",
        )
    views = [name for name, kind in root.dependents if kind in "vm"]
    if views:
        yield Note(
            "view_shows_deleted_rows",
            Weight.NOTE,
            f"{', '.join(views)} read `{root.label}` with their owner's rights and go on showing deleted rows; what "
            "shows them is refused to agents",
            "add `WHERE deleted_at IS NULL` to them, set security_invoker (`--fix-views`), or accept the code",
        )
    if any(r.published for r in facts.tree(root)):
        yield Note(
            "published_as_update",
            Weight.NOTE,
            f"`{root.label}` is published: subscribers see an UPDATE, not a DELETE",
        )
    if not root.row_security:
        yield Note(
            "row_security_enabled",
            Weight.NOTE,
            f"row-level security is switched on for `{root.label}` (open to every role but agents); a backup "
            "role that does not own the table needs BYPASSRLS",
        )
