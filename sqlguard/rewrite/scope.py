"""
What a name can mean at one place of a statement: the FROM items that are in sight there, level by level.

It follows PostgreSQL's name spaces (parse_relation.c): a column is looked for in every level from the inside
out, and only then is a bare name a whole row; an unnamed join merges its USING columns and leaves its arms'
names in sight; a named join hides them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from sqlguard.catalog import Table
from sqlguard.errors import NotUnderstood, Refused
from sqlguard.rewrite.source import quote

HINT = "name the columns you want instead of `*` or the whole row"


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Columns:
    """The names of a query's result; not `complete` where a `*` stands for columns that can't be known."""

    names: tuple[str, ...] = ()
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Item:
    """
    One thing in FROM. `known`: `columns` are all it has; `open`: it may have a column of any name.

    `table` is set where the item can be named with its schema, `bare` unset where its columns have to be
    qualified (EXCLUDED, OLD and NEW, the alias of a USING list), `nullable` on the far side of an outer join.
    """

    name: str | None
    columns: tuple[Column, ...] = ()
    known: bool = True
    open: bool = False
    table: Table | None = None
    nullable: bool = False
    bare: bool = True
    #: A NOT NULL column, to tell a row from the nothing of an outer join.
    anchor: str | None = None
    #: In RETURNING of a DELETE: `deleted` for its target, `new` for the row that it does not leave behind.
    role: str = ""
    #: Oid of the soft table that it is, 0 else.
    soft: int = 0

    @property
    def hides(self) -> bool:
        return any(c.hidden for c in self.columns)

    @property
    def visible(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.columns if not c.hidden)


@dataclass(frozen=True, slots=True)
class Join:
    """A join without an alias of its own; `merged` are the columns of USING, which it has once."""

    left: "Element"
    right: "Element"
    merged: tuple[str, ...] = ()
    using: Item | None = None


Element = Item | Join


@dataclass
class Scope:
    """The FROM items of one level in order; grows while FROM is read, because LATERAL looks to the left."""

    elements: list[Element] = field(default_factory=list)
    parent: "Scope | None" = None

    def levels(self) -> "Iterator[Scope]":
        level: Scope | None = self
        while level is not None:
            yield level
            level = level.parent

    def items(self) -> Iterator[Item]:
        for element in self.elements:
            yield from items(element)

    def named(self, name: str, schema: str | None = None) -> Item | None:
        """Return the item that *name* refers to in this level."""
        for item in self.items():
            if schema is None and item.name == name:
                return item
            if item.table is not None and (item.table.schema, item.table.name) == (schema, name):
                return item
        return None

    def find(self, name: str, schema: str | None = None) -> "tuple[Scope, Item] | None":
        """Return the nearest item of that name and its level."""
        for level in self.levels():
            item = level.named(name, schema)
            if item is not None:
                return level, item
        return None

    def candidates(self, name: str) -> list[tuple[Item | None, Column]]:
        """Return the columns that a bare *name* could mean in this level; no item for a merged one."""
        found: list[tuple[Item | None, Column]] = []
        for element in self.elements:
            _candidates(element, name, found)
        return found

    def qualifier(self, item: Item) -> str:
        """Return the text that names *item*, with its schema where the level has two of that name."""
        if item.name is None:
            raise NotUnderstood("an item of FROM has no name", rules=("rewrite-not-placed",))
        if item.table is not None and sum(i.name == item.name for i in self.items()) > 1:
            return f"{quote(item.table.schema)}.{quote(item.table.name)}"
        return quote(item.name)


def items(element: Element) -> Iterator[Item]:
    """Yield what can be named in *element*."""
    if isinstance(element, Item):
        yield element
        return
    yield from items(element.left)
    yield from items(element.right)
    if element.using is not None:
        yield element.using


def nullable(element: Element) -> Element:
    """Return *element* as the far side of an outer join has it."""
    if isinstance(element, Item):
        return replace(element, nullable=True)
    return replace(element, left=nullable(element.left), right=nullable(element.right))


def columns(element: Element) -> list[Column]:
    """Return the columns that `*` gives for *element*, hidden ones too, as far as they are known."""
    if isinstance(element, Item):
        return list(element.columns)
    left, right = columns(element.left), columns(element.right)
    merged = [Column(name) for name in element.merged]
    return merged + [c for c in left + right if c.name not in element.merged]


def known(element: Element) -> bool:
    return all(item.known for item in items(element))


def hides(element: Element) -> bool:
    return any(item.hides for item in items(element))


def _candidates(element: Element, name: str, found: list[tuple[Item | None, Column]]) -> None:
    if isinstance(element, Item):
        if element.bare:
            found += [(element, column) for column in element.columns if column.name == name]
    elif name in element.merged:
        found.append((None, Column(name)))
    else:
        _candidates(element.left, name, found)
        _candidates(element.right, name, found)


def expand(scope: Scope, element: Element) -> list[str]:
    """Return what `*` has to become for *element*: the columns that an agent sees, in PostgreSQL's order."""
    if isinstance(element, Item):
        if element.bare and not element.hides and element.name is not None:
            return [f"{scope.qualifier(element)}.*"]
        return [text for _, text in _explode(scope, element)]
    if not element.merged:
        return expand(scope, element.left) + expand(scope, element.right)
    return [text for _, text in _explode(scope, element)]


def _explode(scope: Scope, element: Element) -> list[tuple[str, str]]:
    """Return name and text of each visible column of *element*."""
    if isinstance(element, Item):
        return [(name, column_text(scope, element, name)) for name in seen(element)]
    arms = _explode(scope, element.left) + _explode(scope, element.right)
    rest = [(name, text) for name, text in arms if name not in element.merged]
    return [(name, _merged_text(scope, element, name)) for name in element.merged] + rest


def seen(item: Item) -> tuple[str, ...]:
    """Return the visible columns of *item*, each of which must be there once and be known."""
    if not item.known or len(set(item.visible)) < len(item.visible):
        raise Refused(
            "the columns that `*` stands for can't be told here",
            hint=HINT,
            rules=("bookkeeping_column_read",),
        )
    return item.visible


def column_text(scope: Scope, item: Item, name: str) -> str:
    """Return the text that means column *name* of *item* and nothing else in *scope*."""
    if item.name is not None:
        return f"{scope.qualifier(item)}.{quote(name)}"
    if len(scope.candidates(name)) != 1:
        raise Refused(
            f"column `{name}` is in more than one item of FROM",
            hint="give every sub-select an alias",
            rules=("bookkeeping_column_read",),
        )
    return quote(name)


def _merged_text(scope: Scope, join: Join, name: str) -> str:
    if join.using is not None and join.using.name is not None:
        return f"{quote(join.using.name)}.{quote(name)}"
    if len(scope.candidates(name)) != 1:
        raise Refused(
            f"the joined column `{name}` has no name of its own here",
            hint=HINT,
            rules=("bookkeeping_column_read",),
        )
    return quote(name)
