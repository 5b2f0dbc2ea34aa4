"""`policy check`, `policy apply`, `policy test`, `policy explain`, `policy schema`."""

from pathlib import Path
from typing import Annotated, Any

import psycopg
import typer
from rich.markup import escape

from sqlguard import settings
from sqlguard.cli.common import Dsn, Json, operator
from sqlguard.cli.output import out, print_json
from sqlguard.errors import PolicyError
from sqlguard.policy import Policy, parse_policy
from sqlguard.postgres import policy_apply

group = typer.Typer(help="Policies: what a task may do.", no_args_is_help=True)
Files = Annotated[
    list[str] | None,
    typer.Argument(help="Policy files, or names of files in the policies folder; default: all."),
]


def load_policies(names: list[str] | None) -> list[Policy]:
    """Read policy files by path or name. Raises PolicyError for the first that is missing or broken."""
    folder = settings.load().policies
    if not names:
        paths = sorted(p for p in folder.glob("*.toml") if not p.name.endswith(".cases.toml"))
        if not paths:
            raise PolicyError(f"no policy file in `{folder}`", hint="name a file, or set SQLGUARD_POLICIES")
    else:
        paths = [Path(n) if n.endswith(".toml") or "/" in n else folder / f"{n}.toml" for n in names]
    return [_read(path) for path in paths]


def _read(path: Path) -> Policy:
    try:
        return parse_policy(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as fault:
        raise PolicyError(f"`{path}` can't be read: {fault}", hint="name an existing policy file") from None


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
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    Turn policies into database roles, grants and row-level security, in one transaction each. Safe to repeat.

    Example: sqlguard policy apply support --dry-run
    """
    if existing not in ("keep", "drop"):
        raise typer.BadParameter("--existing is keep or drop")
    policies = load_policies(files)
    with operator(dsn) as conn:
        applied = [_applied(conn, policy, existing, dry_run=dry_run) for policy in policies]
    if as_json:
        print_json({"policies": applied, "dry_run": dry_run})
    else:
        for one in applied:
            _show(one, dry_run=dry_run)


def _applied(
    conn: psycopg.Connection[Any], policy: Policy, existing: str, *, dry_run: bool
) -> dict[str, Any]:
    """Apply one policy, or plan it, and return what is told of it."""
    if dry_run:
        plan = policy_apply.plan_policy(conn, policy)
        return {"policy": policy.name, "statements": plan.statements, "warnings": plan.warnings}
    done = policy_apply.apply_policy(conn, policy, existing=existing)
    return {
        "policy": done.name,
        "version": done.version,
        "group_role": done.group_role,
        "statements": done.statements,
        "warnings": done.warnings,
    }


def _show(one: dict[str, Any], *, dry_run: bool) -> None:
    if dry_run:
        out.print(f"-- {one['policy']}", markup=False)
        for text in one["statements"]:
            out.print(f"{text};", markup=False, soft_wrap=True)
    else:
        out.print(f"applied `{one['policy']}` version {one['version']} ({len(one['statements'])} statements)")
    for warning in one["warnings"]:
        out.print(f"[yellow]warning[/yellow] {escape(warning)}")


@group.command("schema")
def schema() -> None:
    """
    Print the JSON Schema of policy files, for editors.

    Example: sqlguard policy schema > policy.schema.json
    """
    print_json(Policy.model_json_schema(by_alias=True))


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="policy")
