"""
Which rows of which change sets a restore takes back.

The one idea: a deleted row is known by the change set of the very delete that marked it, never by a time. What
that delete took along is what the same statement did afterwards to rows that refer to the row by a foreign
key. All this is about the deletes as they happened (the table sqlguard_pick); where a delete was undone and
redone since, the redo's set stands for it in the end (the table sqlguard_chosen).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from sqlguard.postgres.images import Images
from sqlguard.postgres.retention import fulfils, is_one_of, name_of, one_expression, open_target, tree_oids
from sqlguard.postgres.undo_keyless import live_image
from sqlguard.postgres.undo_plan import ChangeSet, Scope, read_sets
from sqlguard.postgres.undo_sql import source
from sqlguard.postgres.undo_table import ROW, Target
from sqlguard.postgres.walls_facts import Facts, Key, Relation

_CASCADES = ("c", "n", "d")
#: From more rows on, loops over rows are not worth planning.
_FEW = 1000
_PICKED = sql.SQL(
    "EXISTS (SELECT FROM pg_temp.sqlguard_pick p WHERE p.change_set_id = r.change_set_id AND p.row_change_id = r.id)"
)
# The set of a redo has rows of its own, with the same keys as the delete that it stands for.
_PICKED_BEFORE = sql.SQL("""
    coalesce(r.new_key, r.key) IN (
        WITH RECURSIVE up (id) AS (
            SELECT {id}::bigint
            UNION SELECT c.reverts FROM up JOIN sqlguard.change_set c ON c.id = up.id WHERE c.reverts IS NOT NULL)
        SELECT coalesce(b.new_key, b.key) FROM up CROSS JOIN LATERAL sqlguard.row_changes(up.id) b
        JOIN pg_temp.sqlguard_pick p ON b.change_set_id = p.change_set_id AND b.id = p.row_change_id)
""")


@dataclass(frozen=True, slots=True)
class SetScope(Scope):
    """The deletes *sets* as they happened; *asked* is what the operator said, for the record."""

    sets: tuple[int, ...] = ()
    asked: tuple[tuple[str, Any], ...] = ()

    def condition(self) -> sql.Composable:
        return sql.SQL("c.id = ANY ({}::bigint[])").format(sql.Literal(list(self.sets)))

    def as_dict(self) -> dict[str, Any]:
        return {"restore": dict(self.asked)}


@dataclass
class Choice:
    """Fills the two tables inside the caller's transaction; `base` are the deletes that rows were picked of."""

    conn: psycopg.Connection[Any]
    facts: Facts
    images: Images
    targets: dict[int, Target] = field(default_factory=dict)
    #: Sets that were made for tombstones of which the journal knows nothing.
    adopted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for table in ("pick", "chosen"):
            self.conn.execute(
                sql.SQL(
                    "CREATE TEMP TABLE {} (change_set_id bigint, row_change_id bigint,"
                    " PRIMARY KEY (change_set_id, row_change_id)) ON COMMIT DROP"
                ).format(sql.Identifier(f"sqlguard_{table}"))
            )

    def close(self) -> None:
        self.images.close()
        self.conn.execute("DROP TABLE pg_temp.sqlguard_pick, pg_temp.sqlguard_chosen")

    @property
    def base(self) -> tuple[int, ...]:
        rows = self.conn.execute("SELECT DISTINCT change_set_id FROM pg_temp.sqlguard_pick ORDER BY 1")
        return tuple(r[0] for r in rows)

    # By action ----

    def pick_action(self, action: int) -> None:
        """Pick every delete of *action*, and what its statements did to references by SET NULL or SET DEFAULT."""
        self.conn.execute(
            "INSERT INTO pg_temp.sqlguard_pick SELECT r.change_set_id, r.id FROM sqlguard.change_set c"
            " CROSS JOIN LATERAL sqlguard.row_changes(c.id) r"
            " WHERE c.action_id = %s AND c.undo_id IS NULL AND c.op IN ('delete', 'soft_delete')",
            [action],
        )
        self._advise()
        for one in self._sets(self.base):
            for key, child in self._consequences(one):
                if child.op == "update":
                    self._pick_referring(key, one, child)

    # By rows ----

    def pick_rows(self, root: Relation, keys: Sequence[list[str]], where: str | None) -> None:
        """Pick the last deletes of the rows with *keys* (texts) or of those that fulfil *where*."""
        if self.facts.guarded[root.oid].mode == "soft":
            self._pick_tombstones(root, keys, where)
        else:
            self._pick_images(root, keys, where)

    def pick_consequences(self) -> None:
        """Pick, to any depth, what the picked deletes did to rows that referred to the picked rows."""
        waiting = list(self._sets(self.base))
        while waiting:
            one = waiting.pop()
            self._advise()
            for key, child in self._consequences(one):
                if self._pick_referring(key, one, child) and child.op != "update":
                    waiting.append(child)

    def _pick_tombstones(self, root: Relation, keys: Sequence[list[str]], where: str | None) -> None:
        target = self.target(root.oid)
        names = root.key_columns
        wanted: sql.Composable = sql.SQL("true")
        if keys:
            wanted = is_one_of(target, names, ROW, list(keys))
        elif where is not None:
            wanted = fulfils(one_expression(where), ROW, root.name)
        image: sql.Composable = sql.SQL("NULL")
        name = target.key_of(names, ROW)
        if not names:
            image = live_image(target, list(target.by_name))
            name = sql.SQL("ARRAY[{}::text]").format(image)
        self.conn.execute(
            sql.SQL(
                "CREATE TEMP TABLE sqlguard_wanted ON COMMIT DROP AS SELECT {row}.deleted_at AS at, {name} AS name,"
                " {image}::text AS image FROM {table} AS {row} WHERE {row}.deleted_at IS NOT NULL AND {wanted}"
            ).format(row=ROW, name=name, image=image, table=name_of(root), wanted=wanted)
        )
        self.conn.execute(
            # Each set is read once, not once for each of its rows.
            "INSERT INTO pg_temp.sqlguard_pick SELECT DISTINCT s.change_set_id, s.id FROM pg_temp.sqlguard_wanted w"
            " JOIN (SELECT r.*, coalesce(r.key, ARRAY[r.before]) AS name, c.statement_at FROM sqlguard.change_set c"
            "       CROSS JOIN LATERAL sqlguard.row_changes(c.id) r"
            "       WHERE c.relid = ANY (%s::oid[]) AND c.op = 'soft_delete' AND c.undo_id IS NULL"
            "           AND c.statement_at IN (SELECT at FROM pg_temp.sqlguard_wanted) OFFSET 0) s"
            " ON s.statement_at = w.at AND s.name = w.name",
            [tree_oids(self.facts, root)],
        )
        for one in self._in_effect():
            self.conn.execute(
                sql.SQL(
                    "DELETE FROM pg_temp.sqlguard_wanted w USING"
                    " (SELECT coalesce(r.new_key, r.key, ARRAY[r.before]) AS name {}) s WHERE w.name = s.name"
                ).format(source(one))
            )
        self._adopt(root)
        self.conn.execute("DROP TABLE pg_temp.sqlguard_wanted")

    def _adopt(self, root: Relation) -> None:
        """Write change sets for tombstones that nobody captured, so that their restore is like any other."""
        times = self.conn.execute("SELECT DISTINCT at FROM pg_temp.sqlguard_wanted ORDER BY 1").fetchall()
        if not times:
            return
        shape = self.conn.execute(
            "SELECT k.id, sqlguard.keep_shape(k.id, %(oid)s) FROM"
            " (SELECT sqlguard.shape_key(%(oid)s::oid::regclass) AS id OFFSET 0) k",
            {"oid": root.oid},
        ).fetchone()
        assert shape is not None  # noqa: S101 (a SELECT without FROM has one row)
        for (at,) in times:
            row = self.conn.execute(
                "INSERT INTO sqlguard.change_set (statement_at, relid, schema_name, table_name, op, rows,"
                " key_columns, shape_id) SELECT %s, %s, %s, %s, 'soft_delete', count(*), %s, %s"
                " FROM pg_temp.sqlguard_wanted WHERE at = %s RETURNING id",
                [at, root.oid, root.schema, root.name, root.key_columns or None, shape[0], at],
            ).fetchone()
            assert row is not None  # noqa: S101 (RETURNING of one row)
            self.adopted.append(row[0])
            self.conn.execute(
                "WITH made AS ("
                " INSERT INTO sqlguard.row_change (change_set_id, key, before)"
                " SELECT %(set)s, CASE WHEN %(keyed)s THEN name END, CASE WHEN NOT %(keyed)s THEN image END"
                " FROM pg_temp.sqlguard_wanted WHERE at = %(at)s RETURNING change_set_id, id)"
                " INSERT INTO pg_temp.sqlguard_pick SELECT change_set_id, id FROM made",
                {"set": row[0], "keyed": bool(root.key_columns), "at": at},
            )

    def _pick_images(self, root: Relation, keys: Sequence[list[str]], where: str | None) -> None:
        """Pick, of a table whose deletes are real, the newest delete of each row that is in effect."""
        deletes = self._sets_where(
            sql.SQL("c.relid = ANY ({}::oid[]) AND c.op = 'delete' AND c.undo_id IS NULL").format(
                sql.Literal(tree_oids(self.facts, root))
            )
        )
        target = self.target(root.oid)
        for one in deletes:
            wanted: sql.Composable = sql.SQL("true")
            if keys:
                literals = sql.SQL(", ").join(sql.SQL("{}::text[]").format(sql.Literal(k)) for k in keys)
                wanted = sql.SQL("r.key IN ({})").format(literals)
            elif where is not None:
                image = sql.SQL("(SELECT (r.before::{}).*)").format(
                    self.images.shape(target, one.shape_id).row_type
                )
                wanted = sql.SQL("EXISTS (SELECT FROM {} AS {} WHERE {})").format(
                    image, sql.Identifier(root.name), one_expression(where)
                )
            self.conn.execute(
                sql.SQL(
                    "INSERT INTO pg_temp.sqlguard_pick SELECT r.change_set_id, r.id {} AND {}"
                    " AND r.removal_id IS NULL ON CONFLICT DO NOTHING"
                ).format(source(one), wanted)
            )
        if root.key_columns:
            self._newest_only(root, target)

    def _newest_only(self, root: Relation, target: Target) -> None:
        """Leave out rows that are there by now; a key that was deleted more than once comes back as it was last."""
        self.conn.execute(
            sql.SQL(
                "DELETE FROM pg_temp.sqlguard_pick p USING sqlguard.row_change r, {table} AS {row}"
                " WHERE r.change_set_id = p.change_set_id AND r.id = p.row_change_id AND {matches}"
            ).format(table=target.ident, row=ROW, matches=target.matches(root.key_columns, sql.SQL("r.key")))
        )
        self.conn.execute(
            "DELETE FROM pg_temp.sqlguard_pick p USING sqlguard.row_change r, sqlguard.row_change later,"
            " pg_temp.sqlguard_pick q"
            " WHERE r.change_set_id = p.change_set_id AND r.id = p.row_change_id"
            " AND later.change_set_id = q.change_set_id AND later.id = q.row_change_id"
            " AND q.change_set_id > p.change_set_id AND later.key = r.key"
        )

    # What a statement took along ----

    def _consequences(self, one: ChangeSet) -> Iterator[tuple[Key, ChangeSet]]:
        """Yield what the statement of *one* did, deeper, to tables that refer to its table, with the key."""
        keys = self._keys_to(one)
        # The walls' own actions of a soft delete run one level deeper, PostgreSQL's of a DELETE on its level;
        # both are recorded after what caused them.
        depth = max(one.depth, 1) if one.op == "soft_delete" else one.depth
        for child in self._sets_where(
            sql.SQL(
                "c.txid = {}::xid8 AND c.statement_at = {} AND c.id > {} AND c.depth >= {} AND c.undo_id IS NULL"
                " AND c.op IN ('delete', 'soft_delete', 'update')"
            ).format(
                sql.Literal(one.txid), sql.Literal(one.statement_at), sql.Literal(one.id), sql.Literal(depth)
            ),
        ):
            for key in keys:
                if child.relid in self._tree_of(key.child) and (child.op == "update") == (
                    key.on_delete != "c"
                ):
                    yield key, child

    def _keys_to(self, one: ChangeSet) -> list[Key]:
        relation = self.facts.relations.get(one.relid)
        if relation is None:
            return []
        return [k for k in self.facts.keys_to(self.facts.root(relation)) if k.on_delete in _CASCADES]

    def _tree_of(self, oid: int) -> list[int]:
        relation = self.facts.relations.get(oid)
        return [] if relation is None else tree_oids(self.facts, self.facts.root(relation))

    def _pick_referring(self, key: Key, parent: ChangeSet, child: ChangeSet) -> int:
        joins = sql.SQL(" AND ").join(
            sql.SQL("p.{} {} c.{}").format(sql.Identifier(ref), sql.SQL(op), sql.Identifier(column))
            for ref, op, column in zip(key.ref_columns, key.operators, key.columns, strict=True)
        )
        return self.conn.execute(
            sql.SQL(
                "INSERT INTO pg_temp.sqlguard_pick"
                ' SELECT DISTINCT {child}::bigint, c."sg id" FROM ({parents}) p'
                ' JOIN pg_temp.sqlguard_pick k ON k.change_set_id = {parent} AND k.row_change_id = p."sg id"'
                " JOIN ({children}) c ON {joins} ON CONFLICT DO NOTHING"
            ).format(
                child=sql.Literal(child.id),
                parent=sql.Literal(parent.id),
                parents=self._values(parent),
                children=self._values(child),
                joins=joins,
            )
        ).rowcount

    def _values(self, one: ChangeSet) -> sql.Composable:
        """Return the rows of a set with the values that they had: the tombstone's own, or the image's."""
        target = self.target(one.relid)
        if one.op == "soft_delete" and one.key_columns:
            return sql.SQL(
                'SELECT r.id AS "sg id", {row}.* FROM sqlguard.row_changes({set}) r JOIN {table} AS {row} ON {matches}'
            ).format(
                row=ROW,
                table=target.ident,
                matches=target.matches(one.key_columns, sql.SQL("r.key")),
                set=sql.Literal(one.id),
            )
        return sql.SQL(
            'SELECT r.id AS "sg id", (r.before::{}).* FROM sqlguard.row_change r WHERE r.change_set_id = {}'
        ).format(self.images.shape(target, one.shape_id).row_type, sql.Literal(one.id))

    # In the end ----

    def settle(self) -> list[ChangeSet]:
        """Fill sqlguard_chosen with what is still in effect of the picked rows; return their sets."""
        sets = self._in_effect()
        self._advise()
        base = set(self.base)
        for one in sets:
            picked = _PICKED if one.id in base else _PICKED_BEFORE
            self.conn.execute(
                sql.SQL("INSERT INTO pg_temp.sqlguard_chosen SELECT r.change_set_id, r.id {} AND {}").format(
                    source(one), picked.format(id=sql.Literal(one.id))
                )
            )
        self.conn.execute("ANALYZE pg_temp.sqlguard_chosen")
        return sets

    def _advise(self) -> None:
        """Tell the planner how much there is: of the journal it knows little, of new tables nothing."""
        self.conn.execute("ANALYZE pg_temp.sqlguard_pick")
        self.conn.execute(
            "SELECT set_config('enable_nestloop', CASE WHEN count(*) > %s THEN 'off' ELSE 'on' END, true)"
            " FROM pg_temp.sqlguard_pick",
            [_FEW],
        )

    def target(self, relid: int) -> Target:
        if relid not in self.targets:
            self.targets[relid] = open_target(self.conn, self.facts.relations[relid])
        return self.targets[relid]

    def _in_effect(self) -> list[ChangeSet]:
        sets, _ = read_sets(self.conn, SetScope(sets=self.base))
        return [s for s in sets if s.relid in self.facts.relations]

    def _sets(self, ids: Sequence[int]) -> list[ChangeSet]:
        return self._sets_where(sql.SQL("c.id = ANY ({}::bigint[])").format(sql.Literal(list(ids))))

    def _sets_where(self, condition: sql.Composable) -> list[ChangeSet]:
        return [s for s in _read_plain(self.conn, condition) if s.relid in self.facts.relations]


def _read_plain(conn: psycopg.Connection[Any], condition: sql.Composable) -> list[ChangeSet]:
    """Return change sets as they happened, whatever became of them."""
    with conn.cursor(row_factory=class_row(ChangeSet)) as cursor:
        return cursor.execute(
            sql.SQL(
                "SELECT c.id, c.action_id, c.task_id, c.txid::text AS txid, c.statement_at, c.relid::bigint AS relid,"
                " c.schema_name AS schema, c.table_name AS name, c.op, c.key_columns, c.shape_id, c.depth, c.undo_id,"
                " c.rows, NULL::bigint AS pending FROM sqlguard.change_set c WHERE {} ORDER BY c.id"
            ).format(condition)
        ).fetchall()
