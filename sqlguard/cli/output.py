"""What commands print: tables for people, one JSON document with `--json`; errors with what to do."""

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sqlguard.errors import SqlguardError

#: Lines are not broken at a width of our own: scripts and copied commands need them whole.
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def plain(value: object) -> object:  # noqa: PLR0911 (one line per type)
    """Turn values that JSON has no word for into text or numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        as_dict = getattr(value, "as_dict", None)
        return as_dict() if as_dict else {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes | memoryview):
        return bytes(value).hex()
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    if isinstance(value, Decimal):
        return str(value)
    return str(value)


def print_json(value: object) -> None:
    """Print one JSON document."""
    sys.stdout.write(json.dumps(value, default=plain, ensure_ascii=False, indent=2) + "\n")


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
    """Print rows as a table that fits the terminal; a pipe gets plain columns."""
    table = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*("" if v is None else escape(_short(v)) for v in row))
    out.print(table)


def _short(value: object) -> str:
    text = value.isoformat(" ", "seconds") if isinstance(value, datetime) else str(plain(value))
    return text if len(text) <= 200 else text[:197] + "…"  # noqa: PLR2004 (a cell stays readable)


def print_pairs(pairs: Mapping[str, object]) -> None:
    """Print `name  value` lines."""
    width = max((len(name) for name in pairs), default=0)
    for name, value in pairs.items():
        out.print(f"[bold]{escape(name):<{width}}[/bold]  {escape(_short(value))}")


def print_error(fault: SqlguardError, *, as_json: bool) -> None:
    """Print what is wrong and what to do, to stderr; with `--json` to stdout as well, for scripts."""
    if as_json:
        print_json(fault.as_dict())
        return
    err.print(f"[bold red]error[/bold red] {escape(fault.message)} [dim]({fault.sqlstate})[/dim]")
    if fault.detail:
        err.print(escape(fault.detail))
    if fault.hint:
        err.print(f"[bold]hint[/bold]  {escape(fault.hint)}")


def print_exception(fault: Exception, *, as_json: bool) -> None:
    """Print an error of PostgreSQL's own, untouched."""
    diagnostics: Any = getattr(fault, "diag", None)
    primary = getattr(diagnostics, "message_primary", None) or str(fault).strip()
    document = {
        "error": primary,
        "sqlstate": getattr(fault, "sqlstate", None),
        "detail": getattr(diagnostics, "message_detail", None),
        "hint": getattr(diagnostics, "message_hint", None),
    }
    if as_json:
        print_json(document)
        return
    err.print(
        f"[bold red]error[/bold red] {escape(str(primary))} [dim]({document['sqlstate'] or 'no SQLSTATE'})[/dim]"
    )
    for name in ("detail", "hint"):
        if document[name]:
            err.print(f"[bold]{name}[/bold]  {escape(str(document[name]))}")
