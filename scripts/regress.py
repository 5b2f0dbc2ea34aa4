"""
Does the guard let PostgreSQL's own regression suite read? Counts, for each reason, the SELECTs that it refuses.

`python scripts/regress.py FOLDER [--pg VERSION] [--only NAME…] [--seconds N] [--refusals FILE]`

FOLDER holds the suite's `*.sql` files. Each file is played on a server of ours as psql would play it, as far as that
goes without the suite's data files and C library. Every SELECT that runs in a READ ONLY transaction at its place in the
file is judged by the gate, with the catalog, search_path and temporary tables of that moment and a policy that lets
everything be read. What is refused then has to be refused for a reason that the documentation names.
"""

import argparse
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psql_script import Piece, pieces
from psycopg.pq import ExecStatus, TransactionStatus

from sqlguard.catalog import Catalog
from sqlguard.embedded import EmbeddedServer
from sqlguard.embedded.binaries import require_bindir
from sqlguard.errors import NotUnderstood
from sqlguard.gate import Gate
from sqlguard.plan import Decision
from sqlguard.policy import parse_policy
from sqlguard.policy.context import Context
from sqlguard.policy.verdict import Effect
from sqlguard.postgres.catalog_reader import read_catalog
from sqlguard.statement.model import Session
from sqlguard.statement.text import parse

POLICY = """
name = "regress"
[tables."*.*"]
select = true
update = true
"""
SETTINGS = {
    "fsync": "off",
    "autovacuum": "off",
    "max_prepared_transactions": "4",
    "statement_timeout": "4s",
    "lock_timeout": "1s",
    "max_stack_depth": "1MB",
}
#: Others play before these: they make what many files use.
FIRST = (
    "test_setup",
    "create_function_c",
    "create_misc",
    "create_operator",
    "create_procedure",
    "create_index",
)
#: After these the catalog and the temporary tables are as before.
QUIET = frozenset(
    {
        "SelectStmt",
        "InsertStmt",
        "UpdateStmt",
        "DeleteStmt",
        "MergeStmt",
        "VariableSetStmt",
        "VariableShowStmt",
        "ExplainStmt",
        "CopyStmt",
        "FetchStmt",
        "ClosePortalStmt",
        "DeclareCursorStmt",
        "PrepareStmt",
        "DeallocateStmt",
    }
)
_DONE = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK, ExecStatus.EMPTY_QUERY)
_TEMPORARY = """
SELECT c.relname, pg_catalog.array_agg(a.attname::text ORDER BY a.attnum) FILTER (WHERE a.attname IS NOT NULL)
  FROM pg_catalog.pg_class c
  LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
 WHERE c.relnamespace = pg_catalog.pg_my_temp_schema() AND c.relkind IN ('r', 'v', 'p', 'm', 'f', 'c')
 GROUP BY c.relname
"""


@dataclass
class Tally:
    """What was counted."""

    statements: int = 0
    selects: int = 0
    allowed: int = 0
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    refusals: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, file: str, decision: Decision) -> bool:
        self.selects += 1
        finding = decision.verdict.decisive
        if decision.verdict.effect <= Effect.REWRITE or finding is None:
            self.allowed += 1
            return True
        reason = re.sub(r"`[^`]*`", "…", finding.message)
        self.reasons[finding.rule, reason] += 1
        self.refusals.append((f"{finding.rule}: {finding.message}", file, decision.statement.text))
        return False


@dataclass
class Player:
    """One session that plays a file; what it says to the server is what psql would say."""

    conn: psycopg.Connection[Any]
    tally: Tally
    _gate: Gate | None = None
    _temporary: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def play(self, file: Path, until: float) -> None:
        for piece in pieces(file.read_text(encoding="utf-8", errors="replace")):
            if time.monotonic() > until or self.conn.closed:
                return
            self._one(file.stem, piece)

    def _one(self, file: str, piece: Piece) -> None:
        self.tally.statements += 1
        try:
            kinds = {next(iter(p.tree)) for p in parse(piece.text)}
        except NotUnderstood:
            kinds = {"unknown"}
        if kinds == {"SelectStmt"} and self._reads_only(piece.text):
            decision = self._decide(piece.text)
            if decision is None or self.tally.add(file, decision):
                return
        self._send(piece.text, piece.data)
        if not kinds <= QUIET or " into " in piece.text.lower():
            self._gate = None

    def _send(self, text: str, data: str = "") -> bool:
        """Run *text*; say whether it went without an error."""
        result = self.conn.pgconn.exec_(text.encode())
        if result.status == ExecStatus.COPY_IN:
            self.conn.pgconn.put_copy_data(data.encode())
            self.conn.pgconn.put_copy_end()
        if result.status == ExecStatus.COPY_OUT:
            while self.conn.pgconn.get_copy_data(0)[0] > 0:
                pass
        while (last := self.conn.pgconn.get_result()) is not None:
            result = last
        return result.status in _DONE

    def _reads_only(self, text: str) -> bool:
        begin: tuple[str, ...]
        end: tuple[str, ...]
        match self.conn.info.transaction_status:
            case TransactionStatus.IDLE:
                begin, end = ("BEGIN READ ONLY",), ("ROLLBACK",)
            case TransactionStatus.INTRANS:
                begin = ("SAVEPOINT probe", "SET LOCAL transaction_read_only = on")
                end = ("ROLLBACK TO probe", "RELEASE probe")
            case _:
                return False
        for command in begin:
            self._send(command)
        went = self._send(text)
        for command in end:
            self._send(command)
        return went

    def _decide(self, text: str) -> Decision | None:
        """Return the gate's decision, None when the catalog can't be read at this point."""
        try:
            gate = self._gate = self._gate or self._look()
            found = self.conn.execute("SELECT pg_catalog.current_schemas(false)::text[]").fetchall()
        except psycopg.Error:
            return None
        session = Session(search_path=tuple(found[0][0]), temporary=self._temporary)
        (decision,) = gate.decide(text, session)
        return decision

    def _look(self) -> Gate:
        if self.conn.info.transaction_status == TransactionStatus.INTRANS:
            with self.conn.transaction(force_rollback=True):
                catalog = self._catalog()
        else:
            catalog = self._catalog()
        return Gate(Context(catalog, parse_policy(POLICY, "regress.toml"), None))

    def _catalog(self) -> Catalog:
        found = self.conn.execute(_TEMPORARY).fetchall()
        self._temporary = {name: tuple(columns or ()) for name, columns in found}
        return read_catalog(self.conn)


def ordered(folder: Path, only: list[str] | None) -> Iterator[Path]:
    """Yield the files: what makes the tables first, what drops much last in the order of the alphabet."""
    files = {path.stem: path for path in sorted(folder.glob("*.sql"))}
    for name in [*(n for n in FIRST if n in files), *(n for n in files if n not in FIRST)]:
        if not only or name in FIRST or name in only:
            yield files[name]


def main() -> None:
    parser = argparse.ArgumentParser(description="Judge the SELECTs of PostgreSQL's regression suite.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pg", type=int, help="version of PostgreSQL; default: what is found first")
    parser.add_argument("--only", action="append", metavar="NAME", help="one file; may be repeated")
    parser.add_argument("--seconds", type=float, default=1800, help="stop after so long")
    parser.add_argument("--refusals", type=Path, metavar="FILE", help="write what was refused there")
    given = parser.parse_args()
    tally, until = Tally(), time.monotonic() + given.seconds
    server = EmbeddedServer.start(require_bindir(given.pg), settings=SETTINGS)
    try:
        _send_all(server, ["CREATE DATABASE regression TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"])
        for file in ordered(given.folder, given.only):
            with psycopg.connect(server.dsn("regression"), autocommit=True) as conn:
                Player(conn, tally).play(file, until)
        version = server.version
    finally:
        server.stop()
    show(tally, version)
    if given.refusals is not None:
        lines = [f"-- {why}\n-- in {file}\n{text};\n" for why, file, text in tally.refusals]
        given.refusals.write_text("\n".join(lines), encoding="utf-8")


def _send_all(server: EmbeddedServer, commands: list[str]) -> None:
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        for command in commands:
            conn.execute(command)


def show(tally: Tally, version: object) -> None:
    print(f"PostgreSQL {version}: {tally.statements} statements, {tally.selects} SELECTs that only read")
    print(f"{tally.allowed:6} allowed")
    for (rule, reason), number in tally.reasons.most_common():
        print(f"{number:6} {rule}: {reason}")


if __name__ == "__main__":
    main()
