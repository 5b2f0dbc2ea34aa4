"""`journal list|show|verify|reconcile`, `history` and `undo`: what agents did, and taking it back."""

from datetime import datetime
from typing import Annotated

import typer
from rich.markup import escape

from sqlguard.cli.common import Dsn, Json, operator
from sqlguard.cli.output import err, out, print_json, print_pairs, print_rows, progress_bar
from sqlguard.cli.steps import load_tools
from sqlguard.errors import UndoConflict
from sqlguard.postgres import compensate
from sqlguard.postgres import history as lives
from sqlguard.postgres import journal as journals
from sqlguard.postgres import reconcile as reconciling
from sqlguard.postgres.known import require
from sqlguard.postgres.undo_plan import Scope
from sqlguard.postgres.undo_report import UndoReport, shown_key, shown_row

group = typer.Typer(help="The journal: what agents did, written before they did it.", no_args_is_help=True)


@group.command("list")
def list_(
    *,
    task: Annotated[str | None, typer.Option(help="Only this task.")] = None,
    agent: Annotated[str | None, typer.Option(help="Only this agent.")] = None,
    table: Annotated[str | None, typer.Option(help="Only statements that wrote to this table.")] = None,
    row: Annotated[list[str] | None, typer.Option(help="Only what changed the row with this key.")] = None,
    since: Annotated[datetime | None, typer.Option(help="Not before.")] = None,
    until: Annotated[datetime | None, typer.Option(help="Before.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 100,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    List actions, oldest first.

    Example: sqlguard journal list --table orders --row 17 --since 2026-01-01
    """
    wanted = journals.filters(
        task=task, agent=agent, table=table, row=row, since=aware(since), until=aware(until)
    )
    with operator(dsn) as conn:
        require(conn, task=task, agent=agent, table=table)
        actions = journals.list_actions(conn, **wanted, limit=limit)
    if as_json:
        print_json({"actions": [a.as_dict() for a in actions]})
        return
    print_rows(
        ("action", "at", "agent", "verdict", "outcome", "rows", "statement", "reason"),
        [(a.id, a.at, a.agent, a.verdict, a.outcome, a.rows, a.statement, a.reason) for a in actions],
    )


@group.command("show")
def show(
    action: Annotated[int, typer.Argument(help="The action's number.")],
    *,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    Show one action with its events and what it changed.

    Example: sqlguard journal show 12
    """
    with operator(dsn) as conn:
        found = journals.show_action(conn, action)
    if as_json:
        print_json(found.as_dict())
    else:
        print_pairs({k: v for k, v in found.as_dict().items() if v not in (None, [], {})})


@group.command("verify")
def verify(
    *,
    task: Annotated[str | None, typer.Option(help="Only this task's chain.")] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    Check the hash chains: finds entries that were changed, removed or reordered. Exit status 1 if there are any.

    Example: sqlguard journal verify
    """
    with operator(dsn) as conn:
        require(conn, task=task)
        report = journals.verify(conn, task=task)
    if as_json:
        print_json(report)
    elif report.ok:
        chains = "chain" if report.tasks == 1 else "chains"
        out.print(f"ok: {report.entries} entries in {report.tasks} {chains}")
    else:
        for fault in report.faults:
            out.print(f"[red]broken[/red] {fault}")
    raise typer.Exit(0 if report.ok else 1)


@group.command("reconcile")
def reconcile(*, dsn: Dsn = None, as_json: Json = False) -> None:
    """
    Settle actions that a crash left without an end, from the database's own evidence. `serve` does it on start.

    Example: sqlguard journal reconcile
    """
    with operator(dsn) as conn:
        settled = reconciling.reconcile(conn)
    if as_json:
        print_json({"settled": settled})
    else:
        print_rows(
            ("action", "task", "outcome", "rows"), [(s.action, s.task, s.outcome, s.rows) for s in settled]
        )


def aware(moment: datetime | None) -> datetime | None:
    """A time without a zone is one of the person's own clock."""
    return moment.astimezone() if moment else None


def history(
    table: Annotated[str, typer.Argument(help="The table, `schema.name`.")],
    key: Annotated[list[str], typer.Argument(help="The row's primary key, one value per column.")],
    *,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    A row's life: who changed it, when, why, and what it was before.

    Example: sqlguard history public.orders 17
    """
    with operator(dsn) as conn:
        changes = lives.history(conn, table, key)
    if as_json:
        print_json({"table": table, "key": key, "changes": changes})
        return
    if not changes:
        out.print("the journal has no change of this row", markup=False)
        return
    print_rows(
        ("at", "operation", "agent", "action", "reason", "before", "undone"),
        [(c.at, c.op, c.agent or c.by, c.action, c.reason, c.before, c.undone_by) for c in changes],
    )


# long: one flag after the other, then one call
def undo(
    *,
    task: Annotated[str | None, typer.Option(help="Everything that this task did.")] = None,
    action: Annotated[int | None, typer.Option(help="One action.")] = None,
    since: Annotated[datetime | None, typer.Option(help="Everything that agents did since then.")] = None,
    undo_id: Annotated[int | None, typer.Option("--undo", help="An earlier undo: this is the redo.")] = None,
    preview: Annotated[
        bool, typer.Option("--preview", help="Show what would happen, change nothing.")
    ] = False,
    on_conflict: Annotated[
        str, typer.Option(help="Rows that somebody changed since: `stop`, `skip` them, or `force`.")
    ] = "stop",
    columns: Annotated[
        str | None,
        typer.Option(help="With `force`: of rows that somebody changed since only these columns, `a,b`."),
    ] = None,
    tools: Annotated[
        str | None, typer.Option(help="`module:registry` of compensations for steps that are not SQL.")
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    Take back what an agent did, newest first, across foreign keys, in one transaction. Safe to repeat.

    Example: sqlguard undo --task TASK --preview
    """
    if sum(x is not None for x in (task, action, since, undo_id)) != 1:
        raise typer.BadParameter("say what: --task, --action, --since or --undo")
    if on_conflict not in ("stop", "skip", "force"):
        raise typer.BadParameter("--on-conflict is stop, skip or force")
    if columns is not None and on_conflict != "force":
        raise typer.BadParameter("--columns goes with --on-conflict force")
    with operator(dsn) as conn, progress_bar("undoing", quiet=as_json) as advanced:
        require(conn, task=task, action=action, undo=undo_id)
        saga = compensate.undo(
            conn,
            Scope(task=task, action=action, since=aware(since), undo=undo_id),
            tools=load_tools(tools),
            preview=preview,
            on_conflict=on_conflict,
            columns=[c.strip() for c in (columns or "").split(",") if c.strip()],
            progress=advanced,
        )
    report = saga.rows
    if as_json:
        print_json(saga.as_dict())
    else:
        _show(report, preview=preview)
        _show_answers(saga, preview=preview)
    if report.stopped or not (preview or saga.is_complete):
        raise typer.Exit(UndoConflict.exit_status)


def _show_answers(saga: compensate.SagaReport, *, preview: bool) -> None:
    """Say what became of the steps that are not SQL, and what still waits."""
    if not saga.answers:
        return
    print_rows(
        ("action", "step", "answer", "state", "why"),
        [(a.action, a.step, a.answer, a.state, a.problem) for a in saga.answers],
    )
    if any(a.is_open for a in saga.answers):
        err.print(
            "the undo would stop at the waiting step and leave what is older as it is"
            if preview
            else "the undo is not complete: what is older than the waiting step is as it was"
        )
        err.print(
            "  give the registry that answers it (`--tools`), or `sqlguard step resolve ACTION --note TEXT`"
        )


def _show(report: UndoReport, *, preview: bool) -> None:
    if report.already_undone:
        out.print("already undone: nothing to do")
        return
    for conflict in report.conflicts:
        out.print(f"[yellow]conflict[/yellow] {escape(str(conflict))}")
        for line in conflict.values():
            out.print(f"  {line}", markup=False)
    if report.stopped:
        err.print(
            f"{report.conflict_count} conflict(s): nothing was changed. `--on-conflict skip` leaves these rows"
        )
        err.print("as they are and undoes the others, `--on-conflict force` overwrites them")
        return
    for difference in report.differences:
        out.print(f"{difference.table} ({shown_key(difference.key)}): {difference.op}", markup=False)
        out.print(f"  is        {shown_row(difference.current)}", markup=False)
        out.print(f"  would be  {shown_row(difference.wanted)}", markup=False)
    if not report.tables:
        out.print("nothing was changed there")
        return
    print_rows(("table", "operation", "rows"), [(t.table, t.op, t.rows) for t in report.tables])
    for note in report.notes:
        out.print(f"note: {note}", markup=False)
    out.print("this is what an undo would do" if preview else f"done (undo {report.undo})")


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="journal")
    app.command()(history)
    app.command()(undo)
