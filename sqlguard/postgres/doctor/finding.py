"""What the doctor finds, and how a check is written down: one query per kind of finding, where one will do."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, LiteralString

import psycopg

Connection = psycopg.Connection[Any]


class Severity(IntEnum):
    """broken: a wall does not hold. open: there is a way around one. note: to know, or to make better."""

    NOTE = 0
    OPEN = 1
    BROKEN = 2

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """
    `sql` mends it in this database (as the owner, or as who *message* says), `command` is run in a shell.

    `table` is the oid of the table that it is about, None when it concerns all.
    """

    code: str
    severity: Severity
    wall: str
    object: str
    message: str
    sql: str | None = None
    command: str | None = None
    table: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "severity": str(self.severity),
            "wall": self.wall,
            "object": self.object,
            "message": self.message,
            "sql": self.sql,
            "command": self.command,
        }


@dataclass(frozen=True, slots=True)
class Check:
    """
    A kind of finding as a query whose rows are `object`, and where they apply `sql`, `command`, `relid`, `more`.

    *message* may speak of `{object}` and `{more}`. *needs* is a condition that must hold for the query to be asked.
    """

    code: str
    severity: Severity
    wall: str
    message: str
    query: LiteralString
    needs: LiteralString | None = None

    def run(self, conn: Connection) -> Iterator[Finding]:
        if self.needs is not None and conn.execute(f"SELECT {self.needs}").fetchone() != (True,):
            return
        cursor = conn.execute(self.query)
        names = [column.name for column in cursor.description or ()]
        for row in cursor.fetchall():
            yield self._finding(dict(zip(names, row, strict=True)))

    def _finding(self, row: Mapping[str, Any]) -> Finding:
        return Finding(
            self.code,
            self.severity,
            self.wall,
            str(row["object"]),
            self.message.format(object=row["object"], more=row.get("more")),
            sql=row.get("sql"),
            command=row.get("command"),
            table=row.get("relid"),
        )
