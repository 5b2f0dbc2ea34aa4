"""What a task's policy shows of the schema: as data for tools, in words for resources."""

from collections.abc import Iterator
from typing import Any, Literal, cast

from sqlguard.catalog import Catalog, Table
from sqlguard.errors import Refused
from sqlguard.mcp_server.models import (
    ColumnInfo,
    KeyInfo,
    Rights,
    TableDescription,
    TableList,
    TableSummary,
)
from sqlguard.policy.context import Context
from sqlguard.policy.model import Policy, TableRule

_KINDS = {
    "r": "table",
    "p": "partitioned table",
    "v": "view",
    "m": "materialized view",
    "f": "foreign table",
}
_ON_DELETE = {"a": "no action", "r": "restrict", "c": "cascade", "n": "set null", "d": "set default"}
_OURS = "sqlguard"
#: Tables that are listed at once.
_LISTED = 500


def shown(context: Context) -> Iterator[tuple[Table, TableRule]]:
    """Yield the tables that the policy grants anything on, by name; partitions stand behind their parent."""
    for table in sorted(context.catalog.tables.values(), key=lambda t: t.qualified):
        rule = context.policy.table_rule(table.schema, table.name)
        if table.kind not in _KINDS or table.schema == _OURS or table.is_partition or rule is None:
            continue
        if rule.select or rule.insert or rule.update or rule.delete != "refuse":
            yield table, rule


def list_tables(context: Context, like: str = "") -> TableList:
    found = [
        TableSummary(
            table=table.qualified,
            kind=cast("Any", _KINDS[table.kind]),
            rights=rights(table, rule),
            classes=list(rule.class_),
            rows_estimate=int(table.row_estimate) if table.row_estimate >= 0 else None,
        )
        for table, rule in shown(context)
        if like.lower() in table.qualified.lower()
    ]
    cut = len(found) > _LISTED
    return TableList(
        policy=context.policy.name,
        tables=found[:_LISTED],
        total=len(found),
        truncated=cut,
        note=f"CUT: the first {_LISTED} of {len(found):,} tables; give a part of the name" if cut else None,
    )


def find(context: Context, name: str) -> tuple[Table, TableRule]:
    """Return a shown table by `schema.name`, or by its name alone along the search_path; raises Refused."""
    tables = {table.qualified: (table, rule) for table, rule in shown(context)}
    for candidate in (name, *(f"{schema}.{name}" for schema in context.policy.defaults.search_path)):
        if candidate in tables:
            return tables[candidate]
    raise Refused(f"there is no table `{name}` that this task may use", hint="see list_tables for the names")


def describe(context: Context, name: str) -> TableDescription:
    table, rule = find(context, name)
    visible = {t.oid for t, _ in shown(context)}
    keys = [k for k in context.catalog.foreign_keys if k.table == table.oid and k.references in visible]
    limits: Policy = context.policy
    return TableDescription(
        table=table.qualified,
        kind=_KINDS[table.kind],
        rights=rights(table, rule),
        classes=list(rule.class_),
        columns=_columns(table, rule),
        primary_key=list(table.primary_key),
        unique=[
            [c for c in u.columns if c] for u in table.uniques if not u.primary and None not in u.columns
        ],
        foreign_keys=[
            KeyInfo(
                columns=list(k.columns),
                references=context.catalog.tables[k.references].qualified,
                referenced_columns=list(k.ref_columns),
                on_delete=cast("Any", _ON_DELETE.get(k.on_delete, "no action")),
            )
            for k in keys
        ],
        referenced_by=_referenced_by(context.catalog, table, visible),
        row_scope=rule.rows,
        max_rows=limits.max_rows(table.schema, table.name),
        max_share=limits.max_share(table.schema, table.name),
        on_excess=cast('Literal["approve", "refuse"]', limits.on_excess(table.schema, table.name)),
    )


def rights(table: Table, rule: TableRule) -> Rights:
    """Return what the rule grants on the columns that an agent sees."""

    def columns(granted: bool | tuple[str, ...]) -> bool | list[str]:  # noqa: FBT001 (as the policy has it)
        if isinstance(granted, bool):
            return granted
        return [c for c in table.visible_columns if c in granted]

    return Rights(
        select=columns(rule.select),
        insert=columns(rule.insert),
        update=columns(rule.update),
        delete=rule.delete,
    )


def _may(granted: bool | tuple[str, ...], name: str) -> bool:  # noqa: FBT001 (as the policy has it)
    return granted if isinstance(granted, bool) else name in granted


def _columns(table: Table, rule: TableRule) -> list[ColumnInfo]:
    return [
        ColumnInfo(
            name=column.name,
            type=column.type_name,
            not_null=column.not_null,
            has_default=column.has_default
            or column.generated
            or bool(column.identity)
            or not column.not_null,
            may_read=_may(rule.select, column.name),
            may_insert=_may(rule.insert, column.name) and not column.generated,
            may_update=_may(rule.update, column.name) and not column.generated,
        )
        for column in table.columns
        if column.name in table.visible_columns
        and any(_may(granted, column.name) for granted in (rule.select, rule.insert, rule.update))
    ]


def _referenced_by(catalog: Catalog, table: Table, visible: set[int]) -> list[str]:
    return sorted(
        {catalog.tables[k.table].qualified for k in catalog.references_to(table.oid) if k.table in visible}
    )


# In words -------------------------------------------------------------------------------------------------------


def schema_in_words(context: Context) -> str:
    """Return every shown table with its columns, for a model to read once."""
    lines = [f"# Tables that policy `{context.policy.name}` shows", ""]
    for table, _ in shown(context):
        one = describe(context, table.qualified)
        lines.append(f"## {one.table} ({one.kind}{', ' + ', '.join(one.classes) if one.classes else ''})")
        for column in one.columns:
            words = [column.type, *(["not null"] if column.not_null else [])]
            words += ["primary key"] if column.name in one.primary_key else []
            words += [] if column.may_read else ["not readable"]
            words += ["may be updated"] if column.may_update else []
            lines.append(f"- {column.name}: {', '.join(words)}")
        lines += [
            f"- ({', '.join(k.columns)}) references {k.references} ({', '.join(k.referenced_columns)}),"
            f" on delete {k.on_delete}"
            for k in one.foreign_keys
        ]
        lines += [f"- only rows where {one.row_scope}"] if one.row_scope else []
        lines.append("")
    return "\n".join(lines)


def policy_in_words(context: Context) -> str:
    """Return what the task may do and what becomes of the rest."""
    policy, task = context.policy, context.task
    defaults = policy.defaults
    lines = [f"# Policy `{policy.name}`: {policy.description or 'no description'}", ""]
    if task is not None:
        lines += [
            f"This session is task {task.id} of agent {task.agent}, until {task.expires_at.isoformat()}."
        ]
        lines += [f"Its purpose: {task.purpose}."] if task.purpose else []
    lines.append(
        "Every statement is judged before it runs. Reads run read-only. Writes are journaled with your reason and"
        " can be undone. What the policy does not grant is refused; the answer says what would pass."
    )
    lines.append(
        f"A statement may change at most {_count(defaults.max_rows)} rows and {_share(defaults.max_share)} of a table"
        f" (cascades included); beyond that: {_excess(defaults.on_excess)}.\n"
    )
    lines += [_table_in_words(policy, table, rule) for table, rule in shown(context)]
    for gate in policy.gates:
        when = gate.when.model_dump(by_alias=True, exclude_unset=True)
        condition = " and ".join(f"{key} is {value}" for key, value in when.items()) or "anything"
        people = f" ({gate.approvals} people)" if gate.then == "approve" and gate.approvals > 1 else ""
        lines.append(f"- When {condition}: {_excess(gate.then)}{people}.")
    budgets = policy.budgets.model_dump(exclude_none=True)
    lines += [f"- Budget {name.replace('_', ' ')}: {value}." for name, value in budgets.items()]
    lines += [
        "",
        "Never granted: DDL, TRUNCATE, COPY from or to files, DO, SET ROLE, functions with effects.",
    ]
    return "\n".join(lines)


def _table_in_words(policy: Policy, table: Table, rule: TableRule) -> str:
    granted = rights(table, rule)
    words = []
    for verb, columns in (("read", granted.select), ("insert", granted.insert), ("update", granted.update)):
        if columns:
            words.append(verb if columns is True else f"{verb} ({', '.join(columns)})")
    deletes = {
        "soft": "delete (rows are hidden and can be restored)",
        "journal": "delete (kept in the journal)",
    }
    words += [deletes[granted.delete]] if granted.delete in deletes else []
    line = f"- {table.qualified}: {', '.join(words)}; at most {_count(policy.max_rows(table.schema, table.name))} rows"
    line += f"; only rows where {rule.rows}" if rule.rows else ""
    return line + (f"; class {', '.join(rule.class_)}" if rule.class_ else "")


def _count(rows: int | None) -> str:
    return "any number of" if rows is None else f"{rows:,}"


def _share(share: float | None) -> str:
    return "all" if share is None else f"{share:.0%}"


def _excess(word: str | None) -> str:
    words = {
        "approve": "a person has to approve it first",
        "refuse": "it is refused",
        "allow": "it is allowed",
    }
    return words[word or "approve"]
