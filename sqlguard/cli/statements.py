"""`check`, `preview`, `exec`: one statement, judged, shown or run."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sqlguard import settings
from sqlguard.cli.common import Dsn, Json, operator_dsn
from sqlguard.cli.judging import decided, decided_elsewhere, foreseen, named_policies
from sqlguard.cli.output import err, out, print_json, print_rows
from sqlguard.connection import connect
from sqlguard.gate import error
from sqlguard.plan import Decision, Outcome

Sql = Annotated[str | None, typer.Argument(help="One SQL statement; `-` or nothing reads standard input.")]
TaskOption = Annotated[
    str, typer.Option("--task", help="The task that it runs for, as `task open` printed it.")
]
Reason = Annotated[str | None, typer.Option(help="Why, for the journal.")]
Confidence = Annotated[float | None, typer.Option(min=0, max=1, help="How sure, from 0 to 1.")]
Key = Annotated[str | None, typer.Option("--idempotency-key", help="Run at most once under this key.")]


def _text(sql: str | None) -> str:
    text = sys.stdin.read() if sql is None or sql == "-" else sql
    if not text.strip():
        raise typer.BadParameter("there is no SQL to look at")
    return text


def _file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise typer.BadParameter(f"`{path}` can't be read: {fault}") from None


def check(
    sql: Sql = None,
    *,
    file: Annotated[Path | None, typer.Option("--file", help="Read the SQL from a file.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="Policy file or name; default: the only one in the folder.")
    ] = None,
    why: Annotated[bool, typer.Option("--why", help="Name the rules too, for people.")] = False,
    dialect: Annotated[
        str | None,
        typer.Option(help="The text is of another database (mysql, sqlite, bigquery …): a lint, weaker."),
    ] = None,
    confidence: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="How sure, from 0 to 1, for the gates; not said counts as 0."),
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    Decide without running anything. With a DSN names are resolved in the database; without one, tables and columns
    are taken to exist and what could not be resolved is said.

    Exit status 0 when all would run, 1 when one is refused, 3 when one needs approval.

    Example: sqlguard check --policy support "DELETE FROM orders"
    """
    text = _file(file) if file else _text(sql)
    named = settings.load(dsn=dsn).dsn
    policies = named_policies(policy, named)
    if len(policies) != 1:
        raise typer.BadParameter("several policies: name one with --policy")
    # A lint of another database's text has no business with the catalog of this one.
    found = None if dialect else named
    decisions = (
        decided_elsewhere(text, dialect, policies[0]) if dialect else decided(text, policies[0], found)
    )
    documents = [_verdict(foreseen(d, confidence), why=why, resolved=bool(found)) for d in decisions]
    if as_json:
        print_json({"dialect": dialect or "postgresql", "lint": bool(dialect), "statements": documents})
    else:
        for document in documents:
            _say(document)
        if dialect:
            out.print(f"(a lint: {dialect} was carried over to PostgreSQL, which guards less surely)")
    verdicts = {document["verdict"] for document in documents}
    raise typer.Exit(1 if "refuse" in verdicts else 3 if "approve" in verdicts else 0)


def _verdict(decision: Decision, *, why: bool, resolved: bool) -> dict[str, Any]:
    document: dict[str, Any] = {
        "verdict": str(decision.verdict.effect),
        "kind": decision.kind.value,
        "tier": decision.verdict.tier,
        "statement": decision.statement.text,
        "resolved": resolved,
    }
    if decision.rewritten:
        document["executed"] = decision.text
    if not decision.allowed:
        document.update(error(decision).as_dict())
    if why:
        document["rules"] = list(decision.verdict.rules)
    return document


def _say(document: dict[str, Any]) -> None:
    colour = {"allow": "green", "rewrite": "cyan", "approve": "yellow", "refuse": "red"}[document["verdict"]]
    out.print(f"[bold {colour}]{document['verdict']}[/]  {document['kind']}  {document['tier']}")
    out.print(f"  {document['statement'].strip()}", markup=False)
    for name in ("executed", "error", "detail", "hint", "rules"):
        if document.get(name):
            value = document[name]
            out.print(f"  {name}: {', '.join(value) if isinstance(value, list) else value}", markup=False)
    if not document["resolved"]:
        out.print(
            "  (no database named: columns, keys, views, triggers and own functions could not be resolved)",
            markup=False,
        )


def preview(
    sql: Sql = None,
    *,
    task: TaskOption,
    reason: Reason = None,
    confidence: Confidence = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    Run a statement for a task, report the rows it would change (cascades and triggers included), roll it back.

    Example: sqlguard preview --task TASK "DELETE FROM customers WHERE id = 7" --json
    """
    with connect(operator_dsn(dsn), task=task) as db:
        outcome = db.preview(_text(sql), reason=reason, confidence=confidence)
    _show(outcome, as_json=as_json, preview=True)


def exec_(
    sql: Sql = None,
    *,
    task: TaskOption,
    reason: Reason = None,
    confidence: Confidence = None,
    idempotency_key: Key = None,
    plan: Annotated[
        int | None, typer.Option("--plan", help="Commit this approved plan; then without SQL.")
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    Run a statement for a task, guarded and journaled, or commit a plan that a person has approved.

    Example: sqlguard exec --task TASK "DELETE FROM orders WHERE id = 7" --reason "duplicate" --json
    """
    if plan is not None and sql is not None:
        raise typer.BadParameter("a plan has its own statements: leave the SQL out")
    with connect(operator_dsn(dsn), task=task) as db:
        outcome = (
            db.commit_plan(plan)
            if plan is not None
            else db.execute(_text(sql), reason=reason, confidence=confidence, idempotency_key=idempotency_key)
        )
    _show(outcome, as_json=as_json, preview=False)


def _show(outcome: Outcome, *, as_json: bool, preview: bool) -> None:
    if as_json:
        print_json({**outcome.as_dict(), "dry_run": preview})
        return
    if outcome.columns:
        print_rows(outcome.columns, outcome.rows)
    if preview:
        out.print(f"{outcome.tag or 'ok'}: would change, and was rolled back")
    else:
        out.print(f"{outcome.tag or 'ok'}" + (f" (action {outcome.action})" if outcome.action else ""))
    if outcome.plan is not None:
        out.print(
            f"plan {outcome.plan}: `sqlguard plan show {outcome.plan}`" if preview else f"plan {outcome.plan}"
        )
    if outcome.affected:
        print_rows(("table", "operation", "rows"), [(a.table, a.op, a.rows) for a in outcome.affected])
    for notice in outcome.notices:
        err.print(notice, markup=False)


def register(app: typer.Typer) -> None:
    app.command()(check)
    app.command()(preview)
    app.command("exec")(exec_)
