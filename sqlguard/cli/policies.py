"""`policy check`, `policy apply`, `policy list`, `policy test`, `policy explain`, `policy schema`."""

import tomllib
from pathlib import Path
from typing import Annotated, Any

import psycopg
import typer
from rich.markup import escape

from sqlguard import settings
from sqlguard.cli.common import Dsn, Json, operator
from sqlguard.cli.judging import decided, load_policies, policy_paths, read_policy
from sqlguard.cli.output import err, out, print_json, print_rows
from sqlguard.cli.statements import check as check_statement
from sqlguard.errors import PolicyError
from sqlguard.policy import Policy
from sqlguard.policy.verdict import Effect
from sqlguard.postgres import overview, policy_apply
from sqlguard.postgres.policy_guard import Guarded, guard_writable

group = typer.Typer(help="Policies: what a task may do.", no_args_is_help=True)
Files = Annotated[
    list[str] | None,
    typer.Argument(help="Policy files, or names of files in the policies folder; default: all."),
]


@group.command("check")
def check(files: Files = None, *, as_json: Json = False) -> None:
    """
    Read policy files and say what is wrong with them; needs no database.

    Example: sqlguard policy check policies/support.toml
    """
    policies = load_policies(files)
    if as_json:
        print_json({"policies": [p.name for p in policies]})
    else:
        out.print(f"ok: {', '.join(p.name for p in policies)}")


@group.command("apply")
def apply(
    files: Files = None,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the SQL, change nothing.")] = False,
    existing: Annotated[
        str, typer.Option(help="Open tasks: `keep` their policy version, or `drop` to this one at once.")
    ] = "keep",
    guard: Annotated[
        bool,
        typer.Option(
            "--guard/--no-guard",
            help="Guard tables that agents may write to, in the mode that `delete` says.",
        ),
    ] = True,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    Turn policies into database roles, grants and row-level security, in one transaction each. Safe to repeat.

    No write is granted on a table that is not guarded, because nothing would keep what it destroys. So such tables
    are guarded first: as `soft` where the policy says delete = "soft" and nothing speaks against it (that adds
    columns and row-level security), else in journal mode (triggers, no columns); a warning says where it had to be
    the other one. Tables and columns made later need this again, or `sqlguard policy refresh`.

    Example: sqlguard policy apply support --dry-run
    """
    if existing not in ("keep", "drop"):
        raise typer.BadParameter("--existing is keep or drop")
    policies = load_policies(files)
    with operator(dsn) as conn:
        applied = []
        for policy in policies:
            guards = guard_writable(conn, policy, dry_run=dry_run) if guard else []
            told = _planned(conn, policy, guards) if dry_run else _applied(conn, policy, existing)
            told["warnings"] = _warnings(guards, told["warnings"])
            names = [g.table for g in guards if g.mode is not None]
            applied.append({**told, "guarded": names, "guards": guards})
    if as_json:
        print_json({"policies": applied, "dry_run": dry_run})
    else:
        for one in applied:
            _show(one, dry_run=dry_run)
        if not dry_run:
            err.print("tables and columns that are made later need `sqlguard policy refresh` to be granted")


def _planned(conn: psycopg.Connection[Any], policy: Policy, guards: list[Guarded]) -> dict[str, Any]:
    """Return what applying would tell once *guards* are done."""
    plan = policy_apply.plan_policy(conn, policy, guards)
    return {"policy": policy.name, "statements": plan.statements, "warnings": plan.warnings}


def _applied(conn: psycopg.Connection[Any], policy: Policy, existing: str) -> dict[str, Any]:
    """Apply one policy and return what is told of it."""
    done = policy_apply.apply_policy(conn, policy, existing=existing)
    return {
        "policy": done.name,
        "version": done.version,
        "group_role": done.group_role,
        "statements": done.statements,
        "warnings": done.warnings,
    }


def _warnings(guards: list[Guarded], others: list[str]) -> list[str]:
    """What was said of a table's guard, with its reason, is not said again."""
    known = tuple(f"`{g.table}` is " for g in guards)
    return [
        *(g.warning for g in guards if g.warning),
        *(text for text in others if not known or not text.startswith(known)),
    ]


def _show(one: dict[str, Any], *, dry_run: bool) -> None:
    for guard in one["guards"]:
        if guard.mode is not None:
            what = "-- would guard" if dry_run else "guarded"
            out.print(f"{what} {guard.table} as {guard.mode}", markup=False)
    if dry_run:
        out.print(f"-- {one['policy']}", markup=False)
        for text in one["statements"]:
            out.print(f"{text};", markup=False, soft_wrap=True)
    else:
        out.print(f"applied `{one['policy']}` version {one['version']} ({len(one['statements'])} statements)")
    for warning in one["warnings"]:
        out.print(f"[yellow]warning[/yellow] {escape(warning)}")


@group.command("list")
def list_(
    *,
    all_versions: Annotated[
        bool, typer.Option("--all", help="Versions that no task has any more, too.")
    ] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    List the applied policies: newest version, tables, open tasks. `sqlguard tables` says which tables.

    Example: sqlguard policy list --json
    """
    with operator(dsn) as conn:
        found = overview.policy_states(conn)
    shown = [p for p in found if all_versions or p.latest or p.open_tasks]
    if as_json:
        print_json({"policies": [p.as_dict() for p in shown]})
        return
    print_rows(
        ("policy", "version", "tables", "open tasks", "applied", "by", "description"),
        [
            (
                p.name,
                f"{p.version}" if p.latest else f"{p.version} (old)",
                p.tables,
                p.open_tasks,
                p.applied_at,
                p.applied_by,
                p.description,
            )
            for p in shown
        ],
    )


@group.command("test")
def run_cases(files: Files = None, *, dsn: Dsn = None, as_json: Json = False) -> None:
    """
    Run the cases beside each policy (NAME.cases.toml: statement and expected verdict). Exit status 1 if one differs.

    Example: sqlguard policy test support --dsn postgresql://owner@localhost/shop
    """
    found = settings.load(dsn=dsn).dsn
    failed, count = [], 0
    for path in policy_paths(files):
        policy = read_policy(path)
        for case in _cases(path.with_suffix(".cases.toml")):
            count += 1
            verdict = max(
                (d.verdict.effect for d in decided(case["sql"], policy, found)), default=Effect.REFUSE
            )
            if str(verdict) != case["verdict"]:
                failed.append({"policy": policy.name, **case, "found": str(verdict)})
    if as_json:
        print_json({"cases": count, "failed": failed, "resolved": found is not None})
    else:
        for one in failed:
            out.print(
                f"{one['policy']}: {one['sql']}\n  expected {one['verdict']}, found {one['found']}",
                markup=False,
            )
        out.print(f"{count - len(failed)} passed, {len(failed)} failed")
    raise typer.Exit(1 if failed else 0)


def _cases(path: Path) -> list[dict[str, str]]:
    """Read the cases of a policy. Raises PolicyError; no file means no cases."""
    if not path.is_file():
        return []
    try:
        cases = tomllib.loads(path.read_text(encoding="utf-8")).get("cases", [])
        return [{"sql": str(c["sql"]), "verdict": str(c["verdict"])} for c in cases]
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError) as fault:
        raise PolicyError(
            f"`{path}` can't be read: {fault}", hint='write [[cases]] with `sql = "…"` and `verdict = "…"`'
        ) from None


@group.command("refresh")
def refresh(*, dsn: Dsn = None, as_json: Json = False) -> None:
    """
    Bring the rights of all policy versions in use to the tables as they are now; needs no files.

    Example: sqlguard policy refresh
    """
    with operator(dsn) as conn:
        done = policy_apply.refresh_policies(conn)
    if as_json:
        print_json({"policies": done})
    for one in () if as_json else done:
        changed = f"{len(one.statements)} statement(s)" if one.statements else "nothing to do"
        out.print(f"{one.name} version {one.version}: {changed}", markup=False)


@group.command("explain")
def explain(
    sql: Annotated[str, typer.Argument(help="One or more SQL statements.")],
    *,
    policy: Annotated[
        str | None, typer.Option(help="Policy file or name; default: the only one in the folder.")
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    Say what a policy makes of a statement and which rules decided: `check --why`.

    Example: sqlguard policy explain --policy support "DELETE FROM orders"
    """
    check_statement(sql, file=None, policy=policy, why=True, dsn=dsn, as_json=as_json)


@group.command("schema")
def schema() -> None:
    """
    Print the JSON Schema of policy files, for editors.

    Example: sqlguard policy schema > policy.schema.json
    """
    print_json(Policy.model_json_schema(by_alias=True))


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="policy")
