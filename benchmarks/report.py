"""Results for people (a table, a picture) and for programs (JSON)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import Result

_MILLI, _MICRO = 1e-3, 1e-6


def show(results: Sequence[Result], console: Console) -> None:
    """Print a table with the goal beside each ratio."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("benchmark", "case", "compared with"):
        table.add_column(heading)
    for heading in ("it takes", "instead of", "ratio", "quartiles", "goal", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    before = ""
    for r in results:
        table.add_row(
            r.benchmark if r.benchmark != before else "",
            r.case,
            r.against,
            _amount(r.ours, r.unit),
            _amount(r.base, r.unit),
            f"[bold]{_number(r.ratio)}[/]",
            f"{_number(r.low)}-{_number(r.high)}",
            "" if r.goal is None else str(r.goal),
            "" if r.met is None else ("[green]met[/]" if r.met else "[red]missed[/]"),
        )
        before = r.benchmark
    console.print(table)


def as_json(results: Sequence[Result], facts: dict[str, Any]) -> str:
    return json.dumps({**facts, "results": [r.as_dict() for r in results]}, indent=2, ensure_ascii=False)


def plot(results: Sequence[Result], path: Path) -> bool:
    """Draw the ratios with their goals into a PNG; return False where matplotlib is not installed."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 - a picture is optional

        mpl.use("Agg")
        from matplotlib import pyplot as plt  # noqa: PLC0415
    except ImportError:
        return False
    rows = list(reversed(results))
    figure, axes = plt.subplots(figsize=(10, 0.36 * len(rows) + 1.4), layout="constrained")
    for place, r in enumerate(rows):
        colour = {True: "#2f7d4f", False: "#b3392f", None: "#64748b"}[r.met]
        axes.plot(
            [r.low, r.high], [place, place], color=colour, linewidth=5, alpha=0.35, solid_capstyle="butt"
        )
        axes.plot(r.ratio, place, "o", color=colour)
        axes.annotate(
            _number(r.ratio),
            (r.ratio, place),
            (0, 6),
            textcoords="offset points",
            fontsize=8,
            color=colour,
            ha="center",
        )
        if r.goal is not None:
            axes.plot(r.goal.limit, place, ">" if r.goal.at_least else "<", color="black", markersize=5)
    axes.axvline(1, color="black", linewidth=0.6)
    axes.set_yticks(range(len(rows)), [f"{r.benchmark}: {r.case}" for r in rows], fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("ratio; dot: median, bar: quartiles; goal: ◄ at most, ► at least")
    axes.grid(axis="x", which="both", linewidth=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def _number(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def _amount(value: float, unit: str) -> str:
    return _time(value) if unit == "s" else f"{value:.0f} {unit}"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= _MILLI:
        return f"{seconds / _MILLI:.1f} ms"
    return f"{seconds / _MICRO:.0f} µs"
