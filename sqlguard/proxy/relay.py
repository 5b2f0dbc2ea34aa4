"""
The server's bytes on their way to the client, with what is ours taken out.

Theory of operation. Whatever is sent to the server, by the client or by us, puts what it will be
answered with on a queue (`Expect`). The server answers strictly in order, so the head of it says
what the next reply belongs to: whether it is passed on, swallowed, held back or replaced. Only message headers
are looked at: rows and COPY data leave as slices of the bytes that came in, however large they are, and a row
that is cut by a read is passed on in its pieces. Everything else is small and taken whole.

An ErrorResponse is the answer to the head of the queue; after it the server skips to the next Sync, so the
queue is dropped to there as well. A statement that is refused is sent as one that the server itself will
fail (`REFUSED_TEXT`), and the error is replaced here: so the order of replies, the transaction's state and
the skipping to Sync are the server's own and can't come apart (WIRE section 3).

No I/O: `feed` takes bytes and returns bytes.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from sqlguard.errors import ProtocolViolation

#: Sent in place of a refused statement; no grammar takes it, in any transaction state.
REFUSED_TEXT = "sqlguard refused this statement"
#: Upper bound of a reply that is taken whole (errors, notices, row descriptions): PostgreSQL stays far below.
_WHOLE = 64 * 1024 * 1024
_ROW, _COPY_DATA = ord("D"), ord("d")
_HEADER = 5


class Reply(Enum):
    """What kind of client message is being answered."""

    QUERY = "query"
    PARSE = "parse"
    BIND = "bind"
    CLOSE = "close"
    DESCRIBE = "describe"
    EXECUTE = "execute"
    SYNC = "sync"


class Part(Enum):
    """What becomes of the replies to one statement of a Query message."""

    PASS = "pass"  # noqa: S105 (a disposition, no secret)
    SWALLOW = "swallow"
    #: Rows go out, the CommandComplete waits for the end of the message (or for `release`).
    HOLD = "hold"
    #: Rows are kept for us, nothing goes out.
    CAPTURE = "capture"


@dataclass(slots=True)
class Expect:
    """One expected reply; `done` is called when it is complete, or has `failed`, or was skipped to a Sync."""

    reply: Reply
    swallow: bool = False
    #: One part per statement of a Query; past its end everything is passed on.
    parts: tuple[Part, ...] = ()
    #: Replaces the ErrorResponse that answers this message (whole message, header included).
    error: bytes | None = None
    #: Verb that the client's command tag must begin with, per statement of a Query (one for an Execute).
    tags: tuple[str | None, ...] = ()
    #: Maps the position of an error in the text that was sent to the text that the client sent.
    position: Callable[[int], int | None] | None = None
    done: Callable[["Expect"], None] | None = None
    #: Bytes put before the held CommandComplete (a NOTICE with the report of a dry run).
    before_held: Callable[["Expect"], bytes] | None = None
    #: Neither the ReadyForQuery nor what is held is passed on: whoever asked does that.
    keep_ready: bool = False
    # --- what came of it
    statement: int = 0
    captured: list[bytes] = field(default_factory=list)
    held: bytes = b""
    tag: bytes = b""
    failed: bytes | None = None


class Relay:
    """One per session. `status` is the transaction status of the last ReadyForQuery: I, T or E."""

    def __init__(self) -> None:
        self.expected: deque[Expect] = deque()
        self.status = b"I"
        self.copying_in = False
        #: An extended message failed and its Sync has not been sent yet: the server ignores all up to it.
        self.skipping = False
        self.parameters: dict[str, str] = {}
        self._left = b""
        self._skip = 0
        self._skip_out = True

    def expect(self, item: Expect) -> None:
        """Queue what a message that is being sent will be answered with."""
        if item.reply is Reply.SYNC and self.copying_in:
            return  # the server ignores a Sync inside COPY-in (pgdog PR 886)
        if self.skipping:
            if item.reply is not Reply.SYNC:
                item.failed = b""
                if item.done:
                    item.done(item)
                return
            self.skipping = False
        self.expected.append(item)

    def feed(self, chunk: bytes) -> bytes:
        """Take what the server sent and return what the client gets. Raises ProtocolViolation."""
        out: list[bytes] = []
        if self._skip:
            taken = min(self._skip, len(chunk))
            self._skip -= taken
            if self._skip_out:
                out.append(chunk[:taken])
            chunk = chunk[taken:]
        if self._left:
            chunk = self._left + chunk
            self._left = b""
        self._scan(chunk, out)
        return out[0] if len(out) == 1 else b"".join(out)

    def _scan(self, chunk: bytes, out: list[bytes]) -> None:  # noqa: C901  # long: the hot loop, kept in one frame
        size = len(chunk)
        start = at = 0  # chunk[start:at] is passed on as it is
        while size - at >= _HEADER:
            kind = chunk[at]
            length = int.from_bytes(chunk[at + 1 : at + 5], "big")
            if length < 4:  # noqa: PLR2004 (the length counts itself)
                raise ProtocolViolation("the server sent a message of impossible length")
            end = at + 1 + length
            if kind in (_ROW, _COPY_DATA):
                passed = self._rows_pass()
                if end > size:
                    if passed is None:
                        break  # rows that are captured are taken whole
                    self._skip, self._skip_out = end - size, passed
                    if not passed:
                        out.append(chunk[start:at])
                        return
                    out.append(chunk[start:])
                    return
                if passed:
                    at = end
                    continue
                out.append(chunk[start:at])
                if passed is None:
                    self.expected[0].captured.append(chunk[at:end])
                start = at = end
                continue
            if end > size:
                if length > _WHOLE:
                    raise ProtocolViolation("the server sent a message that is too long")
                break
            replaced = self._reply(kind, chunk[at:end])
            if replaced is not None:
                out.append(chunk[start:at])
                out.append(replaced)
                start = end
            at = end
        out.append(chunk[start:at])
        self._left = chunk[at:]

    def _rows_pass(self) -> bool | None:
        """Say whether rows of the head go out (True), are dropped (False) or kept (None)."""
        if not self.expected:
            return True
        head = self.expected[0]
        part = self._part(head)
        if part is Part.CAPTURE:
            return None
        return not (head.swallow or part is Part.SWALLOW)

    @staticmethod
    def _part(head: Expect) -> Part:
        return head.parts[head.statement] if head.statement < len(head.parts) else Part.PASS

    def _reply(self, kind: int, message: bytes) -> bytes | None:
        """Return what goes out in place of *message*, None to pass it on as it is."""
        handler = _HANDLERS.get(kind)
        return handler(self, message) if handler else self._other(message)

    def _other(self, message: bytes) -> bytes | None:
        """RowDescription of a Query, notices, COPY responses: go where their statement's replies go."""
        if not self.expected or message[0] in b"AS":
            return None
        head = self.expected[0]
        quiet = head.swallow or self._part(head) in (Part.SWALLOW, Part.CAPTURE)
        return b"" if quiet else None

    def _parameter(self, message: bytes) -> bytes | None:
        name, _, value = message[5:-1].partition(b"\0")
        self.parameters[name.decode("ascii", "replace")] = value.decode("utf-8", "replace")
        return None

    def _copy_in(self, message: bytes) -> bytes | None:
        self.copying_in = True
        # Syncs that were sent behind the Execute are swallowed by the server's COPY-in.
        if self.expected and self.expected[0].reply is Reply.EXECUTE:
            while len(self.expected) > 1 and self.expected[1].reply is Reply.SYNC:
                del self.expected[1]
        return self._other(message)

    def _simple_done(self, message: bytes) -> bytes | None:
        """ParseComplete, BindComplete, CloseComplete, NoData, RowDescription of a Describe."""
        head = self.expected[0] if self.expected else None
        if head is None or head.reply is Reply.QUERY:
            return self._other(message)
        self.expected.popleft()
        if head.done:
            head.done(head)
        return b"" if head.swallow else None

    def _row_description(self, message: bytes) -> bytes | None:
        head = self.expected[0] if self.expected else None
        if head is not None and head.reply is Reply.DESCRIBE:
            return self._simple_done(message)
        return self._other(message)

    def _complete(self, message: bytes) -> bytes | None:
        """CommandComplete, EmptyQueryResponse, PortalSuspended."""
        self.copying_in = False
        head = self.expected[0] if self.expected else None
        if head is None:
            return None
        part, verb = self._part(head), self._verb(head)
        if verb and message[:1] == b"C":
            message = _with_verb(message, verb)
        if head.reply is Reply.EXECUTE:
            self.expected.popleft()
        head.statement += 1
        if part in (Part.PASS, Part.HOLD) and not head.swallow:
            head.tag = message[5:-1] if message[:1] == b"C" else b""
        if head.reply is Reply.EXECUTE and head.done:
            head.done(head)
        if head.swallow or part in (Part.SWALLOW, Part.CAPTURE):
            return b""
        if part is Part.HOLD:
            head.held += message
            return b""
        return message if verb else None

    @staticmethod
    def _verb(head: Expect) -> str | None:
        return head.tags[head.statement] if head.statement < len(head.tags) else None

    def _ready(self, message: bytes) -> bytes | None:
        self.status = message[5:6]
        self.copying_in = False
        while self.expected:
            head = self.expected.popleft()
            if head.reply in (Reply.QUERY, Reply.SYNC):
                before = b""
                if head.held and head.failed is None and not head.keep_ready:
                    before = (head.before_held(head) if head.before_held else b"") + head.held
                if head.done:
                    head.done(head)
                if head.swallow or head.keep_ready:
                    return before
                return before + message if before else None
            if head.done:
                head.done(head)
        return None

    def _error(self, message: bytes) -> bytes | None:
        self.copying_in = False
        if not self.expected:
            return None
        head = self.expected[0]
        head.failed = message
        if head.reply not in (Reply.QUERY, Reply.SYNC):
            self._skip_to_sync(message)
        if head.error is not None:
            return head.error
        if head.swallow and head.reply is Reply.QUERY:
            return b""  # our own conversation: whoever asked reads `failed`
        if head.position is not None:
            return _moved(message, head.position)
        return None

    def _skip_to_sync(self, message: bytes) -> None:
        while self.expected and self.expected[0].reply not in (Reply.QUERY, Reply.SYNC):
            skipped = self.expected.popleft()
            skipped.failed = message
            if skipped.done:
                skipped.done(skipped)
        self.skipping = not self.expected


_HANDLERS: dict[int, Callable[[Relay, bytes], bytes | None]] = {
    ord("1"): Relay._simple_done,  # noqa: SLF001 (a table of this class's own methods)
    ord("2"): Relay._simple_done,  # noqa: SLF001
    ord("3"): Relay._simple_done,  # noqa: SLF001
    ord("n"): Relay._simple_done,  # noqa: SLF001
    ord("T"): Relay._row_description,  # noqa: SLF001
    ord("C"): Relay._complete,  # noqa: SLF001
    ord("I"): Relay._complete,  # noqa: SLF001
    ord("s"): Relay._complete,  # noqa: SLF001
    ord("Z"): Relay._ready,  # noqa: SLF001
    ord("E"): Relay._error,  # noqa: SLF001
    ord("S"): Relay._parameter,  # noqa: SLF001
    ord("G"): Relay._copy_in,  # noqa: SLF001
    ord("W"): Relay._copy_in,  # noqa: SLF001
}


def _with_verb(message: bytes, verb: str) -> bytes:
    """Replace the verb of a CommandComplete's tag: `UPDATE 3` becomes `DELETE 3`."""
    _, _, rest = message[5:-1].partition(b" ")
    body = verb.encode() + (b" " + rest if rest else b"") + b"\0"
    return b"C" + (len(body) + 4).to_bytes(4, "big") + body


def _moved(message: bytes, position: Callable[[int], int | None]) -> bytes:
    """Map the position field (P) of an ErrorResponse, or drop it when it points into our own text."""
    fields: list[bytes] = []
    for item in message[5:-1].split(b"\0"):
        if item[:1] == b"P" and item[1:].isdigit():
            moved = position(int(item[1:]))
            if moved is None:
                continue
            item = b"P%d" % moved  # noqa: PLW2901 (the field, mapped)
        if item:
            fields.append(item + b"\0")
    body = b"".join(fields) + b"\0"
    return b"E" + (len(body) + 4).to_bytes(4, "big") + body
