"""Policies: what a task may do, and the verdict on one statement."""

from sqlguard.policy import rules as rules  # importing the package registers the rules
from sqlguard.policy.judge import decide as decide
from sqlguard.policy.model import Policy as Policy
from sqlguard.policy.model import parse_policy as parse_policy
from sqlguard.policy.model import policy_from_document as policy_from_document
