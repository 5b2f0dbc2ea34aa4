"""A client that speaks messages: for what drivers never send, and for reading exactly what comes back."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from end_to_end.wired import Agent

from sqlguard.wire.buffer import BACKEND_LIMITS, Frame, FrameReader
from sqlguard.wire.messages import (
    PROTOCOL_3_0,
    AuthenticationSASL,
    AuthenticationSASLContinue,
    AuthenticationSASLFinal,
    BackendMessage,
    Bind,
    ErrorResponse,
    FrontendMessage,
    ReadyForQuery,
    SASLInitialResponse,
    SASLResponse,
    StartupMessage,
    decode_authentication,
    decode_backend,
)
from sqlguard.wire.scram import MECHANISM, ClientExchange


class Raw:
    """One connection, blocking, with a time limit on everything."""

    def __init__(self, host: str, port: int, timeout: float = 20) -> None:
        self.socket = socket.create_connection((host, port), timeout=timeout)
        self._reader = FrameReader(BACKEND_LIMITS)
        self._frames: list[Frame] = []
        #: Bytes that a test has read past the messages.
        self.total = 0

    def send(self, *messages: FrontendMessage | StartupMessage | bytes) -> None:
        self.socket.sendall(b"".join(m if isinstance(m, bytes) else m.encode() for m in messages))

    def frame(self) -> Frame | None:
        """Return the next message, None when the server has closed."""
        while not self._frames:
            try:
                data = self.socket.recv(65536)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._frames += [f for f in self._reader.receive(data) if isinstance(f, Frame)]
        return self._frames.pop(0)

    def message(self) -> BackendMessage | None:
        frame = self.frame()
        return None if frame is None else decode_backend(frame.kind, frame.body)

    def until_ready(self) -> list[BackendMessage]:
        """Return what comes up to the next ReadyForQuery, which is the last; or up to the end."""
        found: list[BackendMessage] = []
        while (message := self.message()) is not None:
            found.append(message)
            if isinstance(message, ReadyForQuery):
                break
        return found

    def rest(self) -> list[BackendMessage]:
        """Return everything up to the end of the connection."""
        found = []
        while (message := self.message()) is not None:
            found.append(message)
        return found

    def log_in(self, agent: Agent, protocol: int = PROTOCOL_3_0, **parameters: str) -> list[BackendMessage]:
        """Start a session; return what came behind the proof."""
        given = {"user": agent.task.role, "database": agent.database, **parameters}
        pairs = tuple((k.encode(), v.encode()) for k, v in given.items())
        self.send(StartupMessage(protocol, pairs))
        exchange = ClientExchange(agent.task.password, "rOprNGfwEbeRWgbNEkqO")
        before: list[BackendMessage] = []
        while True:
            frame = self.frame()
            assert frame is not None, before
            if frame.kind != ord("R"):
                before.append(decode_backend(frame.kind, frame.body))
                assert not isinstance(before[-1], ErrorResponse), before[-1]
                continue
            match decode_authentication(frame.body):
                case AuthenticationSASL():
                    self.send(SASLInitialResponse(MECHANISM.encode(), exchange.first()))
                case AuthenticationSASLContinue(data):
                    self.send(SASLResponse(exchange.final(data)))
                case AuthenticationSASLFinal(data):
                    exchange.check(data)
                case _:
                    return before + self.until_ready()

    def close(self) -> None:
        self.socket.close()


@contextmanager
def raw(agent: Agent, protocol: int = PROTOCOL_3_0, **parameters: str) -> Iterator[Raw]:
    client = Raw(agent.host, agent.port)
    try:
        client.log_in(agent, protocol, **parameters)
        yield client
    finally:
        client.close()


def kinds(messages: list[BackendMessage]) -> str:
    """`1 2 C Z` as one string of letters."""
    return "".join(chr(m.kind) for m in messages)


def bind(portal: bytes = b"", statement: bytes = b"", **more: Any) -> Bind:
    """A Bind of the unnamed portal to the unnamed statement, unless it says otherwise."""
    return Bind(portal, statement, **more)
