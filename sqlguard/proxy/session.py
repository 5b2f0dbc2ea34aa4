"""
One agent's session: what the client sends, decided and carried out.

Theory of operation. Client messages are handled one after another. Most of them (reads, and everything that
only passes) are decided and forwarded at once, in the very call that received them: the *fast* way. A message
that has to wait, for a journal entry or for the answer to what is under way, goes the *slow* way: it and all
that come behind it queue up in `_inbox`, and a coroutine takes them in order. So either nobody is slow and
frames are handled as they come, or the coroutine runs and frames are queued.

The server's replies go through `Relay`, whichever way their question took.
"""

import asyncio
from collections import deque
from typing import Any, Protocol

import structlog

from sqlguard import annotation
from sqlguard import gate as gates
from sqlguard.annotation import Annotation
from sqlguard.errors import NotUnderstood, SqlguardError
from sqlguard.gate import Gate
from sqlguard.plan import Decision
from sqlguard.postgres.control import Login
from sqlguard.proxy import packets
from sqlguard.proxy.encoding import codec
from sqlguard.proxy.extended import Extended
from sqlguard.proxy.operator import Operator
from sqlguard.proxy.relay import Expect, Part, Relay, Reply
from sqlguard.proxy.report import CHANGES, dry_run_notice
from sqlguard.proxy.simple import Simple
from sqlguard.statement.model import Kind, Session

log = structlog.get_logger()
Frame = tuple[int, bytes]
_COPY = frozenset(b"dcf")


class Pipe(Protocol):
    """One side's socket as the session sees it."""

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...


class AgentSession:
    """Bound to a client and to a server connection that is logged in as the task's role."""

    def __init__(self, client: Pipe, server: Pipe, login: Login, operator: Operator, server_pid: int) -> None:
        self.client = client
        self.server = server
        self.login = login
        self.operator = operator
        self.server_pid = server_pid
        self.relay = Relay()
        self.state = Session(search_path=login.policy.defaults.search_path)
        self.said = Annotation()
        self.dry_run = False
        #: BEGIN came while `dry_run` was on: the whole block will be rolled back.
        self.dry_block = False
        #: Actions of the open transaction, settled when it ends.
        self.open_actions: list[tuple[int, dict[str, Any]]] = []
        self._inbox: deque[Frame] = deque()
        self._slow: asyncio.Task[None] | None = None
        self._quiet = asyncio.Event()
        self._closed = False
        self._simple = Simple(self)
        self.extended = Extended(self)

    # --- what the sockets call

    def from_client(self, frames: list[Frame]) -> None:
        """Take whole client messages, in order."""
        for number, frame in enumerate(frames):
            if frame[0] in _COPY and (self.relay.copying_in or self._slow is None):
                self.server.write(packets.message(bytes([frame[0]]), frame[1]))
            elif self._slow is not None:
                self._inbox.append(frame)
            elif not self._handle(frame):
                self._inbox.append(frame)
                self._slow = asyncio.get_running_loop().create_task(self._drain())
                self._slow.add_done_callback(self._drained)
            if self._closed:
                del frames[number + 1 :]
                return

    def from_server(self, data: bytes) -> None:
        """Take bytes of the server and pass on what is the client's."""
        out = self.relay.feed(data)
        if out:
            self.client.write(out)
        if not self.relay.expected:
            self._quiet.set()

    def close(self) -> None:
        """Close both sides; the server rolls back what is open. Safe to repeat."""
        if self._closed:
            return
        self._closed = True
        self._quiet.set()
        self.client.close()
        self.server.close()
        self.settle("failed", {"why": "the session ended"})

    def fatal(self, fault: SqlguardError) -> None:
        """Tell the client why, and close."""
        if not self._closed:
            self.client.write(packets.error(fault, severity="FATAL"))
        self.close()

    def greeting(self, statuses: list[bytes]) -> bytes:
        """Take the server's ParameterStatus messages and return them as the client gets them."""
        for status in statuses:
            self.relay.feed(status)
        # Ours, so that reads are run read only; blocks are opened READ WRITE, so to the client it is off.
        ours = packets.message(b"S", b"default_transaction_read_only\0on\0")
        theirs = packets.message(b"S", b"default_transaction_read_only\0off\0")
        return b"".join(theirs if status == ours else status for status in statuses)

    # --- the two ways

    def _handle(self, frame: Frame) -> bool:
        """Handle one message at once if that can be; say whether it was."""
        if frame[0] == ord("Q"):
            return self._simple.fast(frame[1])
        return self.extended.fast(frame[0], frame[1])

    async def _drain(self) -> None:
        try:
            while self._inbox and not self._closed:
                frame = self._inbox.popleft()
                if self._handle(frame):
                    continue
                if frame[0] == ord("Q"):
                    await self._simple.slow(frame[1])
                else:
                    await self.extended.slow(frame[0], frame[1])
        except SqlguardError as fault:
            self.fatal(fault)
        finally:
            self._slow = None

    def _drained(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("session failed", error=repr(task.exception()), task=self.login.task.id)
            self.fatal(NotUnderstood("the proxy could not handle the message"))

    # --- what both protocols need

    @property
    def encoding(self) -> str:
        """Python codec of the client's encoding. Raises NotUnderstood for one that can't be judged."""
        return codec(self.relay.parameters.get("client_encoding", "UTF8"))

    @property
    def gate(self) -> Gate:
        return self.operator.gate(self.login)

    @property
    def in_block(self) -> bool:
        """Inside BEGIN … COMMIT, as of the last answer; only meaningful when nothing is under way."""
        return self.relay.status != b"I"

    async def barrier(self) -> None:
        """Wait until the server has answered everything that was sent."""
        if not self.relay.expected or self._closed:
            return
        if self.relay.expected[-1].reply not in (Reply.QUERY, Reply.SYNC):
            self.server.write(packets.FLUSH)
        while self.relay.expected and not self._closed:
            self._quiet.clear()
            await self._quiet.wait()
        if self._closed:
            raise NotUnderstood("the session has ended")

    async def ask(self, text: str) -> Expect:
        """Run a Query of our own and return what came of it; nothing of it reaches the client."""
        expect = Expect(Reply.QUERY, swallow=True)
        self.relay.expect(expect)
        self.server.write(packets.query(text.encode(self.encoding)))
        await self.barrier()
        return expect

    def decide(self, text: bytes) -> tuple[Decision, ...]:
        """Return a decision per statement; text that can't be decoded is one refusal."""
        try:
            return self.gate.decide(text.decode(self.encoding), self.state)
        except UnicodeDecodeError:
            fault = NotUnderstood("the text is not in the session's client_encoding")
            return (gates.refusal(repr(text[:200]), fault),)
        except NotUnderstood as fault:
            return (gates.refusal(repr(text[:200]), fault),)

    def refused(self, decision: Decision) -> bytes:
        """Journal a refusal and return the ErrorResponse for it."""
        intent = gates.intent(decision, None, annotation.read(decision.statement.text), via="proxy")
        self.operator.note(self.login.complete(intent, self.server_pid))
        return packets.error(gates.error(decision), encoding=self.encoding)

    async def record(self, decision: Decision, params: list[str | None] | None) -> int:
        """Commit the intent of a write and return its action id; raises when it can't, and nothing may run."""
        said = self.said.merged(annotation.read(decision.statement.text))
        intent = gates.intent(decision, params, said, via="dry run" if self.dry else "proxy")
        return await self.operator.intent(self.login.complete(intent, self.server_pid))

    @property
    def dry(self) -> bool:
        return self.dry_run or self.dry_block

    def settle(self, kind: str, detail: dict[str, Any]) -> None:
        """Write down how the open transaction's actions ended."""
        for action, more in self.open_actions:
            self.operator.event(action, kind, {**more, **detail})
        self.open_actions.clear()

    def followed(self, decision: Decision, expect: Expect) -> None:
        """Follow what came of transaction control or of a statement that changes the session."""
        rolled_back = self.dry_block
        if expect.failed is None:
            self._advance(decision)
            self.extended.follow(decision)
        if not self.in_block:
            committed = decision.kind is Kind.COMMIT and expect.tag == b"COMMIT" and not rolled_back
            self.settle("previewed" if rolled_back else "committed" if committed else "failed", {})

    async def end_dry_block(self) -> None:
        """Tell what the block of a dry run would have changed; the caller rolls it back."""
        report = Expect(Reply.QUERY, swallow=True, parts=(Part.SWALLOW, Part.CAPTURE))
        self.relay.expect(report)
        self.server.write(packets.query(f"SET CONSTRAINTS ALL IMMEDIATE; {CHANGES}".encode()))
        await self.barrier()
        if report.failed is None:
            self.client.write(dry_run_notice(report.captured, 0, self.encoding))

    def _advance(self, decision: Decision) -> None:
        self.state = gates.advance(self.state, decision)
        statement = decision.statement
        match statement.kind:
            case Kind.COMMIT | Kind.ROLLBACK:
                self.dry_block = False
            case Kind.BEGIN:
                self.dry_block = self.dry_run
            case Kind.DISCARD:
                if statement.details.get("target") == "DISCARD_ALL":
                    self.follow_setting("all", None)
            case Kind.SET | Kind.RESET:
                values = statement.details.get("values")
                value = values[0] if values else None
                if statement.details.get("local") and statement.subject == "sqlguard.dry_run":
                    self.dry_block = _is_on(value)
                else:
                    self.follow_setting(statement.subject or "all", value)

    def follow_setting(self, name: str, value: object) -> None:
        """Follow one of our own settings; `all` or nothing resets them."""
        text = "" if value is None else str(value)
        if name == "all":
            self.dry_run, self.said = False, Annotation()
        elif name == "sqlguard.dry_run":
            self.dry_run = _is_on(text)
        elif name.startswith("sqlguard."):
            self.said = annotation.with_field(self.said, name.removeprefix("sqlguard."), text)


def _is_on(value: str | None) -> bool:
    """Read a boolean as PostgreSQL does for settings: any unambiguous beginning of the word."""
    text = (value or "").lower()
    return bool(text) and (text in ("on", "1") or "true".startswith(text) or "yes".startswith(text))
