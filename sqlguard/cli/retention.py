"""`restore`, `purge`, `hold`, `release`, `erase`: what becomes of deleted rows in the end."""

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer
from rich.markup import escape

from sqlguard.cli.common import Dsn, Json, operator
from sqlguard.cli.output import out, print_json, print_rows, progress_bar
from sqlguard.errors import Refused, UndoConflict
from sqlguard.policy.model import duration
from sqlguard.postgres import erase as erasing
from sqlguard.postgres import hold as holding
from sqlguard.postgres import purge as purging
from sqlguard.postgres import restore as restoring
from sqlguard.postgres.erase_report import EraseReport
from sqlguard.postgres.purge_report import PurgeReport
from sqlguard.postgres.restore_report import RestoreReport
from sqlguard.postgres.retention import Hold, read_holds

Keys = Annotated[
    list[str] | None,
    typer.Option("--key", help="A row's key; `7,3` for a key of two columns. May be given more than once."),
]
Where = Annotated[
    str | None, typer.Option("--where", help="A condition for rows of the table, as after WHERE.")
]


def restore(  # long: one parameter per flag
    *,
    action: Annotated[int | None, typer.Option(help="All that this action deleted.")] = None,
    table: Annotated[str | None, typer.Option(help="Rows of this table, with --key or --where.")] = None,
    key: Keys = None,
    where: Where = None,
    cascade: Annotated[bool, typer.Option(help="With the rows that the same delete took along.")] = True,
    preview: Annotated[
        bool, typer.Option("--preview", help="Show what would happen, change nothing.")
    ] = False,
    on_conflict: Annotated[
        str, typer.Option(help="Rows that can't be restored: `stop`, or `skip` them.")
    ] = "stop",
    accept_changed: Annotated[
        bool,
        typer.Option("--accept-changed", help="Restore rows that were changed while deleted, as they are."),
    ] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    Make deleted rows live again: exactly those of one delete, or those that are named. Safe to repeat.

    Example: sqlguard restore --table public.orders --key 7 --preview
    """
    if (action is None) == (table is None):
        raise typer.BadParameter("say what: --action, or --table with --key or --where")
    if table is not None and bool(key) == (where is not None):
        raise typer.BadParameter("name rows of the table with --key or with --where")
    if on_conflict not in restoring.ON_CONFLICT:
        raise typer.BadParameter("--on-conflict is stop or skip")
    with operator(dsn) as conn, progress_bar("restoring", quiet=as_json) as advanced:
        report = restoring.restore(
            conn,
            action=action,
            table=table,
            keys=key or (),
            where=where,
            cascade=cascade,
            preview=preview,
            on_conflict=on_conflict,
            accept_changed=accept_changed,
            progress=advanced,
        )
    if as_json:
        print_json(report.as_dict())
    else:
        _show_restore(report)
    if report.stopped:
        raise typer.Exit(UndoConflict.exit_status)


def _show_restore(report: RestoreReport) -> None:
    for conflict in report.conflicts:
        out.print(f"[yellow]conflict[/yellow] {escape(str(conflict))} [dim]({conflict.reason})[/dim]")
    for row in report.left:
        out.print(f"[dim]left[/dim] {escape(str(row))}")
    if report.already_restored:
        out.print("already restored: nothing to do")
    elif report.stopped:
        out.print("nothing was changed")
    else:
        print_rows(("table", "operation", "rows"), [(t.table, t.op, t.rows) for t in report.tables])
        done = f"done; `sqlguard undo --undo {report.undo}` takes it back"
        out.print("this is what a restore would do" if report.preview else done)


def purge(  # long: one parameter per flag
    tables: Annotated[
        list[str] | None, typer.Argument(help="Tables, `schema.name`; `public` is assumed.")
    ] = None,
    *,
    all_tables: Annotated[bool, typer.Option("--all", help="Every table that is guarded as soft.")] = False,
    older_than: Annotated[
        str, typer.Option(help="Only rows that were deleted longer ago, e.g. `30d`; `0s` for all of them.")
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="The same run, rolled back: say what would go.")
    ] = False,
    batch: Annotated[int, typer.Option(min=1, help="Rows per transaction.")] = 5000,
    skip_blocked: Annotated[
        bool, typer.Option("--skip-blocked", help="Leave rows that live rows refer to, and go on.")
    ] = False,
    reason: Annotated[str | None, typer.Option(help="Kept with the record of the purge.")] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    Remove deleted rows for good, children before parents, in short transactions. Can't be undone.

    Rows on hold stay. Refused while live rows refer to a row that would go.

    Example: sqlguard purge --all --older-than 30d --dry-run
    """
    if bool(tables) == all_tables:
        raise typer.BadParameter("name tables, or say --all")
    with operator(dsn) as conn, progress_bar("purging", quiet=as_json) as advanced:
        report = purging.purge(
            conn,
            None if all_tables else tables,
            older_than=_age(older_than),
            dry_run=dry_run,
            batch=batch,
            skip_blocked=skip_blocked,
            reason=reason,
            progress=advanced,
        )
    if as_json:
        print_json(report.as_dict())
    else:
        _show_purge(report)
    if report.stopped:
        raise typer.Exit(Refused.exit_status)


def _age(text: str) -> timedelta | datetime:
    """Read `30d`, or a date or time of the past."""
    try:
        length = duration(text)
    except ValueError:
        try:
            at = datetime.fromisoformat(text)
        except ValueError:
            raise typer.BadParameter("--older-than is a length such as `30d` or a date") from None
        return at if at.tzinfo else at.replace(tzinfo=UTC)
    if not isinstance(length, timedelta) or length < timedelta(0):
        raise typer.BadParameter("--older-than is a length such as `30d` or a date")
    return length


def _show_purge(report: PurgeReport) -> None:
    for blocked in report.blocked:
        out.print(f"[yellow]blocked[/yellow] {escape(str(blocked))} [dim]({blocked.reason})[/dim]")
    if report.stopped:
        out.print("nothing was removed; restore those rows, or say --skip-blocked to remove the others")
        return
    print_rows(
        ("table", "removed", "on hold", "left"), [(t.table, t.removed, t.held, t.left) for t in report.tables]
    )
    out.print("this is what a purge would remove" if report.dry_run else f"removed {report.rows} row(s)")


def hold(
    table: Annotated[str | None, typer.Argument(help="The table; none: list what is on hold.")] = None,
    *,
    key: Keys = None,
    where: Where = None,
    reason: Annotated[str | None, typer.Option(help="Why: the case, the order.")] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    Keep rows from being purged or erased: all of a table, some keys, or all for which a condition is true.

    Example: sqlguard hold public.orders --where "customer_id = 7" --reason "case 12/2026"
    """
    if table is None:
        with operator(dsn) as conn:
            _show_holds(read_holds(conn), as_json=as_json)
        return
    if reason is None:
        raise typer.BadParameter("say why: --reason")
    if key and where is not None:
        raise typer.BadParameter("name rows with --key or with --where")
    with operator(dsn) as conn:
        made, covered = holding.hold(conn, table, reason=reason, keys=tuple(key or ()), where=where)
    if as_json:
        print_json({"holds": [h.as_dict() for h in made], "rows": covered})
    else:
        _show_holds(made, as_json=False)
        out.print(f"{covered} row(s) are under it now")


def release(
    table: Annotated[str | None, typer.Argument(help="End every hold on this table.")] = None,
    *,
    number: Annotated[int | None, typer.Option("--hold", help="End the hold with this number.")] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    End holds.

    Example: sqlguard release --hold 3
    """
    if (table is None) == (number is None):
        raise typer.BadParameter("say which: a table, or --hold")
    with operator(dsn) as conn:
        ended = holding.release(conn, table, hold_id=number)
    if as_json:
        print_json({"released": [h.as_dict() for h in ended]})
    else:
        out.print(f"{len(ended)} hold(s) ended" if ended else "nothing was on hold")


def _show_holds(holds: list[Hold], *, as_json: bool) -> None:
    if as_json:
        print_json({"holds": [h.as_dict() for h in holds]})
        return
    print_rows(
        ("hold", "table", "rows", "reason", "since", "by"),
        [
            (
                h.id,
                h.table,
                ",".join(h.key) if h.key else h.condition or "all",
                h.reason,
                h.held_at,
                h.held_by,
            )
            for h in holds
        ],
    )


def erase(
    table: Annotated[str, typer.Argument(help="The table, `schema.name`; `public` is assumed.")],
    *,
    key: Keys = None,
    live: Annotated[bool, typer.Option("--live", help="Erase rows that are not deleted, too.")] = False,
    reason: Annotated[str | None, typer.Option(help="Kept with the record; must name nobody.")] = None,
    preview: Annotated[
        bool, typer.Option("--preview", help="The same run, rolled back: say what would go.")
    ] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    Remove rows for good, and what the journal knows of their contents. Can't be undone.

    The hash chains still verify: each erasure is an entry of its own. Rows on hold are never erased.

    Example: sqlguard erase public.customers --key 7 --reason "request 2026-31" --preview
    """
    if not key:
        raise typer.BadParameter("name the rows: --key")
    with operator(dsn) as conn:
        report = erasing.erase(conn, table, keys=key, live=live, reason=reason, preview=preview)
    if as_json:
        print_json(report.as_dict())
    else:
        _show_erase(report)
    if report.stopped:
        raise typer.Exit(Refused.exit_status)


def _show_erase(report: EraseReport) -> None:
    for refusal in report.refused:
        key = ",".join(refusal.key or ())
        out.print(
            f"[yellow]refused[/yellow] {escape(f'{report.table} ({key}): {refusal.problem}')}"
            f" [dim]({refusal.reason})[/dim]"
        )
    if report.stopped:
        out.print("nothing was erased")
        return
    out.print(
        f"{report.rows} row(s) removed; blanked: {report.images} image(s), {report.actions} action(s),"
        f" {report.events} event(s), {report.results} stored result(s)"
    )
    out.print("this is what an erasure would do" if report.preview else f"done (erasure {report.erasure})")


def register(app: typer.Typer) -> None:
    for command in (restore, purge, hold, release, erase):
        app.command()(command)
