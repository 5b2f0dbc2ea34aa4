"""
A starting policy for a database: every table named, nothing granted but reading, the rest as a proposal in comments.

What is proposed comes from the pre-flight that `guard` asks, so applying it is no surprise. Columns that look like
secrets are left out of reading; that is a guess by their names, which the comment says.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from sqlguard.catalog import DELETED_AT, DELETED_BY_AGENT
from sqlguard.errors import GuardError
from sqlguard.journal import SECRET_COLUMNS
from sqlguard.postgres.control import not_migrated
from sqlguard.postgres.preflight import Weight, choose, judge
from sqlguard.postgres.walls_facts import Facts, Relation, read_facts

#: Parts of column names that hint at a compliance class.
_CLASSES = {
    "pii": ("email", "phone", "address", "birth", "first_name", "last_name", "passport", "ssn"),
    "financial": ("price", "amount", "total", "balance", "iban", "salary", "invoice"),
}
#: Characters that are patterns in a policy's table names.
_PATTERNS = frozenset("*?[")
_ESTIMATES = "SELECT oid, reltuples::bigint FROM pg_catalog.pg_class WHERE oid = ANY(%s)"


@dataclass(frozen=True, slots=True)
class Proposal:
    """What is proposed for one table; `mode` is None when it can't be guarded, for the reason in `notes`."""

    table: str
    mode: str | None
    guarded: bool
    notes: tuple[str, ...]
    columns: tuple[str, ...]
    writable: tuple[str, ...]
    secrets: tuple[str, ...]
    classes: tuple[str, ...]
    rows: int | None

    def as_dict(self) -> dict[str, Any]:
        return {
            "table": self.table,
            "mode": self.mode,
            "guarded": self.guarded,
            "notes": list(self.notes),
            "secret_columns": list(self.secrets),
            "classes": list(self.classes),
            "rows_estimate": self.rows,
        }


def propose(conn: psycopg.Connection[Any]) -> list[Proposal]:
    """Return a proposal for every table of the database, by name. Raises NotConfigured without our schema."""
    try:
        facts = read_facts(conn)
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        raise not_migrated() from None
    roots = [
        r
        for r in facts.relations.values()
        if not any(p in facts.relations for p in r.parents) and r.extension is None
    ]
    estimates = dict(conn.execute(_ESTIMATES, [[r.oid for r in roots]]).fetchall())
    modes = {guarded.relid: guarded.mode for guarded in facts.guarded.values()}
    return sorted((_proposal(facts, r, modes, estimates.get(r.oid)) for r in roots), key=lambda p: p.table)


def _proposal(facts: Facts, root: Relation, modes: dict[int, str], rows: int | None) -> Proposal:
    notes = judge(facts, root, modes)
    mode: str | None = modes.get(root.oid)
    try:
        mode = mode or choose(root, notes, None)
    except GuardError:
        mode = None
    hidden = {DELETED_AT, DELETED_BY_AGENT} if root.oid in modes else set()
    columns = [c for c in root.columns if c.name not in hidden]
    names = tuple(c.name for c in columns)
    return Proposal(
        table=root.label,
        mode=mode,
        guarded=root.oid in modes,
        notes=tuple(str(n) for n in notes if n.weight >= Weight.PREFER),
        columns=names,
        writable=tuple(c.name for c in columns if c.name not in root.key_columns and not c.generated),
        secrets=tuple(n for n in names if n.lower() in SECRET_COLUMNS),
        classes=tuple(
            name
            for name, parts in _CLASSES.items()
            if any(part in n.lower() for n in names for part in parts)
        ),
        rows=rows if rows is not None and rows >= 0 else None,
    )


def render(name: str, database: str, proposals: Sequence[Proposal]) -> str:
    """Return the policy file; it can be applied as it is, and grants reading only."""
    schemas = sorted({p.table.partition(".")[0] for p in proposals})
    lines = [
        f"# A starting policy for the database {_said(database)}, written by `sqlguard init`.",
        "# As it stands an agent may read, and change nothing. Uncomment what it shall do, take away what it need",
        f"# not see, then: sqlguard policy apply {name}",
        "",
        f"name = {_quoted(name)}",
        'description = "reads; writes where a table below says so"',
        "",
        "[defaults]                     # every key may be set per table too",
        "max_rows = 100                 # rows one statement may change, cascades included",
        "max_share = 0.5                # share of a table one statement may change, from 10 rows up",
        'on_excess = "approve"          # beyond that a person has to approve; or "refuse"',
        'statement_timeout = "30s"',
        'max_ttl = "1h"                 # the longest that a task may live',
        f"search_path = {_list(schemas if 'public' not in schemas else ['public'])}",
        "",
    ]
    for proposal in proposals:
        lines += _table(proposal)
    lines += [
        "# What a person has to approve, whatever the tables allow; the first that matches decides.",
        "# [[gates]]",
        '# when = { class = "financial", rows = ">10" }',
        '# then = "approve"',
        "# [[gates]]",
        '# when = { confidence = "<0.70" }   # how sure the agent says it is',
        '# then = "approve"',
    ]
    return "\n".join(lines) + "\n"


def _table(proposal: Proposal) -> list[str]:
    size = "size unknown" if proposal.rows is None else f"about {proposal.rows:,} rows"
    state = f"guarded as {proposal.mode}" if proposal.guarded else "not guarded yet"
    lines = [f"# {_said(proposal.table)}: {size}, {state}."]
    lines += [f"#   {_said(note)}" for note in proposal.notes]
    if _PATTERNS & set(proposal.table):
        return [*lines, "#   Its name is a pattern here, so it has no section of its own.", ""]
    lines.append(f"[tables.{_quoted(proposal.table)}]")
    if proposal.secrets:
        lines.append(
            f"# By their names these are secrets, and left out: {_said(', '.join(proposal.secrets))}"
        )
        lines.append(f"select = {_list(c for c in proposal.columns if c not in proposal.secrets)}")
    else:
        lines.append("select = true                  # or a list of columns")
    if proposal.mode is None:
        return [*lines, "# No writes are proposed: it can't be guarded, for the reason above.", ""]
    lines.append("# insert = true")
    lines.append(f"# update = {_list(c for c in proposal.writable if c not in proposal.secrets)}")
    why = {
        "soft": "deleted rows are marked and hidden",
        "journal": "deleted rows go, and are kept in the journal",
    }
    lines.append(f"# delete = {_quoted(proposal.mode)}                # {why[proposal.mode]}")
    if proposal.classes:
        lines.append(f"# class = {_list(proposal.classes)}            # a guess by column names, for gates")
    return [*lines, ""]


def _quoted(text: str) -> str:
    # TOML's basic strings take JSON's escapes; DEL is the one character that only TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _list(names: Iterable[str]) -> str:
    return f"[{', '.join(map(_quoted, names))}]"


def _said(text: str) -> str:
    """Return *text* for a comment: on one line, whatever a table is called."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
