"""
One observed session: both directions of bytes, read along, each statement decided as the guard would.

It is told of bytes that have been passed on already and can change nothing of them. What it can't follow any more
(a protocol that it does not know, a message that is too long) it gives up, and the session goes on unobserved.
"""

from typing import Protocol

import structlog

from sqlguard import gate as gates
from sqlguard.errors import NotUnderstood, ProtocolViolation
from sqlguard.gate import Gate
from sqlguard.plan import Decision
from sqlguard.postgres.control import Login
from sqlguard.proxy import control
from sqlguard.proxy.encoding import codec
from sqlguard.proxy.memory import Memory
from sqlguard.statement.model import Kind, Session
from sqlguard.wire import session as wire
from sqlguard.wire.buffer import BACKEND_LIMITS, COPY_RUNS, Frame, FrameReader, Run, frontend_limits
from sqlguard.wire.messages import Bind, Close, Execute, Parse, Query
from sqlguard.wire.replies import ASKS, Expect
from sqlguard.wire.states import State

log = structlog.get_logger()
_QUERY, _PARSE, _BIND, _EXECUTE, _CLOSE, _CALL = b"QPBECF"
_BODY = 5
#: Statements and portals that a session may have under names; beyond, the oldest are not known any more.
_NAMES = 2048


class Counter(Protocol):
    """What `Sightings` is for a session."""

    def saw(self, login: Login, decision: Decision) -> None: ...

    def lost(self, login: Login, why: str) -> None: ...


class Gates(Protocol):
    """What `Operator` is for a session."""

    def gate(self, login: Login) -> tuple[Gate, object]: ...


class Observer:
    """Reads along from the first byte of the server on."""

    def __init__(self, login: Login, gates_: Gates, counter: Counter, limit: int) -> None:
        self._login = login
        self._gates = gates_
        self._counter = counter
        self._limit = limit
        self._books = wire.Session(limit)
        self._memory = Memory(Session(search_path=login.policy.defaults.search_path))
        self._client = FrameReader(frontend_limits(limit), COPY_RUNS)
        self._greeting: FrameReader | None = FrameReader(BACKEND_LIMITS)
        self._statements: dict[bytes, tuple[Decision, ...]] = {}
        self._portals: dict[bytes, tuple[Decision, ...]] = {}
        self._is_blind = False

    def from_client(self, data: bytes) -> None:
        if self._is_blind or self._greeting is not None:
            return  # until the session is there it's the login, which nobody needs to see
        try:
            for item in self._client.receive(data):
                if self._books.state is State.CLOSED:
                    return  # what a client sends behind its Terminate PostgreSQL does not read
                if self._books.takes(item.kind):
                    self._take(item)
        except Exception as fault:  # whatever it is, the session must go on
            self._give_up(fault)

    def from_server(self, data: bytes) -> None:
        if self._is_blind:
            return
        try:
            rest = data if self._greeting is None else self._greet(self._greeting, data)
            if rest:
                self._books.feed(rest)
        except Exception as fault:
            self._give_up(fault)

    # --- parts

    def _give_up(self, fault: Exception) -> None:
        self._is_blind = True
        self._statements.clear()
        self._portals.clear()
        if not isinstance(fault, ProtocolViolation):
            log.error("observation failed", error=repr(fault), role=self._login.role)
        else:
            log.info("session can't be followed", error=fault.message, role=self._login.role)
        self._counter.lost(self._login, "a session that could not be followed to its end")

    def _greet(self, reader: FrameReader, data: bytes) -> bytes:
        """Read the login up to the first ReadyForQuery; return what is behind it."""
        rest = b""
        for frame in reader.receive(data):
            if self._greeting is None:
                rest += frame[1]
            elif frame.kind == ord("S"):
                self._books.feed(frame[1])
            elif frame.kind == ord("Z"):
                self._greeting = None
        return rest + reader.held if self._greeting is None else b""

    def _take(self, item: Frame | Run) -> None:
        kind, raw = item
        body = raw[_BODY:] if isinstance(item, Frame) else b""
        expect: Expect | None = None
        if kind == _QUERY:
            expect = self._query(body)
        elif kind == _PARSE:
            parse = Parse.decode(body)
            _remember(self._statements, parse.statement, self._decide(parse.text))
        elif kind == _BIND:
            bind = Bind.decode(body)
            _remember(self._portals, bind.portal, self._statements.get(bind.statement, ()))
        elif kind == _EXECUTE:
            expect = self._execute(body)
        elif kind == _CLOSE:
            close = Close.decode(body)
            (self._portals if close.is_portal else self._statements).pop(close.name, None)
        elif kind == _CALL:
            self._counter.lost(self._login, "a function call without text")
        reply = ASKS.get(kind)
        if reply is not None:
            self._books.expect(expect or Expect(reply))

    def _query(self, body: bytes) -> Expect:
        decisions = self._decide(Query.decode(body).text)
        for decision in decisions:
            self._counter.saw(self._login, decision)

        def done(expect: Expect) -> None:
            carried_out = decisions[: expect.statement] if expect.failed is not None else decisions
            for decision in carried_out:
                self._follow(decision)
            self._settle(failed=expect.failed is not None)

        return Expect(ASKS[_QUERY], done=done)

    def _execute(self, body: bytes) -> Expect:
        decisions = self._portals.get(Execute.decode(body).portal, ())
        for decision in decisions:
            self._counter.saw(self._login, decision)

        def done(expect: Expect) -> None:
            if expect.failed is None:
                for decision in decisions:
                    self._follow(decision)

        return Expect(ASKS[_EXECUTE], done=done if any(_is_followed(d) for d in decisions) else None)

    def _follow(self, decision: Decision) -> None:
        """*decision* was carried out without an error."""
        if not _is_followed(decision):
            return
        if decision.kind is Kind.BEGIN:
            self._memory.begin()
        elif decision.kind in (Kind.COMMIT, Kind.ROLLBACK):
            self._memory.end(committed=decision.kind is Kind.COMMIT and self._books.status != b"E")
        else:
            self._memory.follow(decision, 0)

    def _settle(self, *, failed: bool) -> None:
        """Bring what is remembered in line with the state that the server tells."""
        if self._books.status == b"I" and self._memory.is_open:
            self._memory.end(committed=not failed)
        elif self._books.status != b"I" and not self._memory.is_open:
            self._memory.begin()

    def _decide(self, text: bytes) -> tuple[Decision, ...]:
        try:
            plain = text.decode(codec(self._books.parameters.get("client_encoding", "UTF8")))
        except (NotUnderstood, UnicodeDecodeError):
            fault = NotUnderstood("the text is not in an encoding that can be judged")
            return (gates.refusal("", fault),)
        gate, _ = self._gates.gate(self._login)
        return gate.decide(plain, self._memory.state)


def _is_followed(decision: Decision) -> bool:
    return control.is_followed(decision)


def _remember(names: dict[bytes, tuple[Decision, ...]], name: bytes, decisions: tuple[Decision, ...]) -> None:
    names.pop(name, None)
    names[name] = decisions
    if len(names) > _NAMES:
        del names[next(iter(names))]
