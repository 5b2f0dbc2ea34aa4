"""
A session's way to the replica and back.

Theory of operation. One batch of the client's (a Query, or the extended messages up to a Sync) is carried to the
replica at a time, when nothing else of the session is under way. The session has put what it expects on its books
already, as for the primary: so whichever server answers, the answer fits, as long as the books have not been fed from
both. What the replica says first is held back, until it is an answer: a row, or the end of a statement. If it is an
error instead, or nothing more comes, then the very same bytes are sent to the primary, and the client gets only that
answer. An error that comes later is the client's, as from any server.

Statements that the client has prepared are prepared here when they are used for the first time, in front of the batch.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from time import monotonic
from typing import TYPE_CHECKING

import structlog

from sqlguard.errors import ProtocolViolation, SqlguardError
from sqlguard.proxy.backend import Backend
from sqlguard.proxy.berth import ask, failed
from sqlguard.proxy.portals import Prepared
from sqlguard.proxy.replica import Replica
from sqlguard.proxy.sockets import Closed, Side
from sqlguard.proxy.steps import sent
from sqlguard.wire.buffer import Bulk, Scanner
from sqlguard.wire.messages import (
    BackendKeyData,
    CancelRequest,
    Close,
    ErrorResponse,
    Parse,
    Query,
    ReadyForQuery,
    Terminate,
)
from sqlguard.wire.reports import error_response

if TYPE_CHECKING:
    from sqlguard.proxy.roaming import RoamingSession

log = structlog.get_logger()
_BODY = 5
_STATUS, _ERROR, _READY = b"SEZ"
#: Of messages of ours in front of a batch.
_OWN = frozenset(b"13")
#: What ends the holding back: a statement is complete, or COPY data begins.
_ANSWERS = frozenset(b"CIsH")
#: Bytes that are held back at most.
_HELD = 256 * 1024
#: Seconds that a login may take, and after which one that failed is tried again.
_PATIENCE, _AGAIN = 5.0, 1.0
#: The client's own doing (or its time-out's): not tried again at the primary.
_CANCELED = b"57014"
LogIn = Callable[[], Awaitable[Backend]]


class Detour:
    """One per session that may read at the replica; `is_busy` while a batch is there."""

    def __init__(self, session: "RoamingSession", replica: Replica, log_in: LogIn) -> None:
        self._session = session
        self._replica = replica
        self._log_in = log_in
        self._side: Side | None = None
        self._key: CancelRequest | None = None
        self._coming: asyncio.Task[None] | None = None
        #: What is prepared there, and what was SET.
        self._prepared: dict[bytes, Prepared | None] = {}
        self._texts: Mapping[str, str] = {}
        self._scanner = self._new_scanner()
        self.is_busy = False
        #: The answer to a batch that was taken back is still coming.
        self._is_draining = False
        self._retry_at = float("-inf")
        self.used_at = monotonic()
        self._begin(b"", {}, ())

    def _begin(self, batch: bytes, needs: Mapping[bytes, Prepared], shown: tuple[str, ...]) -> None:
        self._batch, self._needs, self._shown = batch, needs, shown
        self._held = b""
        #: Messages of ours in front of it that are not answered yet.
        self._own = 0
        #: The client may have got a part of the answer; it has failed before; all of it is here.
        self._is_told = self._has_failed = self._is_over = False
        #: What the replica has said as it closed.
        self._has_died = False

    def _new_scanner(self) -> Scanner:
        return Scanner(self._judge, self._bulk, self._replica.max_message_bytes)

    # --- there

    @property
    def is_free(self) -> bool:
        """Say whether a batch can be carried there: it has a connection, or there may be one."""
        if self.is_busy or self._is_draining:
            return False
        if self._side is not None and self._session.memory.texts != self._texts:
            self.leave()
        return self._side is not None or (monotonic() >= self._retry_at and self._replica.has_room())

    def carry(self, batch: bytes, needs: Mapping[bytes, Prepared], shown: tuple[str, ...]) -> None:
        """Carry *batch* there, which uses the statements *needs* that the client has prepared. Only if `is_free`."""
        self._begin(batch, needs, shown)
        self.is_busy = True
        self._scanner = self._new_scanner()
        if self._side is not None:
            self._send(self._side)
        else:
            self._replica.detours.add(self)
            self._coming = asyncio.get_running_loop().create_task(self._come())
            self._coming.add_done_callback(self._came)

    def _came(self, task: "asyncio.Task[None]") -> None:
        fault = None if task.cancelled() else task.exception()
        if isinstance(fault, Exception):
            failed(self._session, fault)

    async def _come(self) -> None:
        backend: Backend | None = None
        texts = self._session.memory.texts
        try:
            async with asyncio.timeout(_PATIENCE):
                backend = await self._log_in()
                for text in texts.values():
                    if await ask(backend, Query(text.encode(self._session.encoding)).encode()) is not None:
                        raise Closed
        except (SqlguardError, TimeoutError, OSError) as fault:
            log.info("no connection to the replica", error=str(fault), role=self._session.login.role)
            if backend is not None:
                backend.side.close()
            self._retry_at = monotonic() + _AGAIN
            self._coming = None
            self._replica.detours.discard(self)
            self._turn_back("no connection")
            return
        except asyncio.CancelledError:
            if backend is not None:
                backend.side.close()
            raise
        self._coming, self._texts, self._prepared = None, texts, {}
        self._side = side = backend.side
        if backend.key_data:
            data = BackendKeyData.decode(backend.key_data[_BODY:])
            self._key = CancelRequest(data.pid, data.key)

        def gone() -> None:
            self._gone(side)

        side.take_over(lambda data: self._from_replica(side, data), gone, gone, b"")
        if self._side is not None:
            self._send(side)

    def _send(self, side: Side) -> None:
        self._session.primary.hand_over(side)
        side.write(self._preparing() + self._batch)

    def _preparing(self) -> bytes:
        """Return what makes the replica know the statements of the batch, as the primary does."""
        missing = {n: p for n, p in self._needs.items() if self._prepared.get(n) is not p}
        if not missing:
            return b""
        known = self._session.extended
        gone = {n for n, p in self._prepared.items() if n not in missing and known.find_statement(n) is not p}
        for name in gone:
            del self._prepared[name]
        self._prepared.update(missing)
        # Closing what is not there is no error; what an error has left of it is not known.
        closed = [name for name in (*gone, *missing) if name]
        messages = [Close(is_portal=False, name=name).encode() for name in closed] + [
            Parse(name, sent(p.decision).encode(self._session.encoding), p.types).encode()
            for name, p in missing.items()
        ]
        self._own = len(messages)
        return b"".join(messages)

    def parsed(self, statement: Prepared | None) -> None:
        """The batch itself has made the unnamed statement there, or, with None, has taken it away."""
        if statement is None:
            self._prepared.pop(b"", None)
        else:
            self._prepared[b""] = statement

    # --- its answer

    def _from_replica(self, side: Side, data: bytes) -> None:
        if side is not self._side or not (self.is_busy or self._is_draining):
            return  # of a connection that was given up, a notice, or a word before it closes
        try:
            out = self._scanner.feed(data)
        except ProtocolViolation as fault:
            log.warning("protocol violation of the replica", error=fault.message)
            self._drop()
            return
        if self._is_draining:
            self._is_draining = not self._is_over
        elif self._has_failed:
            self._is_draining = not (self._is_over or self._has_died)
            self._turn_back("failed there")
        elif self._is_told or len(self._held) + len(out) > _HELD:
            self._tell(self._held + out)
        else:
            self._held += out

    def _tell(self, out: bytes) -> None:
        """Give the client a part of the answer, and go home if that is all."""
        self._held, self._is_told = b"", True
        if self._is_over:
            self._home()
        self._session.from_replica(out)
        if self._is_over:
            self._replica.reads["replica"] += 1
            self._session.resume()

    def _judge(self, kind: int, raw: bytes) -> bytes | None:
        if self._is_over:
            return b""  # a word as it closes, behind the answer
        if kind == _ERROR:
            return self._error(raw)
        if self._has_failed or self._is_draining:
            self._is_over = kind == _READY
            return b""
        if kind == _STATUS:
            return b""  # of the replica's session, which the client knows nothing of
        if self._own and kind in _OWN:
            self._own -= 1
            return b""
        self._is_over = kind == _READY
        self._is_told = self._is_told or self._is_over or kind in _ANSWERS
        return None

    def _bulk(self) -> Bulk:
        if self._has_failed or self._is_draining:
            return Bulk.DROP
        self._is_told = True
        return Bulk.PASS

    def _error(self, raw: bytes) -> bytes | None:
        report = ErrorResponse.decode(raw[_BODY:])
        said = dict(report.fields)
        self._has_died = self._has_died or report.is_fatal
        if self._is_draining:
            return b""
        if not self._is_told and said.get(b"C") != _CANCELED:
            self._has_failed = True
            return b""
        self._is_told = True
        if not report.is_fatal:
            return None
        # It ends the replica's session, not the client's.
        code, text = (said.get(field, b"").decode("utf-8", "replace") for field in (b"C", b"M"))
        return error_response("ERROR", code, text, encoding=self._session.encoding)

    # --- and back

    def _home(self) -> None:
        self.is_busy = False
        self.used_at = monotonic()
        if self._side is not None and not self._session.is_closed:
            self._side.hand_over(self._session.primary)

    def _turn_back(self, why: str) -> None:
        """Have the batch run at the primary; the client has got nothing of it yet."""
        batch = self._batch
        self._replica.reads[why] += 1
        if self._has_failed and not self._has_died:
            for text in self._shown:
                self._replica.avoid(text)
        # What was to be prepared may be there or not.
        self._prepared = dict.fromkeys(self._prepared)
        self._home()
        if not self._session.is_closed:
            self._session.run_at_primary(batch, batch)
            self._session.resume()

    def is_silent(self) -> None:
        """Nothing comes from the replica: give up what is under way, unless the client has got a part of an answer."""
        if self._coming is not None:
            self._come_no_more()
            self._turn_back("lost")
        elif self.is_busy and not self._is_told:
            self._drop()

    def _come_no_more(self) -> None:
        if self._coming is not None:
            self._coming.cancel()
            self._coming = None
            self._replica.detours.discard(self)

    def _drop(self) -> None:
        """Do without the connection, as if it were gone."""
        if self._key is not None:
            self._replica.cancel(self._key)
        if self._side is not None:
            self._gone(self._side)

    def _gone(self, side: Side) -> None:
        """A connection is gone, or says no more; one that was given up is nobody's business."""
        side.abort()
        if side is not self._side:
            return
        self._side = self._key = None
        self._replica.detours.discard(self)
        self._prepared = {}
        self._is_draining = False
        if not self.is_busy:
            return
        side.hand_over(self._session.primary)
        if not self._is_told:
            self._turn_back("lost")
            return
        self._replica.reads["cut short"] += 1
        text = "the replica went away in the middle of the answer"
        said = b"" if self._has_died else self._failure("57P01", text)
        self._answer(said)

    def _answer(self, said: bytes) -> None:
        """End the batch here, with *said* and a ReadyForQuery; what has gone out of a message can't be taken back."""
        self.is_busy = False
        held, self._held = self._held, b""
        if not self._session.is_between_messages:
            self._session.fatal(SqlguardError("the replica went away in the middle of a row"))
            return
        self._session.from_replica(held + said + ReadyForQuery(b"I").encode())
        self._session.resume()

    def _failure(self, sqlstate: str, text: str) -> bytes:
        return error_response("ERROR", sqlstate, text, encoding=self._session.encoding)

    # --- without it

    async def cancel(self) -> None:
        """Stop what is under way."""
        if self._coming is not None:
            self._come_no_more()
            self._answer(self._failure("57014", "canceling statement due to user request"))
        elif self._key is not None:
            await self._replica.pass_on(self._key)

    @property
    def may_leave(self) -> bool:
        return self._side is not None and not self.is_busy and not self._is_draining

    def leave(self) -> None:
        """Give the connection back. Only if `may_leave`."""
        side, self._side, self._key = self._side, None, None
        self._replica.detours.discard(self)
        self._prepared = {}
        if side is not None:
            side.lost = side.ended = None
            side.write(Terminate().encode())
            side.close()

    def close(self) -> None:
        """The session is over: stop what is under way there, and leave. Safe to repeat."""
        self._come_no_more()
        if (self.is_busy or self._is_draining) and self._key is not None:
            self._replica.cancel(self._key)
        self.is_busy = self._is_draining = False
        self._replica.detours.discard(self)
        self.leave()
