"""Which replies answer which message, as tables, and what the sender of a message expects of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from sqlguard.wire.messages import Parse, Query

#: Sent in place of what is refused; no grammar takes it, in any encoding and any transaction state.
REFUSED_TEXT = "sqlguard refused this statement"
#: Never exists: a Parse of the unnamed statement would take the client's own away.
_REFUSED_NAME = b"sqlguard refused"
#: Rows that are captured for us; more is no report but a result, and is cut off.
CAPTURE_LIMIT = 16 * 1024 * 1024


class Reply(StrEnum):
    """What kind of message is being answered."""

    QUERY = "query"
    FUNCTION = "function"
    PARSE = "parse"
    BIND = "bind"
    DESCRIBE = "describe"
    EXECUTE = "execute"
    CLOSE = "close"
    SYNC = "sync"
    #: CopyDone and CopyFail have no reply of their own; they end what the server takes for COPY data.
    COPY_END = "copy end"


class Part(Enum):
    """What becomes of the replies to one statement of a Query, or to an Execute."""

    PASS = "pass"  # noqa: S105 (a disposition, no secret)
    SWALLOW = "swallow"
    #: Rows go out, the CommandComplete waits in `held` for the ReadyForQuery, or for whoever asked.
    HOLD = "hold"
    #: Rows are kept in `captured`, nothing goes out.
    CAPTURE = "capture"
    #: As HOLD, and the rows and their description are kept in `captured` too.
    KEEP = "keep"


class Effect(Enum):
    """What a reply means for the message that it answers."""

    MORE = "more"
    #: One statement of it is complete.
    PART = "part"
    COPY_BEGINS = "copy begins"
    DONE = "done"
    READY = "ready"


def _row(text: str, effect: Effect) -> dict[int, Effect]:
    return dict.fromkeys(text.encode(), effect)


_COPIES = _row("GW", Effect.COPY_BEGINS) | _row("Hdc", Effect.MORE)
#: What may come while a message is at the head of the queue. ErrorResponse may always; the three that
#: nobody asks for (notices, notifications, parameters) stand outside the order.
ANSWERS: dict[Reply, dict[int, Effect]] = {
    Reply.QUERY: _COPIES | _row("TD", Effect.MORE) | _row("CI", Effect.PART) | _row("Z", Effect.READY),
    Reply.FUNCTION: _row("V", Effect.MORE) | _row("Z", Effect.READY),
    Reply.PARSE: _row("1", Effect.DONE),
    Reply.BIND: _row("2", Effect.DONE),
    Reply.DESCRIBE: _row("t", Effect.MORE) | _row("Tn", Effect.DONE),
    Reply.EXECUTE: _COPIES | _row("D", Effect.MORE) | _row("CIs", Effect.DONE),
    Reply.CLOSE: _row("3", Effect.DONE),
    Reply.SYNC: _row("Z", Effect.READY),
}
#: A message of a client and what it is answered with; Flush, COPY data and Terminate are not answered.
ASKS: dict[int, Reply] = {
    ord("Q"): Reply.QUERY,
    ord("F"): Reply.FUNCTION,
    ord("P"): Reply.PARSE,
    ord("B"): Reply.BIND,
    ord("D"): Reply.DESCRIBE,
    ord("E"): Reply.EXECUTE,
    ord("C"): Reply.CLOSE,
    ord("S"): Reply.SYNC,
    ord("c"): Reply.COPY_END,
    ord("f"): Reply.COPY_END,
}


def refusal(kind: int, statement: bytes = _REFUSED_NAME) -> bytes:
    """Return what to send in place of a refused message; *statement* is the name if it is a Parse."""
    text = REFUSED_TEXT.encode()
    if refused_reply(kind) is Reply.QUERY:
        return Query(text).encode()
    return Parse(statement, text).encode()


def refused_reply(kind: int) -> Reply:
    """Return what `refusal` is answered with."""
    return Reply.QUERY if ASKS[kind] in (Reply.QUERY, Reply.FUNCTION) else Reply.PARSE


@dataclass(slots=True, eq=False)
class Expect:
    """One message on its way, what its replies become, and what came of it."""

    reply: Reply
    #: Nothing of it goes out, except an error that the client has to know of (see `Session`).
    swallow: bool = False
    #: One part per statement of a Query (one for an Execute); past its end everything is passed on.
    parts: tuple[Part, ...] = ()
    #: Goes out in place of the ErrorResponse that answers this message; a function gets the server's.
    error: bytes | Callable[[bytes], bytes] | None = None
    #: Verb that the client's command tag must begin with, per statement of a Query (one for an Execute).
    tags: tuple[str | None, ...] = ()
    #: Maps the position of an error in the text that was sent to the text that the client sent.
    position: Callable[[int], int | None] | None = None
    #: Called once, when the replies are complete, or the message failed or was skipped.
    done: Callable[["Expect"], None] | None = None
    #: Makes what goes out before the held CommandComplete (a NOTICE with the report of a dry run).
    before_held: Callable[["Expect"], bytes] | None = None
    #: Neither the ReadyForQuery nor what is held is passed on: whoever asked does that.
    keep_ready: bool = False
    #: Parameters that we appended to the statement: cut off a ParameterDescription.
    hidden_parameters: int = 0
    # --- what came of it
    #: Statements of it that are complete.
    statement: int = 0
    #: Whole messages of parts that are captured (or kept), up to CAPTURE_LIMIT bytes.
    captured: list[bytes] = field(default_factory=list)
    captured_bytes: int = 0
    held: bytes = b""
    #: The last command tag that was meant for the client, as it went out.
    tag: bytes = b""
    #: The server's ErrorResponse; empty bytes if it was skipped because of an earlier one.
    failed: bytes | None = None

    @property
    def part(self) -> Part:
        part = self.parts[self.statement] if self.statement < len(self.parts) else Part.PASS
        return Part.SWALLOW if self.swallow and part is not Part.CAPTURE else part

    @property
    def verb(self) -> str | None:
        return self.tags[self.statement] if self.statement < len(self.tags) else None

    @property
    def was_cut(self) -> bool:
        """Say whether there were more rows than are captured."""
        return self.captured_bytes > CAPTURE_LIMIT

    def capture(self, row: bytes) -> None:
        self.captured_bytes += len(row)
        if self.captured_bytes <= CAPTURE_LIMIT:
            self.captured.append(row)

    @property
    def is_plain(self) -> bool:
        """Say whether its replies go out as they come, and nobody waits for what comes of it."""
        return not (
            self.parts or self.tags or self.swallow or self.done or self.hidden_parameters or self.keep_ready
        )

    def finish(self, failed: bytes | None = None) -> None:
        if failed is not None and self.failed is None:
            self.failed = failed
        if self.done is not None:
            done, self.done = self.done, None
            done(self)


#: For messages whose replies just pass: nobody reads what comes of them, so one object serves all.
PLAIN: dict[Reply, Expect] = {
    reply: Expect(reply)
    for reply in (
        Reply.QUERY,
        Reply.PARSE,
        Reply.BIND,
        Reply.DESCRIBE,
        Reply.EXECUTE,
        Reply.CLOSE,
        Reply.SYNC,
    )
}
