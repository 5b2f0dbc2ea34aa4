"""`migrate`, `guard`, `unguard`, `tables`, `freeze`, `thaw`: what the operator does to the database."""

from datetime import UTC, datetime
from typing import Annotated, Any

import psycopg
import typer

from sqlguard.cli.common import Dsn, Json, operator, operator_dsn, state
from sqlguard.cli.output import err, out, print_json, print_rows, progress_bar
from sqlguard.errors import GuardError
from sqlguard.policy.model import duration
from sqlguard.postgres import freeze as freezing
from sqlguard.postgres import overview
from sqlguard.postgres.guard_table import GuardReport, guard_tables, unguard_tables, user_tables
from sqlguard.postgres.policy_apply import refresh_policies

#: From so many tables on a progress bar is shown.
_MANY = 20
Tables = Annotated[list[str] | None, typer.Argument(help="Tables, `schema.name`; `public` is assumed.")]


def migrate(
    *,
    event_trigger: Annotated[
        bool,
        typer.Option(
            "--event-trigger",
            help="As a superuser: put up the event trigger (and nothing else) that refuses DDL by tasks.",
        ),
    ] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    Create or upgrade the schema `sqlguard` in the database (Alembic underneath). Safe to repeat.

    Example: sqlguard migrate --dsn postgresql://owner@localhost/shop
    """
    # Alembic costs a second to import, which no other command should pay.
    if event_trigger:
        _put_up(dsn, as_json=as_json)
        return
    from sqlguard.postgres.migrate import migrate as run_migrations  # noqa: PLC0415

    done = run_migrations(operator_dsn(dsn))
    if as_json:
        print_json({"applied": done})
    elif done:
        out.print(f"applied {len(done)} migration(s): {', '.join(done)}")
    else:
        out.print("nothing to do: the schema `sqlguard` is up to date")


def _put_up(dsn: str | None, *, as_json: bool) -> None:
    """No migration with it: what a superuser creates, the operator does not own."""
    from sqlguard.postgres import event_trigger  # noqa: PLC0415

    with operator(dsn) as conn:
        event_trigger.put_up(conn)
    if as_json:
        print_json({"event_trigger": True})
    else:
        out.print("the event trigger refuses DDL by tasks")


def guard(
    tables: Tables = None,
    *,
    all_tables: Annotated[
        bool, typer.Option("--all", help="Every ordinary table outside system schemas.")
    ] = False,
    mode: Annotated[
        str,
        typer.Option(
            help="`soft`, `journal`, or `auto`: soft unless the pre-flight finds a reason against it."
        ),
    ] = "auto",
    unique: Annotated[
        str, typer.Option(help="`partial`: a deleted row frees its unique values; `keep`: it keeps them.")
    ] = "partial",
    accept: Annotated[
        list[str] | None, typer.Option(help="A reason code of the pre-flight that does not matter here.")
    ] = None,
    fix_views: Annotated[
        bool, typer.Option("--fix-views", help="Set security_invoker on views that would show deleted rows.")
    ] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    Guard tables: soft-delete columns, row-level security, capture of before images, caps. Safe to repeat.

    Example: sqlguard guard public.orders public.items --mode soft
    """
    if mode not in ("auto", "soft", "journal") or unique not in ("partial", "keep"):
        raise typer.BadParameter("--mode is auto, soft or journal; --unique is partial or keep")
    with operator(dsn) as conn:
        names = user_tables(conn) if all_tables else list(tables or ())
        if not names:
            raise typer.BadParameter("name tables, or say --all")
        options = {"unique": unique, "accept": accept or (), "fix_views": fix_views}
        reports, refused = _guard_each(conn, names, mode=None if mode == "auto" else mode, **options)
        # What policies grant depends on how a table is guarded.
        refresh_policies(conn)
    _show(reports, refused, as_json=as_json)
    if refused:
        raise typer.Exit(GuardError.exit_status)


def _guard_each(
    conn: psycopg.Connection[Any], names: list[str], *, mode: str | None, **options: Any
) -> tuple[list[GuardReport], list[tuple[str, GuardError]]]:
    """Guard all that can be guarded; a table that can't be does not keep the others waiting."""
    quiet = len(names) < _MANY or state.json
    with progress_bar("guarding", quiet=quiet, total=len(names)) as advanced:
        try:
            return guard_tables(conn, names, mode, **options), []
        except GuardError as fault:
            if len(names) == 1:
                return [], [(names[0], fault)]
        reports: dict[str, GuardReport] = {}
        refused: list[tuple[str, GuardError]] = []
        for number, name in enumerate(names, 1):
            try:
                for report in guard_tables(conn, [name], mode, **options):
                    reports.setdefault(report.table, report)
            except GuardError as fault:
                refused.append((name, fault))
            advanced(number, len(names))
        return list(reports.values()), refused


def unguard(tables: Tables = None, *, dsn: Dsn = None, as_json: Json = False) -> None:
    """
    Take the guard off tables. Refused while deleted rows are still in them.

    Example: sqlguard unguard public.orders
    """
    if not tables:
        raise typer.BadParameter("name tables")
    with operator(dsn) as conn:
        reports = unguard_tables(conn, tables)
        refresh_policies(conn)
    _show(reports, [], as_json=as_json)


def _show(reports: list[GuardReport], refused: list[tuple[str, GuardError]], *, as_json: bool) -> None:
    if as_json:
        errors = [{"table": name, **fault.as_dict()} for name, fault in refused]
        print_json({"tables": [r.as_dict() for r in reports], "refused": errors})
        return
    for name, fault in refused:
        err.print(f"[bold red]not guarded[/] {name}: {fault.message}")
        err.print(f"  hint: {fault.hint}")
    print_rows(
        ("table", "mode", "done"),
        [(r.table, r.mode, "changed" if r.changed else f"nothing to do: is {r.mode}") for r in reports],
    )
    for report in reports:
        for note in report.notes:
            out.print(f"{report.table}: {note}", markup=False)
            if note.hint:
                out.print(f"  {note.hint}", markup=False)


def freeze(
    *,
    reason: Annotated[str, typer.Option(help="Why; every refused write says it.")],
    tables: Annotated[list[str] | None, typer.Option(help="Only these tables; default: all.")] = None,
    for_: Annotated[
        str | None, typer.Option("--for", help="How long, e.g. `2h`; default: until thaw.")
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    Stop every agent's writes within a second, proxy or no proxy; reads go on.

    Example: sqlguard freeze --reason "code freeze" --for 2h
    """
    until = None
    if for_ is not None:
        length = duration(for_)
        until = datetime.now(UTC) + length  # type: ignore[operator]  # duration() gives a timedelta or raises
    with operator(dsn) as conn:
        made = freezing.freeze(conn, tables=tables or None, until=until, reason=reason)
    if as_json:
        print_json({"freeze": made, "tables": made.tables, "until": made.until_at, "reason": made.reason})
    else:
        out.print(f"frozen: {_extent(made)}; `sqlguard thaw` ends it", markup=False)


def thaw(*, dsn: Dsn = None, as_json: Json = False) -> None:
    """
    End every freeze.

    Example: sqlguard thaw
    """
    with operator(dsn) as conn:
        ended = freezing.thaw(conn)
    if as_json:
        print_json({"thawed": ended})
    else:
        for one in ended:
            out.print(
                f"thawed: {_extent(one)} (frozen {one.frozen_at:%Y-%m-%d %H:%M:%S %Z}: {one.reason})",
                markup=False,
            )
        if not ended:
            out.print("nothing was frozen")


def _extent(freeze: freezing.Freeze) -> str:
    what = ", ".join(freeze.tables) if freeze.tables else "all tables"
    return what if freeze.until_at is None else f"{what} until {freeze.until_at:%Y-%m-%d %H:%M:%S %Z}"


def tables_(
    *,
    all_tables: Annotated[bool, typer.Option("--all", help="Those that are not guarded too.")] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    List the guarded tables: mode, key, and the policies that name them.

    Example: sqlguard tables --all --json
    """
    with operator(dsn) as conn:
        found = overview.table_states(conn)
    shown = [t for t in found if all_tables or t.mode is not None]
    if as_json:
        print_json({"tables": [t.as_dict() for t in shown]})
        return
    print_rows(
        ("table", "mode", "key", "policies", "guarded"),
        [
            (
                t.table,
                t.mode or "not guarded",
                ", ".join(t.key_columns) if t.key_columns else "none" if t.mode else "",
                ", ".join(t.policies),
                t.guarded_at,
            )
            for t in shown
        ],
    )
    left = len(found) - len(shown)
    if left:
        err.print(f"{left} table(s) are not guarded; `sqlguard tables --all` lists them")


def register(app: typer.Typer) -> None:
    for command in (migrate, guard, unguard, freeze, thaw):
        app.command()(command)
    app.command("tables")(tables_)
