"""`doctor`: what protects each table, wall by wall, and what is open."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from sqlguard.cli.common import Dsn, Json, operator
from sqlguard.cli.output import out, print_json, print_rows

if TYPE_CHECKING:
    from sqlguard.postgres.doctor import Finding, Protection, Report

_WALLS = {
    "guard": "wall 1, the guard",
    "role": "wall 2, the role",
    "table": "wall 3, the table",
    "server": "the server",
}
_COLOURS = {"broken": "bold red", "open": "yellow", "note": "dim"}


def doctor(
    *,
    policy: Annotated[str | None, typer.Option(help="Only what concerns this policy and its tables.")] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    Say what protects each table, wall by wall, and what is open; exit 1 when a wall is broken. Changes nothing.

    Example: sqlguard doctor --policy support
    """
    # It compares with the revisions, and Alembic costs a second to import.
    from sqlguard.postgres.doctor import examine  # noqa: PLC0415

    with operator(dsn) as conn:
        report = examine(conn, policy)
    if as_json:
        print_json(report.as_dict())
    else:
        _show(report)
    if report.broken:
        raise typer.Exit(1)


def _show(report: "Report") -> None:
    print_rows(
        ("table", "guarded", "tasks read", "tasks write", "row scope", "found"),
        [_row(table) for table in report.tables],
    )
    for wall, title in _WALLS.items():
        found = [f for f in report.findings if f.wall == wall]
        out.print(f"\n[bold]{title}[/bold]" + ("" if found else ": nothing found"))
        for finding in found:
            _tell(finding)
    counts = {name: sum(str(f.severity) == name for f in report.findings) for name in _COLOURS}
    out.print("\n" + ", ".join(f"{number} {name}" for name, number in counts.items()))


def _row(table: "Protection") -> tuple[object, ...]:
    return (
        table.table,
        table.mode or "no",
        ", ".join(table.read) or "no",
        ", ".join(table.write) or "no",
        ", ".join(table.scope) or "no",
        "" if table.worst is None else table.worst,
    )


def _tell(finding: "Finding") -> None:
    severity = str(finding.severity)
    out.print(
        f"  [{_COLOURS[severity]}]{severity:<6}[/] {escape(finding.message)} [dim]({finding.code})[/dim]"
    )
    if finding.sql is not None:
        out.print(f"         mend: {escape(finding.sql)};", highlight=False)
    if finding.command is not None:
        out.print(f"         {'or' if finding.sql else 'mend'}: {escape(finding.command)}", highlight=False)


def register(app: typer.Typer) -> None:
    app.command()(doctor)
