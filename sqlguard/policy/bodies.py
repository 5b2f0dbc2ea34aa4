"""Users' functions that the policy does not list: passed only when their bodies are read and found harmless."""

from sqlguard.catalog import Function
from sqlguard.policy.context import Context


def objection(function: Function, context: Context) -> str | None:
    """Return why *function* does not pass, None when it does."""
    return "is a function whose effects are not known"
