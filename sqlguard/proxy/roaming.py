"""
The session of a task whose plain reads may be answered by the replica.

It is an `AgentSession` that looks at what the client sends first. While nothing is under way, and no transaction is
open, a batch of reads that a standby answers as the primary would goes on a `Detour`: it is decided, counted and booked
as ever, only that what would have gone to the server goes to the replica. What the client sends meanwhile waits.
Everything else takes the way of every session.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from sqlguard.lease import LOGIN_GRACE
from sqlguard.plan import Decision
from sqlguard.policy.standby import is_standby_read
from sqlguard.proxy import control
from sqlguard.proxy.berth import failed
from sqlguard.proxy.pipe import Nowhere
from sqlguard.proxy.portals import Prepared
from sqlguard.proxy.session import AgentSession
from sqlguard.proxy.sockets import Side
from sqlguard.proxy.steps import sent
from sqlguard.wire.buffer import HEADER
from sqlguard.wire.messages import Close, Parse, Query, Sync
from sqlguard.wire.reader import text_at
from sqlguard.wire.replies import Expect, Reply

if TYPE_CHECKING:
    from sqlguard.proxy.detour import Detour
    from sqlguard.proxy.replica import Replica

_QUERY, _PARSE, _BIND, _DESCRIBE, _EXECUTE, _FLUSH, _CLOSE, _SYNC = b"QPBDEHCS"
_HEADER_BYTES = 5
_WHY = "an answer of the replica is due"
#: Another server may have other defaults.
_MEANING = ("client_encoding", "DateStyle", "IntervalStyle", "TimeZone")
_SYNC_BYTES = Sync().encode()


class _Recorder(Nowhere):
    """Stands where the server does while a batch is decided, and keeps what would have been sent."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> None:
        self.data += data


@dataclass(slots=True)
class _Batch:
    """A batch of nothing but reads: how long it is, which statements it uses, and what they say."""

    end: int
    needs: dict[bytes, Prepared] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    #: It takes the unnamed statement away.
    is_query: bool = False
    #: The statements that it makes; it closes some; it runs something.
    made: set[bytes] = field(default_factory=set)
    closes: bool = False
    runs: bool = False
    #: Its Sync is still to come.
    is_open: bool = False

    @property
    def parses(self) -> bool:
        return b"" in self.made

    @property
    def prepares(self) -> bool:
        """Say whether it prepares statements for later, or does away with them: that is for the primary."""
        return self.is_open or self.closes or not self.runs or bool(self.made - {b""})


class RoamingSession(AgentSession):
    """`roam` must be called before the first message comes."""

    _detour: "Detour"
    _replica: "Replica"

    def roam(self, replica: "Replica", detour: "Detour") -> None:
        self._replica, self._detour = replica, detour
        self._waiting: list[bytes] = []
        self._has_ended = False
        #: Something else than reads that may go to the replica has been sent to the primary.
        self._is_dirty = False
        #: What of a batch of reads is under way there.
        self._piece: _Batch | None = None
        self._until = self.login.lease_expires_at
        #: The primary's unnamed statement is not the client's; it is known which one that is, and that it is there.
        self._is_stale = self._is_sure = False
        replica.joined(self.login.role)

    @property
    def primary(self) -> Side:
        assert isinstance(self.server, Side)  # noqa: S101 (a session on a detour has its server)
        return self.server

    @property
    def detour(self) -> "Detour":
        return self._detour

    @property
    def meaning(self) -> list[tuple[bytes, bytes]]:
        """Return what values mean in this session, as a start-up message says it."""
        told = self.books.parameters
        return [(name.encode(), told[name].encode()) for name in _MEANING if name in told]

    @property
    def is_between_messages(self) -> bool:
        return self.books.scanner.is_between_messages

    # --- what the sockets call

    def from_client(self, data: bytes) -> None:
        """Take bytes of the client. Raises ProtocolViolation."""
        if self._detour.is_busy or self._waiting:
            self._waiting.append(data)
            self.client.pause(_WHY)
            return
        if not self.is_idle:
            piece, self._piece = self._piece, None
            if piece is None or self._read_extended(data, piece) is None:
                self._is_dirty = True
            self._is_sure = False
            super().from_client(data)
            return
        self._is_dirty, self._piece = False, None
        batch = self._read(data)
        why = "no plain read" if batch is None else self._objection(batch)
        if batch is None or why is not None:
            self._replica.reads[why or ""] += 1
            self._is_dirty = batch is None or batch.end < len(data)
            self._piece = batch if batch is not None and batch.is_open else None
            self._catch_up(data)
            super().from_client(data)
            return
        self._leave_with(data[: batch.end], batch)
        if batch.end < len(data):
            self.from_client(data[batch.end :])

    def from_server(self, data: bytes) -> None:
        """Take bytes of the primary and pass on what is the client's. Raises ProtocolViolation."""
        if self._detour.is_busy and not self.is_between_messages:
            self.close()  # it can only say that it ends, and there is no room for that in the middle of a row
            return
        super().from_server(data)
        if self._is_dirty:
            self._replica.wrote(self.login.task.id)
        if self._detour.is_busy and self.books.is_quiet:
            self._detour.close()

    def from_replica(self, data: bytes) -> None:
        """Take bytes of the replica that are the client's."""
        try:
            super().from_server(data)
        except Exception as fault:
            failed(self, fault)

    def client_ended(self) -> None:
        if self._detour.is_busy or self._waiting:
            self._has_ended = True
        else:
            super().client_ended()

    def close(self) -> None:
        was_closed = self.is_closed
        super().close()
        if not was_closed:
            self._waiting.clear()
            self._detour.close()

    # --- what the detour calls

    def resume(self) -> None:
        """The answer is complete, or the primary is at work on it: take what has come meanwhile."""
        waiting, self._waiting = self._waiting, []
        while waiting and not self._detour.is_busy and not self.is_closed:
            try:
                self.from_client(waiting.pop(0))
            except Exception as fault:
                failed(self, fault)
        if self.is_closed:
            return
        self._waiting[len(self._waiting) :] = waiting
        if not self._waiting:
            self.client.resume(_WHY)
            if self._has_ended and not self._detour.is_busy:
                super().client_ended()

    def run_at_primary(self, sent: bytes, data: bytes) -> None:
        """Send what is on the books already; it is *data*, or its beginning, as it was decided."""
        for raw, expect in reversed(self._missing(data)):
            self.books.expected.appendleft(expect)
            sent = raw + sent
        self.server.write(sent)

    # --- which batches go

    def _objection(self, batch: _Batch) -> str | None:
        """Return why *batch* can't go now."""
        if self.login.lease_expires_at != self._until:
            # The replica, and the row policies there, must know that the task was renewed.
            self._until = self.login.lease_expires_at
            self._replica.wrote(self.login.task.id)
        if batch.prepares:
            return "prepares"
        if self.is_tied or self.dry or self.memory.state.cursors or self.memory.state.temporary:
            return "session"
        if datetime.now(UTC) + LOGIN_GRACE >= min(self._until, self.login.task.expires_at):
            return "lease"
        why = self._replica.objection(self.login)
        if why is None and any(map(self._replica.avoids, batch.texts)):
            why = "failed lately"
        if why is None and not self._detour.is_free:
            why = "no room"
        return why

    def _read(self, data: bytes) -> _Batch | None:
        """Return the batch that *data* begins with, None if it is none that a standby can answer."""
        if data[0] != _QUERY:
            return self._read_extended(data, _Batch(0))
        end = _end(data, 0)
        if end is None:
            return None
        decisions = self.decide(Query.decode(data[_HEADER_BYTES:end]).text)
        if not decisions or not all(map(self._is_plain, decisions)):
            return None
        return _Batch(end, texts=[d.text for d in decisions], is_query=True, runs=True)

    def _read_extended(self, data: bytes, batch: _Batch) -> _Batch | None:
        """Read on in *batch*; with a Flush behind it, it may be a piece of one."""
        at, kind = 0, _SYNC
        is_bound = batch.is_open = False
        while (end := _end(data, at)) is not None:
            kind, raw = data[at], data[at:end]
            at = end
            if kind == _SYNC:
                batch.end = end
                return batch
            if kind == _PARSE:
                fits = self._parses(raw, batch)
            elif kind == _BIND:
                fits = is_bound = self._binds(raw, batch)
            elif kind == _DESCRIBE:
                portal, name = raw[_HEADER_BYTES : _HEADER_BYTES + 1] == b"P", raw[_HEADER_BYTES + 1 : -1]
                fits = is_bound and not name if portal else self._uses(name, batch)
            elif kind == _EXECUTE:
                fits = batch.runs = is_bound and raw[_HEADER_BYTES : _HEADER_BYTES + 1] == b"\0"
            elif kind == _CLOSE:
                fits = batch.closes = True
            else:
                fits = kind == _FLUSH
            if not fits:
                return None
        if at < len(data) or kind != _FLUSH:
            return None
        batch.end, batch.is_open = at, True
        return batch

    def _parses(self, raw: bytes, batch: _Batch) -> bool:
        parse = Parse.decode(raw[_HEADER_BYTES:])
        decisions = self.decide(parse.text, parse.parameter_types)
        if len(decisions) != 1 or not self._is_plain(decisions[0]):
            return False
        batch.made.add(parse.statement)
        batch.texts.append(decisions[0].text)
        return True

    def _binds(self, raw: bytes, batch: _Batch) -> bool:
        portal, at = text_at(raw, _HEADER_BYTES)
        return not portal and self._uses(text_at(raw, at)[0], batch)

    def _uses(self, name: bytes, batch: _Batch) -> bool:
        if name in batch.made:
            return True
        found = self.extended.find_statement(name)
        if found is None or not (name or self._is_sure):
            return False
        decision = found.decision
        if found.gate is not self.gate:
            # The catalog has changed since: by what it is now, as its Bind is judged.
            now = self.gate.decide(decision.statement.text, self.memory.state, found.types)
            if len(now) != 1 or now[0].text != decision.text:
                return False
            decision = now[0]
        if not found.is_fast or not self._is_plain(decision):
            return False
        batch.needs[name] = found
        batch.texts.append(found.decision.text)
        return True

    def _is_plain(self, decision: Decision) -> bool:
        return (
            decision.is_settled
            and not decision.needs_read_write
            and not control.is_followed(decision)
            and is_standby_read(decision.statement, self.gate.context.catalog)
        )

    def _leave_with(self, data: bytes, batch: _Batch) -> None:
        """Have *data* decided and booked as ever, and carry what comes of it to the replica."""
        primary, recorder = self.server, _Recorder()
        self.server = recorder
        try:
            super().from_client(data)
        finally:
            self.server = primary
        if self.is_closed:
            return
        if not recorder.data or not self.books.expected or self._slow is not None:
            # It has to wait for something (its share of a budget): the slow way goes to the primary.
            self._replica.reads["budget"] += 1
            self._is_sure = self._leaves_unnamed(data)
            self.run_at_primary(bytes(recorder.data), data)
            return
        has_unnamed = self.extended.find_statement(b"") is not None
        self._is_stale = self._is_stale or (has_unnamed and (batch.parses or batch.is_query))
        self._is_sure = batch.parses or (self._is_sure and not batch.is_query)
        self._detour.carry(bytes(recorder.data), batch.needs, tuple(batch.texts))
        if batch.parses or batch.is_query:
            self._detour.parsed(self.extended.find_statement(b"") if batch.parses else None)

    # --- the unnamed statement

    def _catch_up(self, data: bytes) -> None:
        """Before *data* goes to the primary: have its unnamed statement be the client's."""
        for raw, expect in self._missing(data):
            self.books.expect(expect)
            self.server.write(raw)
        self._is_sure = self._leaves_unnamed(data)

    def _missing(self, data: bytes) -> list[tuple[bytes, Expect]]:
        """Return what has to be sent before *data* for that, and what is to be expected."""
        if not self._is_stale:
            return []
        self._is_stale = False
        if data[0] == _QUERY or _makes_unnamed(data, 0):
            return []
        there = self.extended.find_statement(b"") if self._is_sure else None
        if there is None:
            first = Close(is_portal=False, name=b"").encode(), Expect(Reply.CLOSE, swallow=True)
        else:
            text = sent(there.decision).encode(self.encoding)
            first = Parse(b"", text, there.types).encode(), Expect(Reply.PARSE, swallow=True)
        return [first, (_SYNC_BYTES, Expect(Reply.SYNC, swallow=True))]

    def _leaves_unnamed(self, data: bytes) -> bool:
        """Say whether *data*, whole messages, leaves the unnamed statement that it makes."""
        at, made = 0, self._is_sure
        while at < len(data):
            end = _end(data, at)
            if end is None:
                return False
            if data[at] == _QUERY:
                made = False
            elif _makes_unnamed(data, at):
                made = True
            at = end
        return made


def detour_of(session: AgentSession) -> "Detour | None":
    """Return the detour that *session* is on just now."""
    return session.detour if isinstance(session, RoamingSession) and session.detour.is_busy else None


def _makes_unnamed(data: bytes, at: int) -> bool:
    """Say whether the message at *at* is a Parse of the unnamed statement."""
    name = at + _HEADER_BYTES
    return data[at] == _PARSE and data[name : name + 1] == b"\0"


def _end(data: bytes, at: int) -> int | None:
    """Return where the message at *at* ends, None if it is not whole."""
    if len(data) - at < _HEADER_BYTES:
        return None
    end: int = at + 1 + HEADER.unpack_from(data, at)[1]
    return end if at + _HEADER_BYTES <= end <= len(data) else None
