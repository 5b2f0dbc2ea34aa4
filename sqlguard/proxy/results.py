"""
Keeps one statement's result within its limits, on the way from the server to the client.

Theory of operation. A chunk that holds whole answers and is too short to go beyond the limits is passed on unseen, as
most are. Of others the headers are walked over and rows counted. What is too much is cut off: the rows behind the
limit are dropped and the statement is cancelled; the server's own error then stands where its CommandComplete would,
and goes out as SG006. A server that was done before the cancel came has said CommandComplete: that goes out as the
error, nothing more does up to the ReadyForQuery, and a block that is open is made to fail as the client believes it
has. Answers are held back until the cancel is through, so that it hits nothing that the client asks later.
"""

from enum import Enum, auto

from sqlguard.budget import ResultLimits
from sqlguard.wire.buffer import HEADER, Rows

_HEADER_BYTES = 5
_LEAST_ROW = 7
_READY = b"Z\0\0\0\5"
_ROWS = frozenset(b"Dd")
_ENDS = frozenset(b"CI")
_UNASKED = frozenset(b"NAS")
#: Behind these rows are counted anew.
_RESETS = frozenset(b"CIEZ")
_READING = (b"SELECT", b"FETCH", b"COPY", b"SHOW", b"EXPLAIN")


class State(Enum):
    PASSING = auto()
    #: Rows are dropped until the server says how the statement ended.
    CUTTING = auto()
    #: The client has been told of an error that the server does not know of; nothing goes out before its ReadyForQuery.
    SILENT = auto()


class TooLate(Exception):
    """Raised when what the client was told can't be made true: the session has to end."""


class Results:
    """
    Counts rows and bytes of one session's results.

    *error* is the ErrorResponse that goes out for a result that is too large.
    """

    def __init__(self, limits: ResultLimits, error: bytes) -> None:
        self._rows_limit = limits.rows if limits.rows is not None else 2**63
        self._bytes_limit = limits.bytes if limits.bytes is not None else 2**63
        self.error = error
        #: So many bytes can't go beyond the limits.
        self.harmless = min(self._rows_limit * _LEAST_ROW, self._bytes_limit)
        self.state = State.PASSING
        #: A result is under way.
        self.is_open = False
        self._rows = self._bytes = 0
        self._held = b""
        #: Bytes still to come of the message under way, and whether they go out.
        self._rest = 0
        self._rest_passes = True
        #: The open block must be made to fail: the ReadyForQuery that says so was changed to E.
        self.must_fail = False

    def passes(self, out: bytes) -> bool:
        """Say whether *out* goes out as it is, which most does; otherwise give it to `take`."""
        return not self.is_open and len(out) <= self.harmless and out[-6:-1] == _READY

    def adds(self, rows: Rows | None, size: int) -> bool:
        """Do the same as `skims` for so many bytes that are nothing but *rows*."""
        if rows is None or self.state is not State.PASSING or self._held or not self._rest_passes:
            return False
        number, total = self._rows + rows.number, self._bytes + size - rows.before + rows.behind
        if self._rest != rows.before or number > self._rows_limit or total > self._bytes_limit:
            return False
        self._rows, self._bytes, self._rest, self.is_open = number, total, rows.behind, True
        return True

    def skims(self, out: bytes) -> bool:
        """Count rows of *out* and say whether it goes out as it is; False, and nothing is done: give it to `take`."""
        if self.state is not State.PASSING or self._held or not self._rest_passes:
            return False
        at, size = self._rest, len(out)
        rows, total, is_open = self._rows, self._bytes, True
        unpack_from = HEADER.unpack_from
        while size - at >= _HEADER_BYTES:
            kind, length = unpack_from(out, at)
            at += 1 + length
            if kind in _ROWS:
                rows += 1
                total += 1 + length
                is_open = True
                continue
            if at > size or rows > self._rows_limit or total > self._bytes_limit:
                return False
            if kind in _RESETS:
                rows = total = 0
                is_open = kind != _READY[0]
            else:
                is_open = True
        if size - at > 0 or rows > self._rows_limit or total > self._bytes_limit:
            return False
        self._rows, self._bytes, self._rest = rows, total, at - size
        self.is_open = is_open or at > size
        return True

    def take(self, out: bytes) -> bytes:  # long: one loop over messages
        """Return what goes out of *out*. Raises TooLate."""
        pieces: list[bytes] = []
        at = start = 0
        if self._rest:
            at = min(self._rest, len(out))
            self._rest -= at
            start = 0 if self._rest_passes else at
        elif self._held:
            out, self._held = self._held + out, b""
        size = len(out)
        while size - at >= _HEADER_BYTES:
            kind, length = HEADER.unpack_from(out, at)
            end = at + 1 + length
            self.is_open = True
            if kind in _ROWS:
                passes = self._counts(length + 1)
            elif end > size:
                break
            else:
                replaced = self._ends(kind, out[at:end])
                passes = replaced is None
                if replaced:
                    pieces += [out[start:at], replaced]
                    start = end
            if not passes:
                pieces.append(out[start:at])
                start = min(end, size)
            if end > size:
                self._rest, self._rest_passes = end - size, passes
            at = min(end, size)
        pieces.append(out[start:at])
        self._held = out[at:]
        # A message that is here in part is not over with the ReadyForQuery before it: nothing may pass it.
        self.is_open = self.is_open or bool(self._held or self._rest)
        return b"".join(pieces)

    def _counts(self, size: int) -> bool:
        if self.state is State.PASSING:
            self._rows += 1
            self._bytes += size
            if self._rows > self._rows_limit or self._bytes > self._bytes_limit:
                self.state = State.CUTTING
        return self.state is State.PASSING

    def _ends(  # noqa: PLR0911 (a table of states and messages)
        self, kind: int, raw: bytes
    ) -> bytes | None:
        """Return what goes out in place of a message that is no row, None for the message itself."""
        if kind in _UNASKED:
            return None
        if kind == _READY[0]:
            return self._ready(raw)
        was = self.state
        if kind == ord("E"):
            self._next(State.PASSING if was is State.CUTTING else was)
            return self.error if was is State.CUTTING else (b"" if was is State.SILENT else None)
        if was is State.SILENT:
            if kind in _ENDS and not raw[_HEADER_BYTES:].startswith(_READING):
                raise TooLate
            return b""
        if was is State.CUTTING:
            if kind in _ENDS or kind == ord("s"):
                self._next(State.SILENT)
                return self.error
            return b""
        if kind in _ENDS:
            self._next(was)
        return None

    def _ready(self, raw: bytes) -> bytes | None:
        was = self.state
        self._next(State.PASSING)
        self.is_open = False
        if was is State.SILENT and raw[-1:] == b"T":
            self.must_fail = True
            return raw[:-1] + b"E"
        return None

    def _next(self, state: State) -> None:
        self.state = state
        self._rows = self._bytes = 0
