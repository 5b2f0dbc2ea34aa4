"""
One agent's session: what the client sends, decided and carried out.

Theory of operation. Client messages are handled one after another. Most of them (reads, and everything that
only passes) are decided and forwarded at once, in the very call that received them: the *fast* way. A message
that has to wait, for a journal entry or for the answer to what is under way, goes the *slow* way: it and all
that come behind it queue up in `_inbox`, and a coroutine takes them in order. So either nobody is slow and
messages are handled as they come, or the coroutine runs and messages are queued. COPY data is the exception: a
COPY that the coroutine waits for gets it at once.

The server's replies go through the books of `wire.session`, whichever way their question took.
"""

import asyncio
from typing import Any

import structlog

from sqlguard import annotation
from sqlguard import gate as gates
from sqlguard.errors import NotUnderstood, SqlguardError
from sqlguard.gate import Gate
from sqlguard.plan import Decision, Stage
from sqlguard.postgres.control import Login
from sqlguard.proxy.again import Newest
from sqlguard.proxy.anchors import ties
from sqlguard.proxy.budgets import SessionBudgets
from sqlguard.proxy.encoding import codec
from sqlguard.proxy.extended import Extended
from sqlguard.proxy.inbox import WAITING, Inbox
from sqlguard.proxy.memory import Memory
from sqlguard.proxy.operator import Operator, Passing
from sqlguard.proxy.pipe import Pipe
from sqlguard.proxy.plans import Plans
from sqlguard.proxy.simple import Simple
from sqlguard.statement.model import Kind, Session
from sqlguard.wire import session as wire
from sqlguard.wire.buffer import COPY_RUNS, Frame, FrameReader, Run, frontend_limits
from sqlguard.wire.messages import Flush, Query, Terminate
from sqlguard.wire.replies import ASKS, Expect, Part, Reply
from sqlguard.wire.reports import from_error
from sqlguard.wire.runs import SYNC

log = structlog.get_logger()
_COPY = frozenset(b"dcf")
_QUERY, _TERMINATE = b"QX"
_READY = wire.State.READY


class SessionEnded(Exception):
    """Raised in the slow way when there is nobody left to work for."""


class AgentSession:
    """Bound to a client and to a server connection that is logged in as the task's role."""

    def __init__(  # noqa: PLR0913 (both sides, who it is, and what it works with)
        self,
        client: Pipe,
        server: Pipe,
        login: Login,
        operator: Operator,
        *,
        server_pid: int,
        max_message_bytes: int,
    ) -> None:
        self.client = client
        self.server = server
        self.login = login
        self.operator = operator
        self.server_pid = server_pid
        self.books = wire.Session(max_message_bytes)
        self.memory = Memory(Session(search_path=login.policy.defaults.search_path))
        #: The block is a preview: it will be rolled back as a whole.
        self.dry_block = False
        #: Actions of the open transaction, settled when it ends.
        self.open_actions: list[tuple[int, dict[str, Any]]] = []
        self._reader = FrameReader(frontend_limits(max_message_bytes), COPY_RUNS)
        self._is_whole = True  # the reader holds no part of a message
        self._inbox = Inbox(client)
        self._slow: asyncio.Task[None] | None = None
        self._quiet = asyncio.Event()
        #: Tied: the server remembers something of it that can't be made again elsewhere.
        self.is_closed = self.is_tied = False
        self._is_ahead = False
        self._gate, self._passing = operator.gate(login)
        self._search_path = self.memory.state.search_path
        #: The last state of `memory` in which texts were found to mean what they mean to every session.
        self._plain_state: Session | None = None
        self.newest = Newest(operator)
        self._simple = Simple(self)
        self.extended = Extended(self)
        self.plans = Plans(self)
        #: How a message is handled at once, by its type; each says whether that could be.
        self.budgets = SessionBudgets(self, operator.rates)
        self._ways = self.budgets.counted({_QUERY: self._simple.fast, **self.extended.ways})

    # --- what the sockets call

    def from_client(self, data: bytes) -> None:
        """Take bytes of the client. Raises ProtocolViolation."""
        if self._slow is None and self._is_whole and self.books.state is _READY:
            # Most of it is known to pass, and is forwarded in this call.
            if data[0] == _QUERY:
                if self._simple.passes(data):
                    return
            elif data[-5:] == SYNC and self.extended.passes(data):
                return
        self.server.cork()
        try:
            for item in self._reader.receive(data):
                if self._slow is not None:
                    self._queue(item)
                elif not self._handle(item):
                    self._queue(item)
                    self._slow = asyncio.get_running_loop().create_task(self._drain())
                    self._slow.add_done_callback(self._drained)
        finally:
            self.server.uncork()
        self._is_whole = self._reader.is_between_messages
        if len(self.books.expected) > WAITING:
            self._is_ahead = True
            self.client.pause("too many answers are due")

    def client_ended(self) -> None:
        """The client sends no more; what it has asked is still answered."""
        goodbye = Frame.of(_TERMINATE, b"")
        if self._slow is not None:
            self._queue(goodbye)
        else:
            self._handle(goodbye)

    def from_server(self, data: bytes) -> None:
        """Take bytes of the server and pass on what is the client's. Raises ProtocolViolation."""
        books = self.books
        if not books.takes_whole(data):
            out = books.scan(data)
            if out and (out := self.budgets.limited(out, books.scanner.rows)):
                self.client.write(out)
        elif self.budgets.passes(len(data)) or (data := self.budgets.limited(data, None)):
            self.client.write(data)
        if self._slow is not None:
            self._wake()
        if self._is_ahead and len(books.expected) <= WAITING // 2:
            self._is_ahead = False
            self.client.resume("too many answers are due")

    def _wake(self) -> None:
        if self.books.is_quiet:
            self._quiet.set()
        while self._inbox and self._joins_copy(self._inbox.first):
            self._inbox.take()

    def close(self) -> None:
        """Close both sides; the server rolls back what is open. Safe to repeat."""
        if self.is_closed:
            return
        self.is_closed = True
        self.server.write(Terminate().encode())
        self.server.close()
        self.client.close()
        self.books.abandon()
        self._quiet.set()

    def fatal(self, fault: SqlguardError) -> None:
        """Tell the client and end the session."""
        if not self.is_closed:
            try:
                encoding = self.encoding
            except NotUnderstood:
                encoding = "utf-8"
            self.client.write(from_error(fault, severity="FATAL", encoding=encoding))
        self.close()

    # --- the two ways

    def _handle(self, item: Frame | Run) -> bool:
        """Handle one message at once if that can be; say whether it was. Raises ProtocolViolation."""
        kind, raw = item
        books = self.books
        if books.state is wire.State.CLOSED or not books.takes(kind):
            return True  # behind a Terminate nothing counts, as with PostgreSQL
        way = self._ways.get(kind)
        if way is not None:
            return way(raw)
        if kind in _COPY:
            self._copy(item)
        elif self._reader.is_in_run:
            self.server.end()  # the client has left in the middle of COPY data: nothing more can be said
        else:
            # The server ends the session when it has done what came before.
            self.server.write(Terminate().encode())
        return True

    def _queue(self, item: Frame | Run) -> None:
        if self._inbox or not self._joins_copy(item):
            self._inbox.add(item)

    def _joins_copy(self, item: Frame | Run) -> bool:
        """
        Pass *item* on if the slow way waits for a COPY … FROM STDIN, and say whether it does. Raises ProtocolViolation.

        As with PostgreSQL a Sync and a Flush are ignored there, and no other message may come.
        """
        if self.is_closed or not self.books.is_copying_in:
            return False
        if item.kind == _TERMINATE:
            self.close()
        elif self.books.takes(item.kind):
            self._copy(item)
            if not self.books.is_copying_in:
                # The Flush that asked for the answer was ignored as well.
                self.server.write(Flush().encode())
        return True

    def _copy(self, item: Frame | Run) -> None:
        reply = ASKS.get(item.kind)
        if reply is not None:
            self.books.expect(Expect(reply))
        self.server.write(item[1])

    async def _drain(self) -> None:
        """Take the waiting messages in order; the first of them has been given to `_handle` already."""
        try:
            item = self._inbox.take()
            while True:
                if not await self.budgets.handled(item, self._handle):
                    await self.newest.read()
                    if item.kind == _QUERY:
                        await self._simple.slow(item[1])
                    else:
                        await self.extended.slow(item.kind, item[1])
                self.newest.is_here = False
                while self._inbox and not self.is_closed:
                    item = self._inbox.take()
                    if not self._handle(item):
                        break
                else:
                    return
        except SessionEnded:
            pass
        except SqlguardError as fault:
            self.fatal(fault)
        finally:
            self._slow = None

    def _drained(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled() or task.exception() is None:
            return
        log.error("session failed", error=repr(task.exception()), task=self.login.task.id)
        self.fatal(NotUnderstood("the proxy could not handle the message"))

    # --- what both protocols need

    @property
    def encoding(self) -> str:
        """Python codec of the client's encoding. Raises NotUnderstood for one that can't be judged."""
        return codec(self.books.parameters.get("client_encoding", "UTF8"))

    @property
    def gate(self) -> Gate:
        if self._passing.catalog is not self.operator.catalog:
            self._gate, self._passing = self.operator.gate(self.login)
        return self._gate

    @property
    def passing(self) -> Passing | None:
        """Return what is known to pass, None if in this session the same text may mean something else."""
        passing, state = self._passing, self.memory.state
        if passing.catalog is not self.operator.catalog or not self.books.is_utf8:
            return None
        if state is not self._plain_state:
            if state.temporary or state.search_path is not self._search_path or self.budgets.is_rated:
                return None
            self._plain_state = state
        return passing

    @property
    def in_block(self) -> bool:
        """Inside BEGIN … COMMIT, as of the last answer; only meaningful when nothing is under way."""
        return self.books.status != b"I"

    @property
    def is_idle(self) -> bool:
        """Say whether nothing is under way and no transaction is open."""
        is_open = self._slow is not None or self.in_block or self.extended.is_open
        return not is_open and self.books.is_quiet and self._reader.is_between_messages

    @property
    def dry(self) -> bool:
        return self.memory.settings.dry_run or self.dry_block

    def send_query(self, text: str | bytes, expect: Expect) -> None:
        """Send a Query message whose replies are *expect*'s."""
        if self.extended.is_open:
            self.extended.interrupted(expect)
        self.books.expect(expect)
        self.server.write(Query(text.encode(self.encoding) if isinstance(text, str) else text).encode())

    async def barrier(self) -> None:
        """Wait until the server has answered everything that was sent. Raises SessionEnded."""
        if not self.books.is_quiet and not self.is_closed:
            if self.books.expected[-1].reply not in (Reply.QUERY, Reply.SYNC):
                self.server.write(Flush().encode())
            while not self.books.is_quiet and not self.is_closed:
                self._quiet.clear()
                await self._quiet.wait()
        if self.is_closed:
            raise SessionEnded

    async def ask(self, text: str, *parts: Part) -> Expect:
        """Run a Query of our own and return what came of it; nothing of it reaches the client."""
        expect = Expect(Reply.QUERY, swallow=True, parts=parts)
        self.send_query(text, expect)
        await self.barrier()
        return expect

    def decide(self, text: bytes, types: tuple[int, ...] = ()) -> tuple[Decision, ...]:
        """Return a decision per statement; text that can't be decoded is one refusal."""
        try:
            decisions = self.gate.decide(text.decode(self.encoding), self.memory.state, types)
        except UnicodeDecodeError:
            said = NotUnderstood("the text is not in the session's client_encoding")
            return (gates.refusal(repr(text[:200]), said),)
        except NotUnderstood as fault:
            return (gates.refusal(repr(text[:200]), fault),)
        self.is_tied = self.is_tied or any(map(ties, decisions))
        return decisions

    def error(self, fault: SqlguardError) -> bytes:
        """Return the ErrorResponse for *fault*."""
        return from_error(fault, encoding=self.encoding)

    def refused(self, decision: Decision) -> bytes:
        """Journal a refusal and return the ErrorResponse for it."""
        intent = gates.intent(decision, None, self.said(decision), via="proxy")
        self.operator.note(self.login.complete(intent, self.server_pid))
        return self.error(gates.error(decision))

    def said(self, decision: Decision) -> annotation.Annotation:
        """Return what the agent says about a statement: in its text, or by the session's settings."""
        return self.memory.settings.said.merged(annotation.read(decision.statement.text))

    async def record(self, decision: Decision, params: list[str | None] | None) -> int:
        """
        Commit the intent of a write and return its action id.

        Raises SqlguardError when it can't be written, and then nothing may run; SessionEnded.
        """
        via = "dry run" if self.dry else "proxy"
        intent = gates.intent(decision, params, self.said(decision), via=via)
        action = await self.operator.intent(self.login.complete(intent, self.server_pid))
        if self.is_closed:
            self.operator.event(action, "failed", {"reason": "the client left before it was run"})
            raise SessionEnded
        return action

    def settle(self, kind: str, detail: dict[str, Any], start: int = 0) -> None:
        """Write down how the open transaction's actions (from number *start* on) ended."""
        for action, more in self.open_actions[start:]:
            self.operator.event(action, kind, {**more, **detail})
        del self.open_actions[start:]

    # --- transaction control and what changes the session

    def followed(self, decision: Decision, expect: Expect, *, was_in_block: bool) -> None:
        """Follow what came of transaction control or of a statement that changes the session."""
        preview = self.dry_block
        done = expect.failed is None
        if self.in_block and not was_in_block:
            self.memory.begin()
            self.dry_block = self.memory.settings.dry_run
        own = not self.memory.is_open
        if own:
            self.memory.begin()
        if done:
            standing = self.memory.follow(decision, len(self.open_actions))
            self.plans.stage.follow(decision)
            self.settle("failed", {"reason": "rolled back to a savepoint"}, standing)
            self.extended.follow(decision)
            if self.in_block and decision.kind in (Kind.SET, Kind.SELECT) and not self.open_actions:
                self.dry_block = self.dry_block or self.memory.settings.dry_run
        if was_in_block and not self.in_block:
            self.plans.stage = Stage()
            committed = done and decision.kind is Kind.COMMIT and (preview or expect.tag == b"COMMIT")
            self.memory.end(committed=committed, previewed=preview)
            ended = "previewed" if preview else "committed" if committed else "failed"
            self.settle(ended, {"reason": "rolled back"} if ended == "failed" and done else {})
            self.dry_block = False
        elif own and not self.in_block and not self.extended.is_open:
            self.memory.end(committed=done)
