"""
A task: one piece of agent work with an agent, a policy, a purpose, parameters and an end.

Pure: the clock is an argument.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

#: Every login role that sqlguard makes for a task begins so; the table walls look for it in session_user.
ROLE_PREFIX = "sg_tk_"


@dataclass(frozen=True, slots=True)
class Task:
    """`state` is `opening`, `open`, `ending` or `ended`; times carry a time zone."""

    id: str
    agent: str
    policy: str
    policy_version: int
    expires_at: datetime
    state: str = "open"
    agent_version: str | None = None
    purpose: str | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    opened_at: datetime | None = None
    ended_at: datetime | None = None
    end_reason: str | None = None
    #: Nothing commits but approved plans.
    plan_only: bool = False

    def alive(self, now: datetime) -> bool:
        return self.state == "open" and now < self.expires_at


@dataclass(frozen=True, slots=True)
class Lease:
    """A login role that belongs to a task; `verifier` is its SCRAM verifier, no password is kept anywhere."""

    role: str
    task: str
    verifier: str
    expires_at: datetime
    state: str = "live"
