"""Sub-selects in a predicate: EXISTS, IN (SELECT …) and arrays of one, and which column stands behind a name."""

from typing import TYPE_CHECKING, Any

from sqlguard.statement.names import Entry
from sqlguard.statement.parts import TRUE, Const, Opaque, Part, both, mentioned

if TYPE_CHECKING:
    from sqlguard.statement.predicate import Fold
    from sqlguard.statement.walk import Body, Walk

#: Clauses with which a sub-select's rows are no longer simply those of its FROM and WHERE.
_SHAPING = frozenset(
    {"limitCount", "limitOffset", "groupClause", "havingClause", "distinctClause", "larg", "valuesLists"}
)


def fold(folding: "Fold", body: "Body") -> Part:
    """Fold a SubLink in a boolean place."""
    select = body["subselect"].get("SelectStmt", {})
    match body["subLinkType"]:
        case "EXISTS_SUBLINK":
            return _exists(folding, select)
        case "ANY_SUBLINK" if "operName" not in body or body["operName"][-1]["String"]["sval"] == "=":
            return _member(folding, body["testexpr"], select)
        case "ALL_SUBLINK" | "ANY_SUBLINK":
            return _depends(folding, body)
    return _depends(folding, body)


def fold_array(folding: "Fold", *, some: bool, operator: str, left: "Body", sublink: "Body") -> Part:
    """Fold `left = ANY (ARRAY(SELECT …))`."""
    select = sublink["subselect"].get("SelectStmt", {})
    if some and operator == "=" and sublink["subLinkType"] == "ARRAY_SUBLINK":
        return _member(folding, left, select)
    return _depends(folding, {"left": left, "sublink": sublink})


def _depends(folding: "Fold", node: Any) -> Part:
    mentions = frozenset(folding.terms.mentions(node))
    return Opaque() if folding.target in mentions else Const()


def _exists(folding: "Fold", select: "Body") -> Part:
    """`EXISTS (SELECT …)` that does not speak of the row is the same for all; one that finds the row itself is true."""
    if not any(owner is folding.target for owner in folding.terms.mentions(select)):
        return Const()
    if select.keys() & _SHAPING or "whereClause" not in select:
        return Opaque()
    parts = [folding.part(select["whereClause"])]
    return _left_over(folding, parts + joined(folding, select.get("fromClause", ()), parts))


def _member(folding: "Fold", left: "Body", select: "Body") -> Part:
    """`x IN (SELECT y …)` is `EXISTS (SELECT … WHERE x = y)`."""
    if not any(owner is folding.target for owner in folding.terms.mentions([left, select])):
        return Const()
    targets = select.get("targetList", ())
    if select.keys() & (_SHAPING - {"distinctClause"}) or len(targets) != 1:
        return Opaque()
    value = targets[0]["ResTarget"].get("val")
    if value is None or "RowExpr" in left:
        return Opaque()
    parts = [folding.compare("=", left, value)]
    if "whereClause" in select:
        parts.append(folding.part(select["whereClause"]))
    return _left_over(folding, parts + joined(folding, select.get("fromClause", ()), parts[1:]))


def joined(folding: "Fold", items: Any, where: list[Part]) -> list[Part]:
    """
    Return the conditions of the joins among the FROM *items*, as far as they decide about rows.

    Those of an outer join do so only where *where* asks for what it has found, or has not.
    """
    asked = any(mentioned(part) for part in where)
    found: list[Part] = []
    for item in items:
        join = item.get("JoinExpr")
        if join is None:
            continue
        found += joined(folding, (join["larg"], join["rarg"]), where)
        if not asked and join["jointype"] != "JOIN_INNER":
            continue
        if "quals" in join:
            found.append(folding.part(join["quals"]))
        elif "usingClause" in join or join.get("isNatural"):
            found.append(Opaque())
    return found


def _left_over(folding: "Fold", parts: list[Part]) -> Part:
    """Return what remains of a sub-select's conditions when ties of a row to itself are taken out."""
    rest = [p for p in folding.linked(both(parts)) if p != TRUE]
    if not rest:
        return TRUE
    if all(isinstance(p, Const) for p in rest):
        return Const()
    return Opaque()


def origin(walk: "Walk", entry: Entry, column: str) -> tuple[int, str] | None:
    """Return the table and column that *column* of a FROM item is, for all rows of that table; None if it isn't."""
    for _ in range(16):
        if entry.table is not None:
            return (entry.table.oid, column)
        query = entry.query
        if (
            query is None
            or query.keys() & (_SHAPING | {"whereClause"})
            or len(query.get("fromClause", ())) != 1
        ):
            return None
        found = _target(query, column)
        owner = walk.owners.get(id(found)) if found is not None else None
        if owner is None or found is None:
            return _starred(walk, query, column)
        entry, column = owner, found["fields"][-1]["String"]["sval"]
    return None


def _target(query: "Body", column: str) -> "Body | None":
    for item in query.get("targetList", ()):
        target = item["ResTarget"]
        value = target.get("val", {}).get("ColumnRef")
        if value is not None and "String" in value["fields"][-1]:
            name = target.get("name", value["fields"][-1]["String"]["sval"])
            if name == column:
                return value  # type: ignore[no-any-return]
    return None


def _starred(walk: "Walk", query: "Body", column: str) -> tuple[int, str] | None:
    """`SELECT * FROM t`: the column is t's."""
    targets = query.get("targetList", ())
    source = query["fromClause"][0].get("RangeVar")
    if source is None or len(targets) != 1:
        return None
    fields = targets[0]["ResTarget"].get("val", {}).get("ColumnRef", {}).get("fields", ())
    if not fields or "A_Star" not in fields[-1]:
        return None
    table = walk.catalog.table(source.get("schemaname"), source["relname"], walk.session.search_path)
    return (table.oid, column) if table is not None else None
