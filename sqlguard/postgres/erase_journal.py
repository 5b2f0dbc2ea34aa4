"""
What the journal knows of a row, and blanking it: images and keys, then what is said of it in the actions.

A row is followed over changes of its key in the direction of time, so that another row which had one of its
keys before or after keeps its images.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import class_row, dict_row
from psycopg.types.json import Jsonb

from sqlguard.postgres.images import Images
from sqlguard.postgres.undo_table import Target
from sqlguard.statement.blank import Values, blank, blank_json, blank_params

_FIRST, _LAST = 0, 1 << 62
#: Events whose details can hold values of rows; the others are read by sqlguard itself.
_TELLING = ("previewed", "started", "committed", "failed")
#: Numbers and names in such details that are no values of rows.
_KEPT = frozenset({"rows", "table", "op", "tag", "sqlstate"})
_BOOKKEEPING = "{deleted_at,deleted_by_agent}"


@dataclass(frozen=True, slots=True)
class Image:
    """One entry of the journal about the row."""

    change_set: int
    id: int
    key: list[str]
    new_key: list[str] | None
    before: str | None
    shape: int
    action: int | None


@dataclass(frozen=True, slots=True)
class Blanked:
    actions: int
    events: int
    results: int


def find_images(conn: psycopg.Connection[Any], oids: Sequence[int], key: list[str]) -> list[Image]:
    """Return the entries about the row that has, or had last, the key *key* (texts)."""
    found: dict[tuple[int, int], Image] = {}
    waiting = [(tuple(key), _FIRST, _LAST)]
    seen = set(waiting)
    while waiting:
        one, first, last = waiting.pop()
        for image in _entries(conn, oids, list(one), first, last):
            found[image.change_set, image.id] = image
            if image.new_key is None:
                continue
            # The row had the old key until then, and has the new one since.
            for other in (
                (tuple(image.key), _FIRST, image.change_set),
                (tuple(image.new_key), image.change_set, _LAST),
            ):
                if other not in seen and other[0] != one:
                    seen.add(other)
                    waiting.append(other)
    return list(found.values())


def _entries(
    conn: psycopg.Connection[Any], oids: Sequence[int], key: list[str], first: int, last: int
) -> list[Image]:
    with conn.cursor(row_factory=class_row(Image)) as cursor:
        return cursor.execute(
            "SELECT c.id AS change_set, r.id, r.key, r.new_key, r.before, c.shape_id AS shape, c.action_id AS action"
            " FROM sqlguard.change_set c CROSS JOIN LATERAL sqlguard.row_changes(c.id) r"
            " WHERE c.relid = ANY (%s::oid[]) AND c.id BETWEEN %s AND %s AND %s::text[] IN (r.key, r.new_key)",
            [list(oids), first, last, key],
        ).fetchall()


def keys_of(images: Sequence[Image], key: list[str]) -> set[str]:
    """Return every text that was a part of the row's key."""
    every = [key, *(i.key for i in images), *(i.new_key for i in images if i.new_key)]
    return {part for one in every for part in one}


def values_of(
    conn: psycopg.Connection[Any], target: Target, images: Sequence[Image], current: Sequence[str]
) -> tuple[set[str], set[str]]:
    """Return the row's values in its *images* and in its *current* texts: all, and those of unique columns."""
    reader = Images(conn)
    unique = [c for u in target.uniques for c in u.keys if c.strip('"') in target.by_name]
    sources = [(reader.shape(target, i.shape).row_type, i.before) for i in images if i.before is not None]
    sources += [(target.ident, text) for text in current]
    every: set[str] = set()
    telling: set[str] = set()
    for row_type, text in sources:
        row = conn.execute(
            sql.SQL(
                "SELECT ARRAY(SELECT DISTINCT v #>> '{{}}' FROM jsonb_path_query(j, 'lax $.**') v"
                "             WHERE jsonb_typeof(v) IN ('string', 'number')),"
                " ARRAY(SELECT j ->> n FROM unnest({unique}::text[]) n WHERE j ->> n IS NOT NULL)"
                " FROM (SELECT to_jsonb({text}::{type}) - {own}::text[] AS j) q"
            ).format(
                unique=sql.Literal([c.strip('"') for c in unique]),
                text=sql.Literal(text),
                type=row_type,
                own=sql.Literal(_BOOKKEEPING),
            )
        ).fetchone()
        assert row is not None  # noqa: S101 (a SELECT without WHERE over one row)
        every.update(row[0])
        telling.update(row[1])
    reader.close()
    return every, telling


def blank_images(conn: psycopg.Connection[Any], removal: int, images: Sequence[Image]) -> int:
    row = conn.execute(
        "SELECT sqlguard.erase_images(%s, %s, %s, true)",
        [removal, [i.change_set for i in images], [i.id for i in images]],
    ).fetchone()
    assert row is not None  # noqa: S101 (a SELECT without FROM has one row)
    return int(row[0])


def blank_journal(  # noqa: PLR0913 (two sets of values, for two sets of actions)
    conn: psycopg.Connection[Any],
    removal: int,
    *,
    touched: Collection[int],
    names: Sequence[str],
    every: Values,
    telling: Values,
) -> Blanked:
    """
    Blank *every* value in the actions that *touched* the row, and the *telling* ones in others on its table.

    *names* are how statements may have called the table; an action that names no table was not understood.
    """
    others = _mentioning(conn, names, telling, touched)
    actions = sum(_blank_action(conn, removal, a, every) for a in _actions(conn, sorted(touched)))
    actions += sum(_blank_action(conn, removal, a, telling) for a in _actions(conn, others))
    events = _blank_events(conn, removal, sorted(touched), every)
    events += _blank_events(conn, removal, others, telling)
    results = conn.execute(
        "UPDATE sqlguard.idempotency SET columns = NULL, rows = NULL WHERE action_id = ANY (%s) AND rows IS NOT NULL",
        [[*touched, *others]],
    ).rowcount
    return Blanked(actions, events, results)


def _mentioning(
    conn: psycopg.Connection[Any], names: Sequence[str], telling: Values, touched: Collection[int]
) -> list[int]:
    """Return other actions on the table in which a telling value may stand; quoting can't hide a plain run."""
    needles = {run for value in telling.keys | telling.others if (run := _longest_run(value.casefold()))}
    rows = conn.execute(
        "SELECT a.id FROM sqlguard.action a"
        " WHERE (a.tables && %s::text[] OR a.tables = '{}') AND a.id <> ALL (%s)"
        " AND EXISTS (SELECT FROM unnest(%s::text[]) n WHERE strpos(lower(concat_ws(' ', a.statement, a.executed,"
        "             a.params::text, a.reason, a.step, a.compensation)), n) > 0) ORDER BY a.id",
        [list(names), list(touched), sorted(needles)],
    )
    return [r[0] for r in rows]


def _longest_run(value: str) -> str:
    runs = "".join(c if c.isalnum() else " " for c in value).split()
    return max(runs, key=len, default="")


def _actions(conn: psycopg.Connection[Any], ids: Sequence[int]) -> Iterator[dict[str, Any]]:
    with conn.cursor(row_factory=dict_row) as cursor:
        yield from cursor.execute(
            "SELECT id, statement, executed, params, reason, step, compensation FROM sqlguard.action"
            " WHERE id = ANY (%s) ORDER BY id",
            [list(ids)],
        ).fetchall()


def _blank_action(
    conn: psycopg.Connection[Any], removal: int, action: dict[str, Any], values: Values
) -> bool:
    """Blank one action; return whether there was anything to blank."""
    new: dict[str, Any] = {"params": blank_params(action["params"], values)}
    for name in ("statement", "executed", "compensation"):
        new[name] = None if action[name] is None else blank(action[name], values)
    for name in ("reason", "step"):
        new[name] = None if action[name] is None else values.in_words(action[name])
    changed = {name: value for name, value in new.items() if value != action[name]}
    if changed:
        conn.execute("SELECT sqlguard.erase_action(%s, %s, %s)", [removal, action["id"], Jsonb(changed)])
    return bool(changed)


def _blank_events(conn: psycopg.Connection[Any], removal: int, actions: Sequence[int], values: Values) -> int:
    rows = conn.execute(
        "SELECT id, detail FROM sqlguard.event WHERE action_id = ANY (%s) AND kind = ANY (%s) ORDER BY id",
        [list(actions), list(_TELLING)],
    ).fetchall()
    done = 0
    for number, detail in rows:
        new = blank_json(detail, values, kept=_KEPT)
        if new != detail:
            conn.execute("SELECT sqlguard.erase_event(%s, %s, %s)", [removal, number, Jsonb(new)])
            done += 1
    return done
