"""
The journal's own arithmetic: what an entry holds, how entries are chained, what must never be written down.

The one idea: an entry is a list of texts, so its hash can be worked out anywhere. The hash of an entry is
sha256 over the previous entry's hash followed by the JSON array of the entry's fields, in the order of
`ACTION_FIELDS` or `EVENT_FIELDS`, each as text or null, encoded as UTF-8. `sqlguard.record_intent` makes
the same hash inside PostgreSQL; `sqlguard journal verify` makes it again here.

Secrets are cut out of a statement before it is written, at the places that PostgreSQL's own grammar gives:
the literal after PASSWORD, connection strings with a password, and every constant or parameter that is
compared with or assigned to a column whose name says that it holds a secret.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

import postgast

from sqlguard.errors import NotUnderstood
from sqlguard.statement.text import parse

#: The order in which an action's fields enter its hash. What is persisted stays: append, never reorder.
ACTION_FIELDS = (
    "id",
    "task_id",
    "role",
    "at",
    "agent",
    "agent_version",
    "policy",
    "policy_version",
    "idempotency_key",
    "reason",
    "confidence",
    "step",
    "kind",
    "tier",
    "verdict",
    "sqlstate",
    "rules",
    "tables",
    "statement",
    "executed",
    "params",
    "compensation",
    "via",
    "backend_pid",
    "client_addr",
)
EVENT_FIELDS = ("id", "action_id", "task_id", "at", "kind", "detail", "by")
EVENT_KINDS = frozenset(
    {
        "previewed",
        "approved",
        "started",
        "committed",
        "failed",
        "undone",
        "reconciled",
        "erased",
        "compensating",
        "compensated",
        "mitigated",
        "uncompensated",
    }
)
#: The previous hash of a chain's first entry.
GENESIS = b""


@dataclass(frozen=True, slots=True)
class Intent:
    """
    What is written down before a statement runs; the names are those of the table `sqlguard.action`.

    `task` may be None only on the task's own session; the task's agent, version and policy are always taken
    from the task itself, whatever is said here. `statement_hash` binds an idempotency key to one statement.
    """

    task: str | None = None
    role: str | None = None
    agent: str | None = None
    agent_version: str | None = None
    policy: str | None = None
    policy_version: int | None = None
    idempotency_key: str | None = None
    reason: str | None = None
    confidence: float | None = None
    step: str | None = None
    kind: str | None = None
    tier: str | None = None
    verdict: str = "allow"
    sqlstate: str | None = None
    rules: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    statement: str | None = None
    executed: str | None = None
    params: tuple[str | None, ...] | None = None
    compensation: str | None = None
    via: str | None = None
    backend_pid: int | None = None
    client_addr: str | None = None

    @property
    def statement_hash(self) -> str:
        """Tell whether a key is used for the very same thing again; taken before anything is redacted."""
        return statement_hash(self.statement or "", self.params)

    def as_record(self, secret_columns: frozenset[str] | None = None) -> dict[str, Any]:
        """Return the intent as the JSON that `sqlguard.record_intent` takes, without secrets."""
        record: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        names = SECRET_COLUMNS if secret_columns is None else secret_columns
        if self.statement is not None:
            clean = redact(self.statement, self.params, names)
            record |= {"statement": clean.text, "params": clean.params}
        if self.executed is not None:
            record["executed"] = redact(self.executed, None, names).text
        record["task_id"] = record.pop("task")
        record["statement_hash"] = self.statement_hash if self.idempotency_key else None
        return record


def statement_hash(statement: str, params: Sequence[str | None] | None) -> str:
    """Return a digest of a statement with its parameters (as text), for idempotency keys."""
    text = json.dumps([statement, None if params is None else list(params)], ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def chained(previous: bytes, values: Sequence[str | None]) -> bytes:
    """Return the hash of the entry with *values* (in the order of its FIELDS) that follows *previous*."""
    text = json.dumps(list(values), ensure_ascii=False, separators=(", ", ": "))
    return hashlib.sha256(previous + text.encode()).digest()


@dataclass(frozen=True, slots=True)
class Link:
    """
    One stored entry of a chain: its id, its values in the order of the FIELDS, and the stored hashes.

    `erased` is the hash of what is left of an entry that was erased in part, as the chain's own record of the
    erasure has it; the entry keeps the hash that it was written with, and the chain goes on with that.
    """

    id: int
    values: tuple[str | None, ...]
    prev_hash: bytes | None
    hash: bytes | None
    erased: bytes | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """How many entries a chain has, its last hash, and what its oldest kept entry follows."""

    entries: int
    last: bytes
    first: bytes = GENESIS


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a chain and where; `entry` is the id of the first entry that does not fit."""

    task: str
    chain: str
    entry: int | None
    problem: str

    def __str__(self) -> str:
        where = "its end" if self.entry is None else f"{self.chain} {self.entry}"
        return f"task `{self.task}` at {where}: {self.problem}"

    def as_dict(self) -> dict[str, object]:
        return {"task": self.task, "chain": self.chain, "entry": self.entry, "problem": self.problem}


def faults(task: str, chain: str, links: Iterable[Link], head: Head | None) -> list[Fault]:
    """
    Return every break of one chain, oldest first.

    An altered entry has a hash that is not its own; a removed, inserted or reordered one makes the entry
    after it point elsewhere; entries removed from the end are missed by the head.
    """
    found: list[Fault] = []
    previous = head.first if head else GENESIS
    count = 0
    for link in links:
        count += 1
        if link.prev_hash != previous:
            found.append(
                Fault(task, chain, link.id, "does not follow the entry before it: one was removed or moved")
            )
        if (link.erased or link.hash) != chained(link.prev_hash or GENESIS, link.values):
            found.append(Fault(task, chain, link.id, "was changed after it was written"))
        previous = link.hash or GENESIS
    if head is None:
        if count:
            found.append(Fault(task, chain, None, "the record of the chain's end is missing"))
    elif (count, previous) != (head.entries, head.last):
        problem = f"has {count} entries where {head.entries} were written"
        if count == head.entries:
            problem = "does not end with the entry that was written last"
        found.append(Fault(task, chain, None, problem))
    return found


# Secrets -----------------------------------------------------------------------------------------------------

#: Columns that hold secrets in any application; a caller adds those that a policy classes so.
SECRET_COLUMNS = frozenset(
    {
        "access_token",
        "api_key",
        "api_token",
        "client_secret",
        "passwd",
        "password",
        "password_hash",
        "private_key",
        "pwd",
        "refresh_token",
        "secret",
        "secret_key",
        "token",
    }
)
#: Functions that take a secret as an argument.
_SECRET_FUNCTIONS = frozenset(
    {"crypt", "dblink_connect", "encrypt", "decrypt", "hmac", "pgp_sym_encrypt", "pgp_sym_decrypt"}
)
REDACTED = "***"
_LITERAL = b"'***'"
_TOKEN = postgast.pg_query_pb2.Token
_STRINGS = frozenset({_TOKEN.Value("SCONST"), _TOKEN.Value("USCONST")})
_COMMENTS = frozenset({_TOKEN.Value("SQL_COMMENT"), _TOKEN.Value("C_COMMENT")})
_PASSWORD = _TOKEN.Value("PASSWORD")


@dataclass(frozen=True, slots=True)
class Redacted:
    text: str
    params: tuple[str | None, ...] | None


@dataclass
class _Found:
    """Byte offsets where secret constants begin, and numbers of secret parameters."""

    constants: set[int] = field(default_factory=set)
    params: set[int] = field(default_factory=set)


def redact(
    text: str, params: Sequence[str | None] | None, secret_columns: frozenset[str] = SECRET_COLUMNS
) -> Redacted:
    """
    Return *text* and *params* without the secrets in them.

    A text that can't be read loses all its string constants when there is a sign of a secret in it, and is
    left out when not even its words can be told apart.
    """
    given = None if params is None else tuple(params)
    if not _suspicious(text, secret_columns):
        return Redacted(text, given)
    raw = text.encode("utf-8", "replace")
    try:
        tokens = [t for t in postgast.scan(raw.decode()).tokens if t.token not in _COMMENTS]
    except postgast.PgQueryError:
        return Redacted(f"(a text of {len(raw)} bytes that can't be read)", _hidden(given))
    found = _Found()
    try:
        for statement in parse(text):
            _visit(statement.tree, secret_columns, found)
    except NotUnderstood:
        return Redacted(_cut(raw, [(t.start, t.end) for t in tokens if t.token in _STRINGS]), _hidden(given))
    spans = []
    for before, token in zip([None, *tokens], tokens, strict=False):
        literal = token.token in _STRINGS
        after_password = literal and before is not None and before.token == _PASSWORD
        if token.start in found.constants or after_password or (literal and _connects(raw, token)):
            spans.append((token.start, token.end))
    kept = given and tuple(
        REDACTED if n in found.params and v is not None else v for n, v in enumerate(given, 1)
    )
    return Redacted(_cut(raw, spans), kept)


def _suspicious(text: str, secret_columns: frozenset[str]) -> bool:
    """Tell, without reading the text, whether it is worth reading; a name can also be written as U&"…"."""
    folded = text.lower()
    signs = ("password", "://", "u&", *secret_columns, *_SECRET_FUNCTIONS)
    return any(sign in folded for sign in signs)


def _hidden(params: tuple[str | None, ...] | None) -> tuple[str | None, ...] | None:
    return params and tuple(None if value is None else REDACTED for value in params)


def _cut(raw: bytes, spans: Sequence[tuple[int, int]]) -> str:
    parts: list[bytes] = []
    end = 0
    for start, stop in spans:
        parts += [raw[end:start], _LITERAL]
        end = stop
    return b"".join([*parts, raw[end:]]).decode()


def _connects(raw: bytes, token: Any) -> bool:
    """Tell whether a string constant is a connection string with a password in it."""
    value = raw[token.start : token.end].decode().strip("'")
    if any(word.lower().startswith("password=") for word in value.replace(" = ", "=").split()):
        return True
    try:
        return "://" in value and bool(urlsplit(value).password)
    except ValueError:
        return True


def _visit(node: Any, secret: frozenset[str], found: _Found) -> None:
    if isinstance(node, list):
        for item in node:
            _visit(item, secret, found)
        return
    if not isinstance(node, dict):
        return
    for kind, body in node.items():
        for part in _secret_parts(kind, body, secret):
            _collect(part, found)
        _visit(body, secret, found)


def _secret_parts(kind: str, body: Any, secret: frozenset[str]) -> Iterator[Any]:
    """Yield the parts of a node whose constants are secrets."""
    if not isinstance(body, dict):
        return
    match kind:
        case "ResTarget" if body.get("name", "").lower() in secret:
            yield body.get("val")
        case "InsertStmt":
            yield from _inserted(body.get("cols", []), body.get("selectStmt", {}), secret)
        case "MergeWhenClause":
            for target, value in zip(body.get("targetList", []), body.get("values", []), strict=False):
                if _name(target) in secret:
                    yield value
        case "A_Expr" if any(_is_column(body.get(side), secret) for side in ("lexpr", "rexpr")):
            yield body
        case "FuncCall" if _last(body.get("funcname", [])) in _SECRET_FUNCTIONS:
            yield body.get("args")


def _inserted(columns: list[Any], source: Any, secret: frozenset[str]) -> Iterator[Any]:
    select = source.get("SelectStmt", {})
    for position, column in enumerate(columns):
        if _name(column) not in secret:
            continue
        rows = [values.get("List", {}).get("items", []) for values in select.get("valuesLists", [])]
        for row in [*rows, select.get("targetList", [])]:
            yield from row[position : position + 1]


def _name(target: Any) -> str:
    return str(target.get("ResTarget", {}).get("name", "")).lower()


def _is_column(node: Any, secret: frozenset[str]) -> bool:
    column = node.get("ColumnRef") if isinstance(node, dict) else None
    return column is not None and _last(column.get("fields", [])) in secret


def _last(names: list[Any]) -> str:
    return str(names[-1].get("String", {}).get("sval", "")).lower() if names else ""


def _collect(node: Any, found: _Found) -> None:
    if isinstance(node, list):
        for item in node:
            _collect(item, found)
    elif isinstance(node, dict):
        for kind, body in node.items():
            if kind == "A_Const" and "location" in body:
                found.constants.add(body["location"])
            elif kind == "ParamRef":
                found.params.add(body.get("number", 0))
            _collect(body, found)
