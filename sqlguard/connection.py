"""
The Python door: a guarded connection for an agent's own code, on the same path as the proxy.

    with sqlguard.connect(dsn, task=task_id) as db:
        db.preview("DELETE FROM orders WHERE id = %s", [7]).affected
        db.execute("DELETE FROM orders WHERE id = %s", [7], reason="duplicate order")
        db.undo()

*dsn* may be the task's own DSN (through the proxy or straight to PostgreSQL), or the operator's together
with a task id: then a further login role of that task is made for this connection and ends with it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg.conninfo import make_conninfo

from sqlguard import gate as gates
from sqlguard.annotation import Annotation, given, read
from sqlguard.budget import ResultLimits, Slice, statements
from sqlguard.errors import ApprovalRequired, Drift, NotConfigured, Refused, SqlguardError, TaskEnded
from sqlguard.gate import Gate
from sqlguard.journal import Intent
from sqlguard.plan import Decision, Outcome
from sqlguard.policy.context import Context
from sqlguard.postgres import compensate, control, journal, plan_values, plans, tasks, text_values
from sqlguard.postgres.budgets import lease_statements
from sqlguard.postgres.catalog_reader import catalog_version, read_catalog
from sqlguard.postgres.connect import connect as connect_to
from sqlguard.postgres.executor import Executor, Params, number_placeholders
from sqlguard.postgres.placeholders import parameter_types
from sqlguard.postgres.plan_run import Planner
from sqlguard.postgres.undo_plan import Scope
from sqlguard.postgres.undo_report import UndoReport
from sqlguard.statement.model import Kind, Session, Statement
from sqlguard.statement.walk import SETTER
from sqlguard.steps import Tools

#: The proxy reports this parameter at start-up, so that a text is never rewritten twice.
PROXY_PARAMETER = b"sqlguard_proxy"
_CANCEL_SECONDS = 5.0
#: A preview, which is rolled back, looks at most so often whether the catalog has changed.
_LOOK_SECONDS = 1.0


class GuardedConnection:
    """One session of a task. Not thread-safe, like any database session; close it or use `with`."""

    def __init__(
        self, work: psycopg.Connection[Any], ledger: psycopg.Connection[Any], login: control.Login
    ) -> None:
        self._work = work
        self._ledger = ledger
        self._login = login
        self._lease: str | None = None
        self._session = Session(search_path=login.policy.defaults.search_path)
        self._looked_at = monotonic()
        self._gate = Gate(Context(read_catalog(ledger), login.policy, login.task))
        plan_values.register(work)
        planner = Planner(
            work,
            ledger,
            login.role,
            login.policy,
            lambda: self._session.search_path,
            plan_only=login.task.plan_only or login.policy.defaults.plan_only,
        )
        reads = login.policy.defaults.reads
        limits = ResultLimits(reads.max_result_rows, reads.max_result_bytes)
        self._executor = Executor(work, self._record, self._settled, planner, limits=limits)
        self._open_actions: list[int] = []
        self._slice = Slice()

    @property
    def task(self) -> str:
        return self._login.task.id

    @property
    def role(self) -> str:
        return self._login.role

    @property
    def can_undo(self) -> bool:
        """Whether the operator's connection is behind this one; a task's own may not undo."""
        return self._lease is not None

    @property
    def closed(self) -> bool:
        """Whether PostgreSQL, or `close`, has ended the session."""
        return bool(self._work.closed or self._ledger.closed)

    @property
    def context(self) -> Context:
        """What statements are judged by just now: catalog, policy and task."""
        self._refresh()
        return self._gate.context

    def decide(self, sql: str) -> tuple[Decision, ...]:
        """Judge *sql*, with `$1` for parameters, and run nothing; one Decision per statement."""
        self._refresh()
        return self._gate.decide(sql, self._session)

    def cancel(self) -> None:
        """Ask PostgreSQL to stop the statement that runs just now; may be called from another thread."""
        self._work.cancel_safe(timeout=_CANCEL_SECONDS)

    def load_as_text(self) -> None:
        """From now on read values that Python's own types can't all hold (dates, intervals, ranges) as text."""
        text_values.register(self._work)

    def execute(  # noqa: PLR0913 (the contract's arguments)
        self,
        sql: str,
        params: Params = None,
        *,
        reason: str | None = None,
        confidence: float | None = None,
        idempotency_key: str | None = None,
        step: str | None = None,
        dry_run: bool = False,
        max_rows: int | None = None,
    ) -> Outcome:
        """
        Judge *sql* (one statement, psycopg placeholders) and carry it out; `dry_run` rolls it back again.

        Of what a read shows only *max_rows* are kept, one at a time; `rowcount` has how many there were.
        Raises the errors of `sqlguard.errors` when it is not let through, psycopg's when PostgreSQL fails.
        """
        text, values = number_placeholders(sql, params)
        said = read(text).merged(given(reason, confidence, idempotency_key, step))
        decisions = self._judged(text, values, dry_run=dry_run)
        self._spend(text, statements(decisions), said)
        refused = gates.first_refused(decisions) or _without_data(decisions) or _ours(decisions)
        if refused is not None:
            self._journal_refusal(refused, values, said)
            raise gates.error(refused)
        if len(decisions) > 1 and values:
            raise psycopg.ProgrammingError("parameters go with one statement, not with several")
        outcome = Outcome(verdict="allow")
        for decision in decisions:
            outcome = self._one(decision, values, said, dry_run=dry_run, most=max_rows)
        return outcome

    def preview(self, sql: str, params: Params = None, **said: Any) -> Outcome:
        """Run *sql*, report the rows it would change, table by table, and roll it back."""
        return self.execute(sql, params, dry_run=True, **said)

    def commit_plan(self, plan: int) -> Outcome:
        """
        Run *plan*, which a person has approved, and commit it if it still changes the very same rows.

        Raises ApprovalRequired when it is not approved (yet), Drift with a fresh plan when rows have changed,
        Refused when it is not this agent's.
        """
        statements, is_block = plans.statements(self._work, plan)
        self._refresh()
        again: list[tuple[Decision, list[Any] | None]] = []
        for statement in statements:
            values = plan_values.load(statement["values"])
            decided = self._decide(statement["statement"], values)
            if (stopped := gates.first_refused(decided)) is not None:
                raise gates.error(stopped)
            again += [(d, values) for d in decided]
        with journal.translated():
            return self._executor.commit_plan(plan, again, is_block=is_block)

    def ticket(self, plan: int) -> plans.Plan:
        """Return *plan* and its state, as this task's agent may see it. Raises Refused if it has no such plan."""
        return plans.show(self._work, plan)

    def undo(
        self, *, action: int | None = None, preview: bool = False, tools: Tools | None = None
    ) -> UndoReport:
        """
        Undo this task's work, or one action of it; *tools* knows the compensations of steps that are not SQL.

        A step that waits is in the report's notes, and what is older than it is as it was.
        Needs the operator's connection: raises NotConfigured when this one was opened with the task's own DSN.
        """
        if self._lease is None:
            raise NotConfigured(
                "an undo needs the operator's rights",
                hint="run `sqlguard undo` or connect with the operator's DSN",
            )
        if action is not None and journal.show_action(self._ledger, action).action.task_id != self.task:
            # An action's number is easily guessed; another task's work is its operator's to undo.
            raise Refused(f"action {action} is not of this task", hint="name an action of this task")
        scope: Mapping[str, Any] = {"task": self.task} if action is None else {"action": action}
        return compensate.undo(self._ledger, Scope(**scope), tools=tools, preview=preview).rows

    def close(self) -> None:
        """Close the session; a login role made for it ends with it."""
        self._work.close()
        with suppress(psycopg.Error):
            if self._lease is not None:
                tasks.end_lease(self._ledger, self._lease)
        self._ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _one(
        self,
        decision: Decision,
        values: list[Any] | None,
        said: Annotation,
        *,
        dry_run: bool,
        most: int | None,
    ) -> Outcome:
        in_block = self._executor.in_transaction
        with journal.translated():  # what the table walls raise is of our tree too
            try:
                outcome = self._executor.run(decision, values, said, dry_run=dry_run, most=most)
            except (ApprovalRequired, Drift):
                if not self._executor.in_transaction:
                    for action in self._open_actions:
                        self._settled(action, "previewed", {})
                    self._open_actions.clear()
                raise
        if not (dry_run and decision.is_write):
            # A dry run takes back nothing but writes.
            self._session = gates.advance(self._session, decision)
        if in_block and outcome.action is not None and not dry_run:
            self._open_actions.append(outcome.action)
        if decision.kind in (Kind.COMMIT, Kind.ROLLBACK) and not self._executor.in_transaction:
            committed = outcome.tag == "COMMIT"
            detail = {"tag": outcome.tag} | ({} if committed else {"reason": "rolled back"})
            for action in self._open_actions:
                self._settled(action, "committed" if committed else "failed", detail)
            self._open_actions.clear()
        return outcome

    def _spend(self, text: str, number: int, said: Annotation) -> None:
        if self._login.policy.budgets.statements_per_minute is None:
            return
        now = monotonic()
        try:
            if not self._slice.spend(number, now):
                task = None if self._lease is None else self.task
                most = self._slice.asks(number, now)
                self._slice.take(lease_statements(self._ledger, task, number, most), number, now)
        except SqlguardError as fault:
            self._journal_refusal(gates.refusal(text, fault), None, said)
            raise

    def _decide(self, text: str, values: list[Any] | None) -> tuple[Decision, ...]:
        # Only users' types matter (Gate.decide); where there are none, no value is written down twice.
        types = parameter_types(self._work, values) if self._gate.context.catalog.types else ()
        return self._gate.decide(text, self._session, types)

    def _judged(self, text: str, values: list[Any] | None, *, dry_run: bool) -> tuple[Decision, ...]:
        """Decide by the catalog as it is; of a preview one up to a second old may say yes, but not no."""
        if dry_run and monotonic() - self._looked_at < _LOOK_SECONDS:
            decisions = self._decide(text, values)
            if gates.first_refused(decisions) is None and all(d.is_write for d in decisions):
                return decisions
        self._refresh()
        return self._decide(text, values)

    def _refresh(self) -> None:
        self._looked_at = monotonic()
        if catalog_version(self._ledger) != self._gate.context.catalog.version:
            context = self._gate.context
            self._gate = Gate(Context(read_catalog(self._ledger), context.policy, context.task))

    def _record(self, intent: Intent) -> int:
        return journal.record_intent(self._ledger, self._login.complete(intent, self._work.info.backend_pid))

    def _settled(self, action: int, kind: str, detail: Mapping[str, Any]) -> None:
        # The row changes are the evidence; an event that could not be written is reconciled later.
        with suppress(psycopg.Error):
            journal.record_event(self._ledger, action, kind, detail)

    def _journal_refusal(self, refused: Decision, values: list[Any] | None, said: Annotation) -> None:
        with suppress(psycopg.Error):
            self._record(gates.intent(refused, values, said, via="connection"))


def _without_data(decisions: Sequence[Decision]) -> Decision | None:
    """Return the refusal of a COPY, for whose data neither `execute` nor its outcome has a place."""
    found = next((d for d in decisions if d.kind in (Kind.COPY_IN, Kind.COPY_OUT)), None)
    if found is None:
        return None
    words, instead = (
        ("FROM STDIN", "INSERT several rows") if found.kind is Kind.COPY_IN else ("TO STDOUT", "SELECT")
    )
    fault = Refused(
        f"COPY … {words} needs a stream of data, which there is not here",
        hint=f"connect through the proxy and use psycopg's cursor.copy(), or {instead}",
    )
    return gates.refusal(found.statement.text, fault, found.statement)


def _ours(decisions: Sequence[Decision]) -> Decision | None:
    """Return the refusal of a setting of ours: nothing follows it here, so a dry run would not be one."""
    found = next((d for d in decisions if any(n.startswith("sqlguard.") for n in _set(d.statement))), None)
    if found is None:
        return None
    fault = Refused(
        "settings of a task are the proxy's",
        hint="use the arguments of `execute`: dry_run, reason, confidence, idempotency_key, step",
    )
    return gates.refusal(found.statement.text, fault, found.statement)


def _set(statement: Statement) -> Iterator[str]:
    """Yield the names of the settings that *statement* sets."""
    if statement.kind is Kind.SET:
        yield statement.subject or ""
    for call in statement.calls:
        if call.name == SETTER and call.values:
            yield str(call.values[0]).lower()


def connect(dsn: str, *, task: str | None = None) -> GuardedConnection:
    """
    Open a guarded connection for *task*; without it, *dsn* must be the task's own.

    Raises DatabaseUnavailable, NotConfigured, TaskEnded.
    """
    ledger = connect_to(dsn)
    try:
        _not_through_the_proxy(ledger)
        return _as_task(ledger, dsn) if control.current_login(ledger) else _as_operator(ledger, dsn, task)
    except BaseException:
        ledger.close()
        raise


def _not_through_the_proxy(ledger: psycopg.Connection[Any]) -> None:
    if ledger.pgconn.parameter_status(PROXY_PARAMETER):
        raise NotConfigured(
            "this DSN goes through the proxy, which guards it already",
            hint="use it with psycopg as it is, or give `direct_dsn` here",
        )


def _as_task(ledger: psycopg.Connection[Any], dsn: str) -> GuardedConnection:
    login = control.current_login(ledger)
    assert login is not None  # noqa: S101 (the caller has looked)
    return GuardedConnection(_work_session(dsn, login), ledger, login)


def _as_operator(ledger: psycopg.Connection[Any], dsn: str, task: str | None) -> GuardedConnection:
    if task is None:
        raise NotConfigured("no task was named", hint="open one with `sqlguard task open` and give its id")
    role, password = tasks.add_lease(ledger, task, "connection")
    try:
        login = _living(ledger, role, task)
        work = _work_session(make_conninfo(dsn, user=role, password=password), login)
        made = GuardedConnection(work, ledger, login)
    except BaseException:
        tasks.end_lease(ledger, role)
        raise
    made._lease = role  # noqa: SLF001 (this module makes it)
    return made


def _living(ledger: psycopg.Connection[Any], role: str, task: str) -> control.Login:
    login = control.read_login(ledger, role)
    if login is None:
        raise TaskEnded(f"task `{task}` has ended")
    return login


def _work_session(dsn: str, login: control.Login) -> psycopg.Connection[Any]:
    name = f"sqlguard:{login.task.agent}"[:63]
    work = connect_to(make_conninfo(dsn, application_name=name))
    # What psycopg prepares by itself has names, which the agent could give to another statement.
    work.prepare_threshold = None
    # A read outside a transaction block is run READ ONLY; `begin_text` opens blocks for writing.
    work.execute("SET default_transaction_read_only = on")
    return work
