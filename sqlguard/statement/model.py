"""
What one statement is, as far as text, session and catalog can tell.

Frozen data only; `sqlguard.statement.analyse` makes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any


class Kind(Enum):
    """What a statement does at the top; writes nested in it are in `Statement.writes`."""

    EMPTY = "empty"
    SELECT = "select"
    VALUES = "values"
    INSERT = "insert"
    UPDATE = "update"
    DELETE = "delete"
    MERGE = "merge"
    COPY_OUT = "copy_out"
    COPY_IN = "copy_in"
    EXPLAIN = "explain"
    SHOW = "show"
    SET = "set"
    RESET = "reset"
    DISCARD = "discard"
    BEGIN = "begin"
    COMMIT = "commit"
    ROLLBACK = "rollback"
    SAVEPOINT = "savepoint"
    RELEASE = "release"
    ROLLBACK_TO = "rollback_to"
    PREPARE = "prepare"
    EXECUTE = "execute"
    DEALLOCATE = "deallocate"
    DECLARE = "declare"
    FETCH = "fetch"
    CLOSE = "close"
    LISTEN = "listen"
    UNLISTEN = "unlisten"
    CONSTRAINTS = "set_constraints"
    CREATE_TEMP = "create_temp"
    DROP_TEMP = "drop_temp"
    DDL = "ddl"
    TRUNCATE = "truncate"
    CALL = "call"
    DO = "do"
    OTHER = "other"


class Scope(Enum):
    """Whether a write's predicate really narrows it down; MEASURED means that only the count can tell."""

    ALL = "all"
    NARROWED = "narrowed"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Relation:
    """A relation named in the text, resolved; `oid` 0 when it is a temp table of the session or unknown."""

    schema: str | None
    name: str
    oid: int = 0
    only: bool = False
    temporary: bool = False
    system: bool = False
    #: The columns that are read, None when that can be any of them.
    columns: tuple[str, ...] | None = None
    #: The view (or rule) through which it is reached; None when the text names it.
    via: str | None = None

    @property
    def shown(self) -> str:
        """The name as a message puts it."""
        return f"{self.schema}.{self.name}" if self.schema else self.name


@dataclass(frozen=True, slots=True)
class Write:
    """One write in a statement; `op` is insert, update, delete. `columns` are those it sets (None: all)."""

    table: Relation
    op: str
    columns: tuple[str, ...] | None = None
    scope: Scope = Scope.MEASURED
    #: The view that the text names instead of the table, None when it names the table.
    view: Relation | None = None
    #: The rewrite rule that adds this write, None when the text itself does.
    rule: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A function, operator, cast or aggregate that the statement may run."""

    schema: str | None
    name: str
    arguments: int
    what: str = "function"
    #: Functions outside pg_catalog that it may mean, as oids; all of them when it is not sure which.
    candidates: tuple[int, ...] = ()
    #: Whether it may mean a function of pg_catalog.
    builtin: bool = False
    #: The arguments that are constants, by position; None for the others.
    values: tuple[object, ...] = ()


@dataclass(frozen=True)
class Statement:
    """`start` and `end` are byte offsets in the message's UTF-8 text; `tree` is libpg_query's node."""

    kind: Kind
    text: str
    start: int = 0
    end: int = 0
    tree: Any = None
    reads: tuple[Relation, ...] = ()
    writes: tuple[Write, ...] = ()
    calls: tuple[Call, ...] = ()
    locks_rows: bool = False
    #: Name of the prepared statement, cursor, savepoint, channel or setting that it is about.
    subject: str | None = None
    #: SET's value, BEGIN's modes (`read only`, `read write`), COPY's options: what rules need of the details.
    details: Mapping[str, Any] = field(default_factory=dict)
    #: The statement inside EXPLAIN, PREPARE, DECLARE, COPY (…), CREATE TEMP TABLE AS.
    inner: "Statement | None" = None

    @property
    def is_write(self) -> bool:
        return bool(self.writes)


@dataclass(frozen=True)
class Session:
    """What the meaning of a text depends on besides the catalog; a value, replaced after each statement."""

    search_path: tuple[str, ...] = ("public",)
    in_transaction: bool = False
    #: Temporary tables of this session: name -> column names.
    temporary: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: SQL-level and protocol-level prepared statements, cursors: name -> what it would do.
    prepared: Mapping[str, Statement] = field(default_factory=dict)
    cursors: Mapping[str, Statement] = field(default_factory=dict)
    #: Users' types, as oids, that the text's parameters were declared with.
    parameters: tuple[int, ...] = ()

    def after(self, **changes: Any) -> "Session":
        return replace(self, **changes)
