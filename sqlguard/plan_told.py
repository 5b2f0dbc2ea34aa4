"""
What is told of a run that was rolled back: to people, to the agent, in one line or in an error.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlguard.errors import ApprovalRequired, Drift


def told(report: Mapping[str, Any]) -> str:
    """Return in one line what a run changed, from the report that the database made of it."""
    parts = [f"{c['rows']} {c['op']} in {c['table']}" for c in report.get("affected", ())]
    for change in report.get("unguarded", ()):
        parts += [
            f"{change[verb]} {verb} in {change['table']} (not guarded)"
            for verb in ("inserted", "updated", "deleted")
            if change[verb]
        ]
    return ", ".join(parts) or "no rows"


def differences(sample: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return column -> [before, after] for what is not the same in a sample of a report."""
    before, after = sample.get("before") or {}, sample.get("after") or {}
    if sample.get("op") == "delete":
        after = {}
    return {
        column: [before.get(column), after.get(column)]
        for column in dict.fromkeys([*before, *after])
        if before.get(column) != after.get(column)
    }


def with_differences(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return *report* with each sample's differences in it, under `changed`."""
    samples = [{**sample, "changed": differences(sample)} for sample in report.get("samples", ())]
    return {**report, "samples": samples}


def approval_required(plan: int, report: Mapping[str, Any], reasons: Sequence[str]) -> ApprovalRequired:
    """Return what the agent gets for a statement that a person has to approve first."""
    why = f": {'; '.join(reasons)}" if reasons else ""
    return ApprovalRequired(
        f"this needs an approval, plan {plan} is waiting for it{why}",
        detail=f"plan {plan}: it would change {told(report)}; nothing was changed",
        hint=f"ask a person to run `sqlguard approve {plan}`, then send the very same statement again",
    )


def _other_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the settings that two runs did not have in common, as the approved one had them."""
    was, found = then.get("settings", {}), now.get("settings", {})
    return [
        f"{name} was `{value}`, is `{found[name]}`"
        for name, value in was.items()
        if found.get(name, value) != value
    ]


def drift(plan: int, fresh: int, then: Mapping[str, Any], now: Mapping[str, Any]) -> Drift:
    """Return what the agent gets when an approved plan would change other rows now."""
    before, after = told(then), told(now)
    if before != after:
        what = f"{before} then, {after} now"
    elif changed := _other_settings(then, now):
        what = f"the session reads and writes values in another way: {', '.join(changed)}"
    else:
        what = f"the same number of rows ({after}), but other rows, or rows with other contents"
    return Drift(
        f"the rows have changed since plan {plan} was approved",
        detail=f"{what}; nothing was changed; plan {fresh} is what it would do now",
        hint=f"ask a person to run `sqlguard approve {fresh}`, then send the very same statement again",
    )
