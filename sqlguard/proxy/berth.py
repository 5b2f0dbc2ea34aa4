"""
Where a session lies at the server, and how it comes back there.

An idle client outside a transaction gives its server connection back after a while, if the server remembers nothing
of it that can't be made again (`anchors`). Its next message logs in again with the keys that its proof has
left, sets what it had set, prepares what it had prepared, and goes on; the client sees nothing of it. The cancel key
that it was given leads to the connection that it has now.
"""

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic

import structlog

from sqlguard.errors import ProtocolViolation, SqlguardError
from sqlguard.proxy.backend import Backend, LoginFailed
from sqlguard.proxy.pipe import Nowhere
from sqlguard.proxy.session import AgentSession
from sqlguard.proxy.sockets import Closed, Side
from sqlguard.wire.buffer import BACKEND_LIMITS, Frame, FrameReader
from sqlguard.wire.messages import (
    BackendKeyData,
    CancelRequest,
    ErrorResponse,
    Parse,
    Query,
    Sync,
    Terminate,
)
from sqlguard.wire.reports import from_error

log = structlog.get_logger()
_BODY = 5
#: Seconds that the way back may take.
_PATIENCE = 15.0
#: Seconds after which a connection that was given back is cut off.
_LINGER = 10.0
LogIn = Callable[[], Awaitable[Backend]]
#: The server's side of a session that has none; what is written while it closes is lost.
_NOWHERE = Nowhere()


class Berth:
    """One per session: holds its server connection, or knows how to get one."""

    def __init__(  # noqa: PLR0913 (both ends, and what to do about them)
        self,
        session: AgentSession,
        client: Side,
        backend: Backend,
        *,
        log_in: LogIn,
        lost: Callable[[], None],
        first: bytes,
    ) -> None:
        """*log_in* gets another server connection, *lost* is told of the end, *first* has come already."""
        self.session = session
        self._client = client
        self._log_in = log_in
        self._lost = lost
        self._side: Side | None = None
        #: What the client's bytes are given to.
        self._take = self._wait
        self._waiting: list[bytes] = []
        self._coming: asyncio.Task[None] | None = None
        self._has_ended = False
        self.key: CancelRequest | None = None
        #: Bytes have come since somebody looked; and when that was so for the last time.
        self.was_active = True
        self.active_at = monotonic()
        self._moor(backend)
        client.take_over(self._from_client, self._client_ended, self._gone, first)

    # --- what the sockets call

    def _from_client(self, data: bytes) -> None:
        self.was_active = True
        try:
            self._take(data)
        except Exception as fault:
            failed(self.session, fault)

    def _wait(self, data: bytes) -> None:
        """Keep bytes for when there is a server connection, and see to it that there will be one."""
        self._waiting.append(data)
        self._client.pause("the session has no server")
        if self._coming is None:
            self._coming = asyncio.get_running_loop().create_task(self._come_back())

    def _from_server(self, data: bytes) -> None:
        self.was_active = True
        try:
            self.session.from_server(data)
        except Exception as fault:
            failed(self.session, fault)

    def _client_ended(self) -> None:
        if self._side is not None:
            self.session.client_ended()
        elif self._coming is None:
            self.session.close()
        else:
            self._has_ended = True

    def _gone(self) -> None:
        if self._coming is not None:
            self._coming.cancel()
        self._lost()

    # --- leaving

    @property
    def is_moored(self) -> bool:
        return self._side is not None

    @property
    def may_leave(self) -> bool:
        session = self.session
        if self._side is None or session.is_closed or session.is_tied or not session.is_idle:
            return False
        return not (session.memory.state.cursors or session.memory.state.temporary)

    def leave(self) -> None:
        """Give the server connection back. Only if `may_leave`."""
        side, self._side = self._side, None
        if side is None:
            return
        self._take = self._wait
        # What it still says, or that it closes, is nobody's business any more.
        side.deliver_to(_ignore)
        side.lost = side.ended = None
        side.other = self._client.other = None
        side.write(Terminate().encode())
        # PostgreSQL closes when its process ends: until then the place is taken.
        asyncio.get_running_loop().call_later(_LINGER, side.abort)
        self.session.server = _NOWHERE
        self.key = None

    # --- coming back

    async def _come_back(self) -> None:
        session = self.session
        try:
            async with asyncio.timeout(_PATIENCE):
                backend = await self._log_in()
                try:
                    await _make_again(session, backend)
                except BaseException:
                    backend.side.close()
                    raise
        except LoginFailed as fault:
            self._client.write(fault.response)
            session.close()
        except (Closed, TimeoutError, OSError):
            session.fatal(SqlguardError("PostgreSQL did not take the session back", hint="connect again"))
        except SqlguardError as fault:
            self._client.write(from_error(fault, severity="FATAL"))
            session.close()
        else:
            self._arrive(backend)
        finally:
            self._coming = None

    def _arrive(self, backend: Backend) -> None:
        if self.session.is_closed:
            backend.side.close()
            return
        waiting, self._waiting = self._waiting, []
        self._moor(backend)
        for data in waiting:
            self._from_client(data)
        self._client.resume("the session has no server")
        if self._has_ended:
            self.session.client_ended()

    def _moor(self, backend: Backend) -> None:
        session, side = self.session, backend.side
        self._side = side
        self._take = session.from_client
        session.server, session.server_pid = side, backend.pid
        if backend.key_data:
            data = BackendKeyData.decode(backend.key_data[_BODY:])
            self.key = CancelRequest(data.pid, data.key)
        self._client.other, side.other = side, self._client
        side.take_over(self._from_server, self._gone, self._gone, backend.rest)


def failed(session: AgentSession, fault: Exception) -> None:
    """End the session, whose call has raised *fault*."""
    who = {"task": session.login.task.id, "client_addr": session.login.client_addr}
    if isinstance(fault, ProtocolViolation):
        log.warning("protocol violation", error=fault.message, **who)
        session.fatal(fault)
    else:
        log.error("session failed", exc_info=fault, **who)
        session.fatal(SqlguardError("the proxy could not handle the message"))


def _ignore(_: bytes) -> None:
    pass


async def _make_again(session: AgentSession, backend: Backend) -> None:
    """Set and prepare on *backend* what *session* has set and prepared. Raises SqlguardError, Closed."""
    for text in session.memory.texts.values():
        error = await ask(backend, Query(text.encode(session.encoding)).encode())
        if error is not None:
            raise SqlguardError(f"what the session had set can't be set again: {error}", hint="connect again")
    for name, text, types in session.extended.prepared():
        parse = Parse(name, text.encode(session.encoding), types)
        if await ask(backend, parse.encode() + Sync().encode()) is not None:
            # Its tables have gone, say. To the client the statement has, as after DISCARD.
            session.extended.forget(name)


async def ask(backend: Backend, message: bytes) -> str | None:
    """Send a message that is answered with one ReadyForQuery; return the error, if there is one."""
    backend.side.write(message)
    reader = FrameReader(BACKEND_LIMITS)
    error: str | None = None
    while True:
        for frame in reader.receive(await backend.side.some()):
            assert isinstance(frame, Frame)  # noqa: S101 (this reader makes no runs)
            if frame.kind == ord("E"):
                error = (
                    dict(ErrorResponse.decode(frame.body).fields).get(b"M", b"").decode("utf-8", "replace")
                )
            elif frame.kind == ord("Z"):
                return error
