"""What commands print: tables for people, one JSON document with `--json`; errors with what to do."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import Progress
from rich.table import Table

from sqlguard.errors import SqlguardError

#: What a terminal obeys instead of showing it, marks that turn the order of text round, and characters that nobody
#: sees. Statements, reasons and values are an agent's words, and a person decides by what is on the screen.
_UNSEEN = {
    code: chr(code).encode("unicode_escape").decode()
    for code in (
        *range(9),
        *range(11, 32),
        *range(127, 160),
        0x00AD,
        0x061C,
        0x115F,
        0x1160,
        0x180E,
        0x200B,
        0x200E,
        0x200F,
        *range(0x2028, 0x202F),
        *range(0x2060, 0x2070),
        0x3164,
        0xFEFF,
        *range(0xFFF9, 0xFFFC),
        *range(0xE0000, 0xE0080),
    )
}

_UNSEEN_JSON = {code: json.dumps(chr(code))[1:-1] for code in _UNSEEN if code > 32}  # noqa: PLR2004 (the blank)


def visible(text: str) -> str:
    """Return *text* with an escape for each character that a terminal would not show as itself."""
    return text.replace("\r\n", "\n").translate(_UNSEEN)


def inset(text: str, by: int = 2) -> str:
    """Return *text* with every line moved in: no line of an agent's words then looks like one of ours."""
    return "\n".join(" " * by + line for line in visible(text).split("\n"))


class _Screen(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(visible(o) if isinstance(o, str) else o for o in objects), **options)


#: Lines are not broken at a width of our own: scripts and copied commands need them whole.
out = _Screen(highlight=False, soft_wrap=True)
err = _Screen(stderr=True, highlight=False, soft_wrap=True)
#: Characters: wider than any terminal, to measure a table as it would like to be.
_WIDEST = 10_000
#: SQLSTATEs that only say that something of sqlguard's own is wrong: nothing that people look up.
_UNSAID = frozenset({"58000"})
#: What PostgreSQL says when a relation, function, column or schema is not there.
_NOT_THERE = frozenset({"42P01", "42883", "42703", "3F000"})


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
    """Print one JSON document; what a terminal would not show as itself is escaped, as JSON has it."""
    # Below the blank JSON has escaped everything itself, but for the line ends of its own.
    text = json.dumps(value, default=plain, ensure_ascii=False, indent=2)
    sys.stdout.write(text.translate(_UNSEEN_JSON) + "\n")


def print_json_line(value: object) -> None:
    """Print one document of JSON lines, at once."""
    text = json.dumps(value, default=plain, ensure_ascii=False)
    sys.stdout.write(text.translate(_UNSEEN_JSON) + "\n")
    sys.stdout.flush()


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
    """
    Print rows: a pipe gets tab-separated lines, whole; a terminal a table, or where that would not fit into its
    width, one row below the other as `name  value` lines.
    """
    if not out.is_terminal:
        for line in (columns, *rows):
            sys.stdout.write("\t".join(map(_cell, line)) + "\n")
        return
    found = list(rows)
    table = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for row in found:
        table.add_row(*("" if v is None else escape(_short(v)) for v in row))
    if Measurement.get(out, out.options.update(max_width=_WIDEST), table).maximum <= out.width:
        out.print(table)
        return
    for number, row in enumerate(found, 1):
        out.print(f"[dim]{title or 'row'} {number} of {len(found)}[/dim]")
        print_pairs({n: v for n, v in zip(columns, row, strict=True) if v not in (None, "", [])})


def _text(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat(" ", "seconds")
    if isinstance(value, dict | list | tuple):
        return json.dumps(value, default=plain, ensure_ascii=False)
    return str(plain(value))


def _cell(value: object) -> str:
    """Return *value* as a cell of tab-separated lines; what would end the cell is written as COPY writes it."""
    text = "" if value is None else _text(value)
    text = text.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")
    return text.translate(_UNSEEN)


def _short(value: object) -> str:
    text = visible(_text(value))
    return text if len(text) <= 200 else text[:197] + "…"  # noqa: PLR2004 (a cell stays readable)


def print_pairs(pairs: Mapping[str, object]) -> None:
    """Print `name  value` lines; whole, unless a terminal has to show them."""
    width = max((len(name) for name in pairs), default=0)
    for name, value in pairs.items():
        text = inset(_short(value) if out.is_terminal else _text(value), width + 2).lstrip(" ")
        out.print(f"[bold]{escape(name):<{width}}[/bold]  {escape(text)}")


@contextmanager
def progress_bar(what: str, *, quiet: bool, total: int | None = None) -> Iterator[Callable[[int, int], None]]:
    """Show how far long work is, to people only; gives what is to be called with how much is done, and of how much."""
    with Progress(console=err, transient=True, disable=quiet or not err.is_terminal) as progress:
        bar = progress.add_task(what, total=total)
        yield lambda done, of: progress.update(bar, completed=done, total=of)


def print_error(fault: SqlguardError, *, as_json: bool) -> None:
    """Print what is wrong and what to do, to stderr; with `--json` to stdout instead, for scripts."""
    if as_json:
        print_json(fault.as_dict())
        return
    state = "" if fault.sqlstate in _UNSAID else f" [dim]({fault.sqlstate})[/dim]"
    err.print(f"[bold red]error[/bold red] {escape(fault.message)}{state}")
    if fault.detail:
        err.print(escape(fault.detail))
    if fault.hint:
        err.print(f"[bold]hint[/bold]  {escape(fault.hint)}")


def print_exception(fault: Exception, *, as_json: bool) -> None:
    """Print an error of PostgreSQL's own, untouched; where our own schema is too old, with what to do."""
    diagnostics: Any = getattr(fault, "diag", None)
    primary = getattr(diagnostics, "message_primary", None) or str(fault).strip()
    document = {
        "error": primary,
        "sqlstate": getattr(fault, "sqlstate", None),
        "detail": getattr(diagnostics, "message_detail", None),
        "hint": getattr(diagnostics, "message_hint", None),
    }
    if document["sqlstate"] in _NOT_THERE and "sqlguard" in str(primary):
        document["hint"] = (
            "run `sqlguard migrate`: the schema `sqlguard` of this database is missing or older"
        )
    if as_json:
        print_json(document)
        return
    err.print(
        f"[bold red]error[/bold red] {escape(str(primary))} [dim]({document['sqlstate'] or 'no SQLSTATE'})[/dim]"
    )
    for name in ("detail", "hint"):
        if document[name]:
            err.print(f"[bold]{name}[/bold]  {escape(str(document[name]))}")
