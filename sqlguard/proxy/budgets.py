"""What a session of the proxy may send and be sent by its policy's budgets; shared with the Python door by `budget`."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from sqlguard import gate as gates
from sqlguard.budget import ResultLimits, statements
from sqlguard.errors import SqlguardError
from sqlguard.proxy.rates import Rates
from sqlguard.proxy.results import Results, State, TooLate
from sqlguard.wire.buffer import Frame, Rows, Run
from sqlguard.wire.messages import Query
from sqlguard.wire.reader import text_at
from sqlguard.wire.replies import REFUSED_TEXT, Expect, Reply

if TYPE_CHECKING:
    from sqlguard.proxy.session import AgentSession

Way = Callable[[bytes], bool]
_QUERY, _EXECUTE = b"QE"
_HEADER_BYTES = 5


class SessionBudgets:
    """
    One per session. *rates* is the process's own, and gets its share from the database.

    A message for which nothing is held here goes the slow way: `handled` asks for it and has it handled again.

    `cancel` stops what the server does for this session; whoever has the server's key sets it.
    """

    def __init__(self, session: "AgentSession", rates: Rates) -> None:
        self._session = session
        self._rates = rates
        policy = session.login.policy
        self.per_minute = policy.budgets.statements_per_minute
        reads = policy.defaults.reads
        self._excess = ResultLimits(reads.max_result_rows, reads.max_result_bytes)
        #: Statements to ask for before the message at hand may go on; what came of it, once that is known.
        self._due = 0
        self._is_paid = False
        self._unpaid: SqlguardError | None = None
        self._results = Results(self._excess, b"")
        self.cancel: Callable[[], Awaitable[None]] | None = None
        self._cancelling: asyncio.Task[None] | None = None
        self._waiting = b""

    # --- how many statements

    @property
    def is_rated(self) -> bool:
        return self.per_minute is not None

    def counted(self, ways: Mapping[int, Way]) -> dict[int, Way]:
        """Return *ways* so that the messages that run statements are counted, where there is a budget."""
        if self.per_minute is None:
            return dict(ways)
        return {**ways, _QUERY: self._query(ways[_QUERY]), _EXECUTE: self._execute(ways[_EXECUTE])}

    async def handled(self, item: Frame | Run, handle: Callable[[Frame | Run], bool]) -> bool:
        """Ask for what *item* was short of, if anything, and have it handled; False if it still goes the slow way."""
        if not self._due:
            return False
        number, self._due = self._due, 0
        try:
            await self._rates.lease(self._session.login.task.id, number)
        except SqlguardError as fault:
            self._unpaid = fault
        self._is_paid = True
        try:
            return self._session.is_closed or handle(item)
        finally:
            self._is_paid, self._unpaid = False, None

    def _query(self, way: Way) -> Way:
        def handle(raw: bytes) -> bool:
            session = self._session
            text = Query.decode(raw[_HEADER_BYTES:]).text
            decisions = session.decide(text)
            fault = self._spend(statements(decisions))
            if fault is None:
                return not self._due and way(raw)
            shown = "; ".join(d.statement.text for d in decisions)
            session.send_query(REFUSED_TEXT, Expect(Reply.QUERY, error=self._refused(fault, shown)))
            return True

        return handle

    def _execute(self, way: Way) -> Way:
        def handle(raw: bytes) -> bool:
            name, _ = text_at(raw, _HEADER_BYTES)
            portal = self._session.extended._find_portal(name)  # noqa: SLF001 (its own half)
            if portal is None or self._session.books.is_skipping:
                return way(raw)
            fault = self._spend(statements([portal.decision]))
            if fault is None:
                return not self._due and way(raw)
            self._refused(fault, portal.decision.statement.text)
            self._session.extended.refuse_execute(fault)
            return True

        return handle

    def _spend(self, number: int) -> SqlguardError | None:
        """Count a message's statements; return why it is refused. Unless that is known, so many are due."""
        if self._is_paid:
            return self._unpaid
        try:
            is_spent = self._rates.spend(self._session.login.task.id, number)
        except SqlguardError as fault:
            return fault
        self._due = 0 if is_spent else number
        return None

    def _refused(self, fault: SqlguardError, text: str) -> bytes:
        return self._session.refused(gates.refusal(text, fault))

    # --- how much of a result

    def passes(self, size: int) -> bool:
        """Say whether so many bytes, which are whole answers, go out as they are, which most do."""
        results = self._results
        return size <= results.harmless and not results.is_open and self._cancelling is None

    def limited(self, out: bytes, rows: Rows | None) -> bytes:
        """Return what goes to the client of what the books let through; *rows* are its rows if it is nothing else."""
        results = self._results
        if self._cancelling is None and (
            results.passes(out) or results.adds(rows, len(out)) or results.skims(out)
        ):
            return out
        if results.state is State.PASSING:
            results.error = self._session.error(self._excess.excess())
        try:
            out = results.take(out)
        except TooLate:
            self._session.fatal(self._excess.excess())
            return b""
        if results.must_fail:
            results.must_fail = False
            self._fail_block()
        if results.state is State.CUTTING and self._cancelling is None and self.cancel is not None:
            self._cancelling = asyncio.ensure_future(self.cancel())
            self._cancelling.add_done_callback(self._cancelled)
        if self._cancelling is not None:
            self._waiting += out
            return b""
        return out

    def _fail_block(self) -> None:
        if self._session.books.is_quiet:
            self._session.send_query(REFUSED_TEXT, Expect(Reply.QUERY, swallow=True, error=b""))
        else:
            self._session.fatal(self._excess.excess())

    def _cancelled(self, task: "asyncio.Future[None]") -> None:
        task.cancelled() or task.exception()  # a cancel that failed lets the rows come, and they are dropped
        self._cancelling = None
        out, self._waiting = self._waiting, b""
        if out and not self._session.is_closed:
            self._session.client.write(out)
