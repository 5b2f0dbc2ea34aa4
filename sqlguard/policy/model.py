"""
The policy file (DESIGN 3.12) as a value: TOML in, a frozen model out, unknown keys refused.

Patterns in `[tables]` match `schema.table` with `*`; key by key the most specific one wins (the longest literal
text, an exact name above all). What no pattern matches is not granted at all.
"""

import tomllib
from collections.abc import Mapping
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from sqlguard.errors import PolicyError

Tier = Literal["reversible", "costly", "compensable", "irreversible"]
DeleteMode = Literal["soft", "journal", "refuse"]
#: Tables whose rules a policy keeps ready.
_REMEMBERED = 10_000
CONDITION = r"^\s*(>=?|<=?|==?|!=|<>)?\s*[0-9]+(\.[0-9]+)?\s*$"
_DAY = "(mon|tue|wed|thu|fri|sat|sun)"
DAYS = f"^{_DAY}(-{_DAY})?(,{_DAY}(-{_DAY})?)*$"
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]"
HOURS = f"^{_TIME}-{_TIME}$"
_UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(value: object) -> object:
    """Turn `5s`, `250ms`, `15min`, `1h` or a number of seconds into a timedelta."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return timedelta(seconds=value)
    if isinstance(value, str):
        text = value.strip()
        digits = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
        unit = text[len(digits) :].strip() or "s"
        try:
            return timedelta(seconds=float(digits) * _UNITS[unit])
        except (KeyError, ValueError):
            message = f"`{value}` is not a duration; write `250ms`, `5s`, `15min` or `1h`"
            raise ValueError(message) from None
    return value


Duration = Annotated[timedelta, BeforeValidator(duration)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Reads(_Model):
    max_result_rows: int | None = Field(
        None, gt=0, description="rows that one statement may be answered with; not said: any number"
    )
    max_result_bytes: int | None = Field(None, gt=0, description="bytes of one statement's result")
    replica: bool = Field(default=False, description="plain reads may be answered by a replica, a bit behind")


class Budgets(_Model):
    """What runs up over many statements; None means that there is no such budget."""

    statements_per_minute: int | None = Field(
        None, gt=0, description="statements of one task, kept by the doors"
    )
    rows_per_task: int | None = Field(None, ge=0, description="rows that one task may change in all its time")
    rows_per_hour: int | None = Field(
        None, ge=0, description="rows that all agents together may have changed in the last hour"
    )


class Limits(_Model):
    """What every table inherits from `[defaults]`; None means not set here."""

    max_rows: int | None = Field(None, ge=0, description="rows one statement may change, cascades included")
    max_share: float | None = Field(None, ge=0, le=1, description="share of a table, from 10 rows up")
    on_excess: Literal["approve", "refuse"] | None = None
    statement_timeout: Duration | None = None


class Defaults(Limits):
    max_rows: int | None = Field(100, ge=0)
    max_share: float | None = Field(0.5, ge=0, le=1)
    on_excess: Literal["approve", "refuse"] | None = "approve"
    statement_timeout: Duration | None = timedelta(seconds=30)
    lock_timeout: Duration | None = timedelta(seconds=5)
    idle_in_transaction_timeout: Duration | None = timedelta(minutes=5)
    max_ttl: Duration = timedelta(hours=1)
    connections: int = Field(10, gt=0, description="concurrent sessions of one task")
    search_path: tuple[str, ...] = ("public",)
    reads: Reads = Reads()
    unscoped: Literal["approve", "refuse"] = "refuse"
    plan_ttl: Duration = Field(
        timedelta(hours=1), description="how long a plan can be approved and committed"
    )
    plan_only: bool = Field(default=False, description="nothing commits but approved plans")


class TableRule(Limits):
    select: bool | tuple[str, ...] = False
    insert: bool | tuple[str, ...] = False
    update: bool | tuple[str, ...] = False
    delete: DeleteMode = "refuse"
    rows: str | None = Field(None, description="row scope, a SQL condition over the columns and :parameters")
    class_: tuple[str, ...] = Field((), alias="class")


class FunctionRule(_Model):
    tier: Tier = "reversible"
    compensation: str | None = None


class When(_Model):
    tier: Tier | tuple[Tier, ...] | None = None
    class_: str | None = Field(None, alias="class")
    rows: str | None = Field(None, description="`>10`", pattern=CONDITION)
    share: str | None = Field(None, description="of a table: `>=0.5`", pattern=CONDITION)
    confidence: str | None = Field(None, description="`<0.70`; none said counts as 0", pattern=CONDITION)
    kind: str | None = None
    table: str | None = None
    days: str | None = Field(None, description="`sat,sun` or `mon-fri`", pattern=DAYS)
    hours: str | None = Field(None, description="`18:00-08:00`, the end not included", pattern=HOURS)
    timezone: str = Field("UTC", description="of days and hours, e.g. `Europe/Berlin`")

    @field_validator("timezone")
    @classmethod
    def _known(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError):
            raise ValueError(f"there is no time zone `{name}`") from None
        return name


class Gate(_Model):
    when: When = When()
    then: Literal["allow", "approve", "refuse"]
    approvals: int = Field(1, gt=0, description="how many people have to approve")


class Policy(_Model):
    """One policy; `version` is given by `policy apply`, 0 means never applied."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,39}$")
    description: str = ""
    defaults: Defaults = Defaults()
    budgets: Budgets = Budgets()
    tables: Mapping[str, TableRule] = Field(default_factory=dict)
    functions: Mapping[str, FunctionRule] = Field(default_factory=dict)
    gates: tuple[Gate, ...] = ()
    version: int = Field(0, exclude=True)

    def table_rule(self, schema: str, name: str) -> TableRule | None:
        """
        Return what the patterns that match say together, or None when none does and nothing is granted.

        Key by key the most specific pattern that sets the key wins, so `[tables."public.*"] select = true`
        goes on for a table that has a section of its own.
        """
        tables, rules = self._rules
        if tables is not self.tables:  # a copy with other tables takes the cache of the first one along
            return self._table_rule(schema, name)
        key = (schema, name)
        if key not in rules:
            # A text can name tables that are not there.
            if len(rules) >= _REMEMBERED:
                rules.clear()
            rules[key] = self._table_rule(schema, name)
        return rules[key]

    @cached_property
    def _rules(self) -> tuple[Mapping[str, TableRule], dict[tuple[str, str], TableRule | None]]:
        return self.tables, {}

    def _table_rule(self, schema: str, name: str) -> TableRule | None:
        full = f"{schema}.{name}"
        matching = [p for p in self.tables if fnmatchcase(full, p if "." in p else f"public.{p}")]
        if not matching:
            return None
        matching.sort(key=lambda p: ("*" not in p and "?" not in p, len(p.replace("*", ""))))
        merged: dict[str, Any] = {}
        for pattern in matching:
            rule = self.tables[pattern]
            merged.update({key: getattr(rule, key) for key in rule.model_fields_set})
        return TableRule.model_construct(set(merged), **merged)

    def max_rows(self, schema: str, name: str) -> int | None:
        rule = self.table_rule(schema, name)
        return rule.max_rows if rule and rule.max_rows is not None else self.defaults.max_rows

    def max_share(self, schema: str, name: str) -> float | None:
        rule = self.table_rule(schema, name)
        return rule.max_share if rule and rule.max_share is not None else self.defaults.max_share

    def on_excess(self, schema: str, name: str) -> str:
        rule = self.table_rule(schema, name)
        return (rule.on_excess if rule and rule.on_excess else self.defaults.on_excess) or "approve"


def parse_policy(text: str, source: str) -> Policy:
    """
    Read one policy from TOML *text*; *source* names it in errors.

    Raises PolicyError with every fault that was found, one per line.
    """
    try:
        document: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        raise PolicyError(
            f"`{source}` is not valid TOML: {fault}", hint="mend the file; see `sqlguard policy schema`"
        ) from None
    return policy_from_document(document, source)


def _told(fault: ErrorDetails) -> str:
    return "there is no such key" if fault["type"] == "extra_forbidden" else fault["msg"]


def policy_from_document(document: Mapping[str, Any], source: str) -> Policy:
    """Make a policy from its parsed document (as stored in `sqlguard.policy`). Raises PolicyError."""
    try:
        return Policy.model_validate(document)
    except ValidationError as fault:
        lines = [f"{'.'.join(str(p) for p in e['loc']) or 'policy'}: {_told(e)}" for e in fault.errors()]
        raise PolicyError(
            f"`{source}` is not a valid policy: {lines[0]}",
            detail="\n".join(lines[1:]) or None,
            hint="mend the file; `sqlguard policy schema` prints what is allowed",
        ) from None
