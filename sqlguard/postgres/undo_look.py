"""What a report shows of single rows: as they are, as an undo makes them, and what stands in its way."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from sqlguard.catalog import DELETED_AT, DELETED_BY_AGENT
from sqlguard.postgres.images import Images
from sqlguard.postgres.undo_plan import ChangeSet
from sqlguard.postgres.undo_report import Conflict, Difference
from sqlguard.postgres.undo_sql import Work
from sqlguard.postgres.undo_table import ROW, Target

#: What a report lists one by one; the counts are always complete.
LISTED = 1000


@dataclass(frozen=True, slots=True)
class Look:
    """Reads rows inside an undo's transaction."""

    conn: psycopg.Connection[Any]
    images: Images
    tables: Mapping[int, Target | None]

    def differences(self, work: Work, op: str, limit: int) -> list[Difference]:
        """Return rows as they were before this step and as they are after it."""
        wanted: sql.Composable = sql.SQL("NULL::jsonb")
        if work.keys:
            wanted = sql.SQL("(SELECT to_jsonb({row}.*) FROM {table} AS {row} WHERE {matches})").format(
                row=ROW,
                table=work.target.ident,
                matches=work.target.matches(work.keys, sql.SQL("coalesce(r.new_key, r.key)")),
            )
        query = sql.SQL("""
            SELECT r.key, to_jsonb(r.before::{type}) AS current, {wanted} AS wanted
            FROM sqlguard.row_changes({new}) r LIMIT {limit}
        """).format(
            type=work.target.ident, wanted=wanted, new=sql.Literal(work.new), limit=sql.Literal(limit)
        )
        return [
            Difference(work.change.table, dict(zip(work.keys, key or [], strict=True)), op, current, wanted)
            for key, current, wanted in self.conn.execute(query)
        ]

    def conflicts(self, sets: Sequence[ChangeSet]) -> tuple[int, tuple[Conflict, ...]]:
        """Return how many conflicts were found, and the first of them with their values."""
        # Asked first: a join would read the whole journal for nothing.
        some = self.conn.execute("SELECT FROM pg_temp.sqlguard_conflict WHERE change_set_id > 0 LIMIT 1")
        if not some.rowcount:
            return 0, ()
        with self.conn.cursor(row_factory=dict_row) as cursor:
            rows = cursor.execute(
                "SELECT x.change_set_id, x.reason, coalesce(r.new_key, r.key) AS key, r.before, r.id,"
                " count(*) OVER () AS n"
                " FROM (SELECT DISTINCT change_set_id AS id FROM pg_temp.sqlguard_conflict) s"
                " CROSS JOIN LATERAL sqlguard.row_changes(s.id) r JOIN pg_temp.sqlguard_conflict x"
                " ON r.change_set_id = x.change_set_id AND r.id = x.row_change_id"
                " ORDER BY x.change_set_id DESC, x.row_change_id LIMIT %s",
                [LISTED],
            ).fetchall()
        by_id = {s.id: s for s in sets}
        return (rows[0]["n"] if rows else 0), tuple(
            self._conflict(by_id[r["change_set_id"]], r) for r in rows
        )

    def _conflict(self, one: ChangeSet, row: dict[str, Any]) -> Conflict:
        names = one.key_columns or []
        key = dict(zip(names, row["key"] or [], strict=False))
        target = self.tables[one.relid]
        current = wanted = None
        if target is not None and all(n in target.by_name for n in names):
            # An erased row has no key any more.
            current = self._current(target, names, row["key"]) if names and row["key"] else None
            wanted = self._wanted(one, target, row["before"])
            if one.op == "soft_delete" and wanted is None and current is not None:
                # The deleted row is its own image.
                wanted = current | {DELETED_AT: None, DELETED_BY_AGENT: None}
        return Conflict(one.table, key, row["reason"], current, wanted, one.id)

    def _current(self, target: Target, names: Sequence[str], key: Sequence[str]) -> dict[str, Any] | None:
        query = sql.SQL("SELECT to_jsonb({row}.*) FROM {table} AS {row} WHERE {matches}").format(
            row=ROW,
            table=target.ident,
            matches=target.matches(names, sql.SQL("{}::text[]").format(sql.Literal(list(key)))),
        )
        found = self.conn.execute(query).fetchone()
        return found[0] if found else None

    def _wanted(self, one: ChangeSet, target: Target, image: str | None) -> dict[str, Any] | None:
        if image is None:
            return None
        shape = self.images.shape(target, one.shape_id)
        found = self.conn.execute(sql.SQL("SELECT to_jsonb(%s::text::{})").format(shape.row_type), [image])
        row = found.fetchone()
        return row[0] if row else None
