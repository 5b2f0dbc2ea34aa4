"""
What the models say about guards: `Table.info`, or the policy files.

    Table("orders", metadata, …, info={"sqlguard": {"mode": "soft"}})     # or "journal", or "auto"
    Table("orders", metadata, …, info={"soft_delete": True})              # the short form of soft
    Table("orders", metadata, …, info={"sqlguard": False})                # not to be guarded
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from sqlalchemy import MetaData, Table

from sqlguard.alembic.operations import MODES, UNIQUES, Mode, UniqueChoice
from sqlguard.errors import GuardError

if TYPE_CHECKING:
    # Alembic imports this package whenever it is imported itself; the policies' parsers are not for that.
    from sqlguard.policy.model import Policy

KEY = "sqlguard"
SHORT_KEY = "soft_delete"


@dataclass(frozen=True, slots=True)
class Declaration:
    """How a table is to be guarded; `mode` None: not at all."""

    mode: Mode | None
    unique: UniqueChoice = "partial"
    #: Reason codes of the pre-flight that do not matter for this table.
    accept: tuple[str, ...] = ()
    #: Whether the views over it are made to read with their reader's rights.
    fix_views: bool = False


def declaration(table: Table) -> Declaration | None:
    """Return what *table* declares, None when it says nothing. Raises GuardError for what is no declaration."""
    if KEY in table.info:
        return _read(table.info[KEY], table.fullname)
    if SHORT_KEY in table.info:
        return Declaration("soft" if table.info[SHORT_KEY] else None)
    return None


def declare_policies(
    metadata: MetaData, policies: "Iterable[Policy]", *, default_schema: str = "public"
) -> None:
    """
    Declare in *metadata* the modes that the policies' `delete = "soft" | "journal"` ask for.

    What a table declares itself stays. Raises GuardError where two policies want different modes.
    """
    wanted: dict[str, tuple[str, str]] = {}
    for policy in policies:
        for key, table in metadata.tables.items():
            rule = policy.table_rule(table.schema or default_schema, table.name)
            if rule is None or rule.delete == "refuse":
                continue
            mode, source = wanted.setdefault(key, (rule.delete, policy.name))
            if mode != rule.delete:
                raise GuardError(
                    f"`{key}` can't be guarded for both: policy `{source}` says {mode}, `{policy.name}` {rule.delete}",
                    hint="give the table one mode in all policies",
                )
    for key, (mode, _) in wanted.items():
        if declaration(metadata.tables[key]) is None:
            metadata.tables[key].info[KEY] = {"mode": mode}


def _read(value: object, name: str) -> Declaration:
    if value is None or value is False:
        return Declaration(None)
    if value is True:
        return Declaration("auto")
    if isinstance(value, str):
        value = {"mode": value}
    if isinstance(value, Mapping):
        options: dict[Any, Any] = {f.name: f.default for f in fields(Declaration)} | {"mode": "auto", **value}
        accept = options["accept"]
        codes = isinstance(accept, list | tuple) and all(isinstance(code, str) for code in accept)
        known = len(options) == len(fields(Declaration)) and isinstance(options["fix_views"], bool)
        if known and codes and options["mode"] in MODES and options["unique"] in UNIQUES:
            return Declaration(**{**options, "accept": tuple(accept)})
    raise GuardError(
        f"`info` of the table `{name}` declares no guard: {value!r}",
        hint='write {"mode": "soft"}, "journal" or "auto"; where it matters also "unique": "partial" or "keep", '
        '"accept": a list of reason codes, and "fix_views": True',
    )
