"""The shape of every answer; a client sees these as the tools' output schemas. Names are those of the journal."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Rights(_Answer):
    """What this task may do with a table; a list names the columns, true means all, false none."""

    select: bool | list[str]
    insert: bool | list[str]
    update: bool | list[str]
    delete: Literal["soft", "journal", "refuse"] = Field(
        description="soft: rows are hidden and can be restored; journal: rows go, and are kept in the journal"
    )


class TableSummary(_Answer):
    table: str = Field(description="schema.name")
    kind: Literal["table", "partitioned table", "view", "materialized view", "foreign table"]
    rights: Rights
    classes: list[str] = Field(description="compliance classes, such as pii or financial")
    rows_estimate: int | None = Field(description="the planner's estimate, null when it has none")


class TableList(_Answer):
    policy: str
    tables: list[TableSummary]
    total: int = Field(description="how many tables the policy shows")
    truncated: bool
    note: str | None = None


class ColumnInfo(_Answer):
    name: str
    type: str
    not_null: bool
    has_default: bool = Field(description="may be left out of an INSERT")
    may_read: bool
    may_insert: bool
    may_update: bool


class KeyInfo(_Answer):
    columns: list[str]
    references: str
    referenced_columns: list[str]
    on_delete: Literal["no action", "restrict", "cascade", "set null", "set default"]


class TableDescription(_Answer):
    table: str
    kind: str
    rights: Rights
    classes: list[str]
    columns: list[ColumnInfo]
    primary_key: list[str]
    unique: list[list[str]]
    foreign_keys: list[KeyInfo]
    referenced_by: list[str] = Field(description="tables with a foreign key to this one")
    row_scope: str | None = Field(description="only rows for which this holds can be seen or written")
    max_rows: int | None = Field(description="rows one statement may change here, cascades included")
    max_share: float | None = Field(description="share of the table one statement may change")
    on_excess: Literal["approve", "refuse"]


class Rows(_Answer):
    columns: list[str] = []
    rows: list[list[JsonValue]] = []
    total_rows: int = Field(
        0,
        description="how many rows there were before anything was cut; a query counts up to 100,000, see `note`",
    )
    truncated: bool = Field(default=False, description="true: `rows` is not all of it, see `note`")
    note: str | None = None


class QueryResult(Rows):
    tag: str | None = None


class AffectedRows(_Answer):
    table: str
    op: str
    rows: int


class Preview(Rows):
    """What a write would do; nothing was changed."""

    tag: str | None
    verdict: str
    tier: str = Field(description="reversible, costly, compensable or irreversible")
    rowcount: int
    affected: list[AffectedRows] = Field(description="per table, cascades and triggers included")
    affected_rows: int
    statement: str
    executed: str = Field(description="what would really be sent, e.g. the UPDATE that a soft delete is")
    action: int | None
    plan: int | None = Field(description="its number: for ticket and commit_plan")
    report: dict[str, JsonValue] | None = Field(
        None, description="before and after of some rows, shares, unguarded tables, sequences, locks"
    )


class WriteResult(Preview):
    """What a write did."""

    committed: bool
    repeats: int | None = Field(
        None,
        description="the action that did this before under the same idempotency key; nothing was done now",
    )


class PlannedStatement(_Answer):
    statement: str
    params: list[str | None] | None


class Ticket(_Answer):
    """A plan and what has become of it."""

    plan: int
    state: Literal["open", "approved", "rejected", "expired", "superseded", "committed"]
    approvals_needed: int
    approved_by: list[str]
    rejected_because: str | None
    reasons: list[str] = Field(description="why it needs an approval")
    statements: list[PlannedStatement]
    affected: list[AffectedRows]
    affected_rows: int
    tier: str
    classes: list[str]
    expires_at: datetime
    drift_of: int | None = Field(description="the approved plan whose rows had changed")
    committed_action: int | None
    report: dict[str, JsonValue]


class UndoneTable(_Answer):
    table: str
    op: str
    rows: int


class UndoResult(_Answer):
    undo: int | None = Field(description="its number, null when nothing was changed for good")
    preview: bool
    already_undone: bool
    stopped: bool = Field(description="true: somebody changed these rows since, so nothing was changed")
    rows: int
    tables: list[UndoneTable]
    conflicts: list[str]
    conflict_count: int
    notes: list[str]


class Status(_Answer):
    task: str
    agent: str
    policy: str
    policy_version: int
    purpose: str | None
    params: dict[str, str]
    state: str
    expires_at: datetime
    seconds_left: int
    budgets: dict[str, JsonValue] = Field(description="what the policy lets a task change in all")
    can_undo: bool = Field(description="false: only the operator can undo this task's work")
