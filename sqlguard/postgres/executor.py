"""
Carries out decisions on a psycopg connection that is logged in as a task's own role.

The order is fixed: intent committed through the journal's own connection, then the write in a transaction of
its own, then the outcome. A preview is the same run, rolled back, with deferred constraints forced first
(STYLE rule 8); what a roll-back does not take back is on the page `docs/previews.md`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

from sqlguard import gate
from sqlguard.annotation import Annotation
from sqlguard.errors import Refused, SqlguardError
from sqlguard.journal import Intent
from sqlguard.plan import Affected, Decision, Outcome
from sqlguard.postgres import idempotency
from sqlguard.statement.model import Kind

Params = Sequence[Any] | Mapping[str, Any] | None
#: psycopg's own placeholder rule is textual (it knows no grammar), so a regular expression is exact here.
_PLACEHOLDER = re.compile(r"%(?:\((?P<name>[^)]+)\)(?P<named>[sbt])|(?P<plain>[sbt%]))")


def number_placeholders(text: str, params: Params) -> tuple[str, list[Any] | None]:
    """
    Turn psycopg's `%s` and `%(name)s` into `$1`, `$2` …, so that PostgreSQL's grammar can judge the text.

    Without parameters the text is left alone, as psycopg does.
    """
    if params is None:
        return text, None
    if not _PLACEHOLDER.search(text):
        return text, list(params.values() if isinstance(params, Mapping) else params)
    values: list[Any] = []
    numbers: dict[str, int] = {}

    def place(match: re.Match[str]) -> str:
        if match["plain"] == "%":
            return "%"
        name = match["name"]
        if name is None:
            assert not isinstance(params, Mapping)  # noqa: S101 (psycopg's own rule: no mixing)
            values.append(params[len(values)])
            return f"${len(values)}"
        assert isinstance(params, Mapping)  # noqa: S101
        if name not in numbers:
            values.append(params[name])
            numbers[name] = len(values)
        return f"${numbers[name]}"

    try:
        numbered = _PLACEHOLDER.sub(place, text)
    except (IndexError, KeyError, AssertionError) as fault:
        raise psycopg.ProgrammingError("the parameters do not fit the placeholders") from fault
    if not values:
        # Nothing but `%%`: the parameters are numbered already.
        values = list(params.values() if isinstance(params, Mapping) else params)
    return numbered, values


@dataclass
class Executor:
    """
    `record` commits one intent and returns its action id; it must raise when it can't, and then nothing runs.

    *settled* is told how each action ended (`committed`, `failed`, `previewed`) with details for the journal.
    """

    connection: psycopg.Connection[Any]
    record: Callable[[Intent], int]
    settled: Callable[[int, str, Mapping[str, Any]], None]

    @property
    def in_transaction(self) -> bool:
        return self.connection.info.transaction_status != TransactionStatus.IDLE

    def run(
        self,
        decision: Decision,
        params: list[Any] | None,
        annotation: Annotation,
        *,
        dry_run: bool = False,
    ) -> Outcome:
        """Carry out *decision*; raises psycopg's errors untouched."""
        if not decision.is_write:
            return self._plain(decision, params)
        intent = gate.intent(decision, params, annotation, via="preview" if dry_run else "connection")
        action = self.record(intent)
        try:
            outcome, details = self._write(decision, params, intent, action, dry_run=dry_run)
        except (psycopg.Error, SqlguardError) as fault:
            self.settled(action, "failed", {"sqlstate": fault.sqlstate})
            raise
        if dry_run:
            self.settled(action, "previewed", details)
        elif not self.in_transaction:
            self.settled(action, "committed", details)
        return outcome

    def _plain(self, decision: Decision, params: list[Any] | None) -> Outcome:
        text = gate.begin_text(decision) if decision.kind is Kind.BEGIN else decision.text
        if decision.needs_read_write and not self.in_transaction:
            with self.connection.transaction():
                self.connection.execute("SET TRANSACTION READ WRITE")
                return self._answer(decision, text, params)
        return self._answer(decision, text, params)

    def _answer(self, decision: Decision, text: str, params: list[Any] | None) -> Outcome:
        with self._cursor() as cursor:
            cursor.execute(text, params)
            return outcome_of(decision, cursor)

    def _write(
        self, decision: Decision, params: list[Any] | None, intent: Intent, action: int, *, dry_run: bool
    ) -> tuple[Outcome, dict[str, Any]]:
        """Return the outcome, and what the journal is to know of it."""
        own = not self.in_transaction
        savepoint = sql.Identifier("sqlguard_preview")
        if own:
            self.connection.execute("BEGIN READ WRITE")
        elif dry_run:
            self.connection.execute(sql.SQL("SAVEPOINT {}").format(savepoint))
        details: dict[str, Any] = {}
        try:
            self.connection.execute(
                "SELECT pg_catalog.set_config('sqlguard.action', %s, true)", [str(action)]
            )
            kept = None if dry_run else self._claim(intent, action)
            if kept is None:
                outcome = self._carry_out(decision, params, intent, dry_run=dry_run)
            else:
                outcome = self._repeat(decision, kept)
                details["repeats"] = kept.action
            affected = self._affected(action)
        except BaseException:
            if own:
                self.connection.execute("ROLLBACK")
            raise
        if dry_run and not own:
            self.connection.execute(sql.SQL("ROLLBACK TO {}").format(savepoint))
        elif own:
            self.connection.execute("ROLLBACK" if dry_run else "COMMIT")
        done = replace(
            outcome,
            affected=affected,
            action=action,
            tier=decision.verdict.tier,
            committed=own and not dry_run,
        )
        return done, {**details, "tag": done.tag, "affected": [a.as_dict() for a in affected]}

    def _carry_out(
        self, decision: Decision, params: list[Any] | None, intent: Intent, *, dry_run: bool
    ) -> Outcome:
        with self._cursor() as cursor:
            cursor.execute(decision.text, params)
            columns, rows = idempotency.described(cursor) if intent.idempotency_key else (None, None)
            outcome = outcome_of(decision, cursor)
        if dry_run:
            self.connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
        elif intent.idempotency_key:
            idempotency.keep(self.connection, intent.idempotency_key, outcome.tag or "", columns, rows)
        return outcome

    def _claim(self, intent: Intent, action: int) -> idempotency.Kept | None:
        if not intent.idempotency_key:
            return None
        return idempotency.claim(self.connection, intent.idempotency_key, intent.statement_hash, action)

    def _repeat(self, decision: Decision, kept: idempotency.Kept) -> Outcome:
        """Answer with what was kept; raises Refused when the write was done and its answer is lost."""
        if kept.tag is None:
            raise Refused(
                f"this write was done before, by action {kept.action}, and its answer was not kept",
                hint="look at the rows it changed; a new idempotency key would do it again",
            )
        columns, rows = idempotency.loaded(self.connection, kept)
        count = kept.tag.split(" ")[-1]
        return Outcome(
            verdict=str(decision.verdict.effect),
            tag=kept.tag,
            rowcount=int(count) if count.isdigit() else 0,
            columns=columns,
            rows=rows,
            statement=decision.statement.text,
            executed=decision.text,
        )

    def _affected(self, action: int) -> tuple[Affected, ...]:
        found = self.connection.execute(
            "SELECT schema_name, table_name, op, sum(rows)::bigint FROM sqlguard.transaction_changes()"
            " WHERE action_id = %s GROUP BY 1, 2, 3 ORDER BY 1, 2, 3",
            [action],
        ).fetchall()
        return tuple(Affected(f"{schema}.{name}", op, rows) for schema, name, op, rows in found)

    def _cursor(self) -> psycopg.RawCursor[Any]:
        return psycopg.RawCursor(self.connection)


def outcome_of(decision: Decision, cursor: psycopg.Cursor[Any]) -> Outcome:
    """Read what the server answered, with the command tag that the client must see."""
    tag = cursor.statusmessage
    if tag and decision.tag:
        tag = " ".join([decision.tag, *tag.split(" ")[1:]])
    columns = tuple(c.name for c in cursor.description) if cursor.description else ()
    rows = tuple(tuple(row) for row in cursor.fetchall()) if cursor.description else ()
    return Outcome(
        verdict=str(decision.verdict.effect),
        tag=tag,
        rowcount=max(cursor.rowcount, 0),
        columns=columns,
        rows=rows,
        tier=decision.verdict.tier,
        committed=True,
        statement=decision.statement.text,
        executed=decision.text,
    )
