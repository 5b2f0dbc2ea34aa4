"""Policies from files, and what they make of a text, with a database or without."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from sqlguard import annotation, settings
from sqlguard.errors import ApprovalRequired, PolicyError, SqlguardError
from sqlguard.gate import Gate, refusal
from sqlguard.plan import Decision, refused, ruling_of
from sqlguard.policy import Policy, decide, parse_policy
from sqlguard.policy.assumed import assumed_catalog
from sqlguard.policy.context import Context
from sqlguard.policy.late import Ruling
from sqlguard.policy.verdict import Effect
from sqlguard.postgres.catalog_reader import read_catalog
from sqlguard.postgres.connect import connect
from sqlguard.postgres.policy_store import stored_versions
from sqlguard.statement import analyse, dialects
from sqlguard.statement.model import Session


def load_policies(names: list[str] | None) -> list[Policy]:
    """Read policy files by path or name. Raises PolicyError for the first that is missing or broken."""
    return [read_policy(path) for path in policy_paths(names)]


def named_policies(name: str | None, dsn: str | None) -> list[Policy]:
    """
    Return the policy of that path or name: a file, or else the newest version that was applied to the database.

    Raises PolicyError when there is neither.
    """
    paths = policy_paths([name] if name else None)
    if name is None or paths[0].exists() or name.endswith(".toml") or "/" in name:
        return [read_policy(path) for path in paths]
    if dsn is not None:
        with connect(dsn) as conn:
            stored = conn.execute("SELECT to_regclass('sqlguard.policy')").fetchone() != (None,)
            found = [v.policy for v in stored_versions(conn, name) if v.latest] if stored else []
        if found:
            return found
    where = (
        "and no database was named" if dsn is None else "and none of that name was applied to the database"
    )
    raise PolicyError(
        f"there is no policy file `{paths[0]}`, {where}", hint="`sqlguard policy list` lists what was applied"
    )


def policy_paths(names: list[str] | None) -> list[Path]:
    """Return the files meant by paths or names. Raises PolicyError when there is none."""
    folder = settings.load().policies
    if names:
        return [Path(n) if n.endswith(".toml") or "/" in n else folder / f"{n}.toml" for n in names]
    paths = _policy_files(folder)
    if not paths:
        raise PolicyError(f"no policy file in `{folder}`", hint="name a file, or set SQLGUARD_POLICIES")
    return paths


def read_policy(path: Path) -> Policy:
    try:
        return parse_policy(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        there = ", ".join(f"`{p.stem}`" for p in _policy_files(path.parent))
        hint = (
            f"`{path.parent}` has {there}" if there else "name a file, or let `sqlguard init NAME` write one"
        )
        raise PolicyError(f"there is no policy file `{path}`", hint=hint) from None
    except (OSError, UnicodeDecodeError) as fault:
        why = fault.strerror if isinstance(fault, OSError) else "it is no UTF-8 text"
        raise PolicyError(f"`{path}` can't be read: {why}", hint="name a readable policy file") from None


def _policy_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*.toml") if not p.name.endswith(".cases.toml"))


def decided(text: str, policy: Policy, dsn: str | None) -> tuple[Decision, ...]:
    """Return the decisions on *text*, by the database's catalog or, without one, by what the text itself tells."""
    session = Session(search_path=policy.defaults.search_path)
    if dsn is not None:
        with connect(dsn) as conn:
            return Gate(Context(read_catalog(conn), policy, None)).decide(text, session)
    context = Context(assumed_catalog(text, policy), policy, None)
    try:
        statements = analyse(text, context.catalog, session)
    except SqlguardError as fault:
        return (refusal(text, fault),)
    return tuple(Decision(s, decide(s, session, context), s.text) for s in statements)


def foreseen(decision: Decision, confidence: float | None) -> Decision:
    """
    Return *decision* with what its policy's gates would say of it now: of the clock, and of how sure the agent is.

    Gates that ask for the rows can't be foreseen: they wait for a run, as they do at every door.
    """
    if not decision.allowed:
        return decision
    sure = confidence if confidence is not None else annotation.read(decision.statement.text).confidence
    ruling = ruling_of(decision, confidence=sure, now=datetime.now(UTC))
    if ruling is None or ruling.effect is Effect.ALLOW:
        return decision
    fault = refused(ruling) if ruling.effect is Effect.REFUSE else _awaited(ruling)
    stopped = refusal(decision.statement.text, fault, decision.statement).verdict
    findings = (*decision.verdict.findings, *stopped.findings)
    return replace(decision, verdict=replace(decision.verdict, effect=stopped.effect, findings=findings))


def _awaited(ruling: Ruling) -> ApprovalRequired:
    return ApprovalRequired(
        f"this needs an approval: {'; '.join(ruling.reasons)}",
        hint="preview it for a task: that makes a plan, which a person can approve",
        rules=("gate",),
    )


def decided_elsewhere(text: str, dialect: str, policy: Policy) -> tuple[Decision, ...]:
    """
    Return decisions on a text in another database's *dialect*, by what it becomes in PostgreSQL's grammar.

    Raises NotConfigured for a dialect that is not known.
    """
    found: list[Decision] = []
    for original, carried in dialects.carry_over(text, dialect):
        if isinstance(carried, SqlguardError):
            found.append(refusal(original, carried))
        else:
            found += decided(carried, policy, None)
    return tuple(found)
