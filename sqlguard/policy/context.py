"""What a verdict depends on besides the statement and the session."""

from dataclasses import dataclass, field
from typing import Any

from sqlguard.catalog import Catalog
from sqlguard.policy.model import Policy
from sqlguard.task import Task


@dataclass(frozen=True)
class Context:
    """`plan_only`: a preview, a plan or an approval runs the text, so it must not end the transaction around it."""

    catalog: Catalog
    policy: Policy
    task: Task | None
    plan_only: bool = False
    #: Verdicts on functions, by oid: they depend on nothing but catalog and policy.
    judged: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
