"""
Erase: remove a row for good, and what the journal knows of its contents. It can't be undone.

Theory of operation. The row goes first, if nothing refers to it and nothing holds it. Then its images and keys
in the journal are blanked, over changes of its key; an undo says of them that they were erased. Last, the
actions that touched the row lose the row's values out of their statements, parameters and reasons; other
actions on its table lose those that identify it: its key and its unique values.

What is blanked in an entry of a hash chain is written to the chain as an event of its own (see migration 0005),
so `sqlguard journal verify` tells an erasure from tampering. The record of the erasure holds no values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import psycopg
from psycopg import sql

from sqlguard.errors import Refused
from sqlguard.postgres import erase_journal as journal
from sqlguard.postgres.erase_report import HELD, LIVE, NOTHING, REFERENCED, EraseRefusal, EraseReport
from sqlguard.postgres.images import Images
from sqlguard.postgres.purge import note_removed, record
from sqlguard.postgres.purge_report import LIVE_REFERENCE
from sqlguard.postgres.purge_sql import Doomed, doom, storage
from sqlguard.postgres.retention import (
    LOCK,
    Hold,
    around,
    every_row,
    find_guarded,
    is_one_of,
    key_texts,
    name_of,
    one_expression,
    open_target,
    read_holds,
    tree_oids,
)
from sqlguard.postgres.undo_table import ROW, Target
from sqlguard.postgres.walls_facts import Relation, read_facts
from sqlguard.statement.blank import Values

_NEVER = datetime(1, 1, 1, tzinfo=UTC)


def erase(  # noqa: PLR0913 (one argument per flag)
    conn: psycopg.Connection[Any],
    table: str,
    *,
    keys: Sequence[str],
    live: bool = False,
    reason: str | None = None,
    preview: bool = False,
) -> EraseReport:
    """
    Erase the rows of *table* with *keys*, deleted ones only unless *live*, and their traces in the journal.

    All or nothing, in one transaction. Refused (the report says why) for live rows, for rows on hold, and
    while other rows refer to one of them. Rows that are gone already still have traces.
    """
    if not keys:
        raise Refused("nothing was named to erase", hint="give the keys of the rows")
    with conn.transaction() as transaction:
        conn.execute("SELECT pg_advisory_xact_lock(%s, %s)", LOCK)
        facts = read_facts(conn)
        root = find_guarded(facts, table)
        if not root.key_columns:
            raise Refused(f"`{root.label}` has no key by which the journal could know its rows")
        target = open_target(conn, root)
        holds = read_holds(conn, [root.oid])
        run = _Erasure(
            conn, doom(facts, root, target, _NEVER, holds), key_texts(conn, target, root.key_columns, keys)
        )
        with every_row(conn, around(facts, root)):
            refused = tuple(run.look(live=live))
            report = EraseReport(root.label, preview=preview, refused=refused)
            if not refused:
                report = run.carry_out(reason, preview=preview)
        if preview or report.stopped:
            raise psycopg.Rollback(transaction)
    return report


@dataclass
class _Erasure:
    conn: psycopg.Connection[Any]
    doomed: Doomed
    keys: list[list[str]]
    _images: dict[tuple[str, ...], list[journal.Image]] = field(default_factory=dict)
    #: The rows' texts by key, of those that are there.
    _there: dict[tuple[str, ...], str] = field(default_factory=dict)

    @property
    def _root(self) -> Relation:
        return self.doomed.root

    @property
    def _target(self) -> Target:
        return self.doomed.target

    def look(self, *, live: bool) -> Iterator[EraseRefusal]:
        """Lock the rows, find their images; yield what stands in the way."""
        oids = tree_oids(self.doomed.facts, self._root)
        chosen = is_one_of(self._target, self._root.key_columns, ROW, self.keys)
        soft = self.doomed.facts.guarded[self._root.oid].mode == "soft"
        deleted = sql.SQL("{}.deleted_at IS NOT NULL" if soft else "false").format(ROW)
        rows = self.conn.execute(
            sql.SQL("SELECT {}, ({}.*)::text, {}, {} FROM {} AS {} WHERE {} FOR UPDATE OF {}").format(
                self.doomed.key, ROW, deleted, self.doomed.held, name_of(self._root), ROW, chosen, ROW
            )
        ).fetchall()
        held = {tuple(key) for key, _, _, is_it in rows if is_it}
        for key, text, gone, _ in rows:
            self._there[tuple(key)] = text
            if not gone and not live:
                yield EraseRefusal(LIVE, "the row is live; say --live to erase it all the same", key)
        for key in self.keys:
            self._images[tuple(key)] = images = journal.find_images(self.conn, oids, key)
            if tuple(key) in held or self._image_held(images, key):
                yield EraseRefusal(HELD, "the row is on hold", key)
            elif not images and tuple(key) not in self._there:
                yield EraseRefusal(NOTHING, "neither the table nor the journal knows such a row", key)
        yield from self._references(chosen)

    def _image_held(self, images: Sequence[journal.Image], key: list[str]) -> bool:
        """Tell whether a hold is on a row of which only images are left."""
        if any(h.condition is None and h.key in (None, key) for h in self.doomed.holds):
            return True
        reader = Images(self.conn)
        found = any(
            self._fulfils(hold, reader, image)
            for hold in self.doomed.holds
            if hold.condition is not None
            for image in images
            if image.before is not None
        )
        reader.close()
        return found

    def _fulfils(self, hold: Hold, reader: Images, image: journal.Image) -> bool:
        assert hold.condition is not None  # noqa: S101 (the caller looked)
        row = self.conn.execute(
            sql.SQL("SELECT EXISTS (SELECT FROM (SELECT ({}::{}).*) AS {} WHERE {})").format(
                sql.Literal(image.before),
                reader.shape(self._target, image.shape).row_type,
                sql.Identifier(self._root.name),
                one_expression(hold.condition),
            )
        ).fetchone()
        return bool(row and row[0])

    def _references(self, chosen: sql.Composable) -> Iterator[EraseRefusal]:
        for reference in self.doomed.references:
            for extra, code, which in (
                (reference.live, LIVE_REFERENCE, "live"),
                (sql.SQL("NOT ({})").format(reference.live), REFERENCED, "deleted"),
            ):
                rows = self.conn.execute(
                    sql.SQL("SELECT {} FROM {} AS {} WHERE {} AND {}").format(
                        self.doomed.key, name_of(self._root), ROW, chosen, reference.exists(extra)
                    )
                )
                for (key,) in rows:
                    problem = (
                        f"{which} rows of `{reference.child.label}` refer to it (`{reference.key.name}`)"
                    )
                    yield EraseRefusal(code, problem, key)

    # The work ----

    def carry_out(self, reason: str | None, *, preview: bool) -> EraseReport:
        images = {(i.change_set, i.id): i for found in self._images.values() for i in found}
        # Read before anything is blanked.
        values = self._values(list(images.values()))
        number = record(self.conn, "erase", {"table": self._root.label, "keys": len(self.keys)}, reason)
        rows = sum(self._delete(number, leaf) for leaf in storage(self.doomed.facts, self._root))
        blanked_images = journal.blank_images(self.conn, number, list(images.values()))
        done = journal.blank_journal(
            self.conn,
            number,
            touched={i.action for i in images.values() if i.action is not None},
            names=self._names(),
            every=values[0],
            telling=values[1],
        )
        self._forget_holds()
        return EraseReport(
            self._root.label,
            erasure=None if preview else number,
            preview=preview,
            rows=rows,
            images=blanked_images,
            actions=done.actions,
            events=done.events,
            results=done.results,
        )

    def _values(self, images: Sequence[journal.Image]) -> tuple[Values, Values]:
        keys = {part for key, found in self._images.items() for part in journal.keys_of(found, list(key))}
        every, telling = journal.values_of(self.conn, self._target, images, list(self._there.values()))
        return Values(frozenset(keys), frozenset(every)), Values(frozenset(keys), frozenset(telling))

    def _names(self) -> list[str]:
        """Return what statements may have called the table."""
        tree = list(self.doomed.facts.tree(self._root))
        return [name for r in tree for name in (r.label, r.name)]

    def _delete(self, number: int, leaf: Relation) -> int:
        soft = leaf.column("deleted_at") is not None
        gone = self.conn.execute(
            sql.SQL("DELETE FROM ONLY {} AS {} WHERE {} RETURNING {}").format(
                name_of(leaf),
                ROW,
                is_one_of(self._target, self._root.key_columns, ROW, self.keys),
                sql.SQL("{}.deleted_at").format(ROW) if soft else sql.SQL("NULL::timestamptz"),
            )
        ).fetchall()
        if gone:
            tree = tree_oids(self.doomed.facts, self._root)
            note_removed(self.conn, number, leaf, tree, [row[0] for row in gone])
        return len(gone)

    def _forget_holds(self) -> None:
        """A released hold may still name the row."""
        self.conn.execute(
            sql.SQL(
                "UPDATE sqlguard.hold SET key = ARRAY['erased']"
                " WHERE relid = {} AND released_at IS NOT NULL AND key IN ({})"
            ).format(
                sql.Literal(self._root.oid),
                sql.SQL(", ").join(sql.SQL("{}::text[]").format(sql.Literal(key)) for key in self.keys),
            )
        )
