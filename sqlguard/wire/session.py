"""
The books of a running session: which client messages are legal, and whose each reply of the server is.

Theory of operation
-------------------
A session has two halves. The client's half is a table (`NEXT`): `takes(kind)` looks a message up, and says
whether it is to be sent on. The server's half is a queue: whatever is sent to the server, by the client or by
us, first puts an `Expect` on it with `expect`. PostgreSQL answers strictly in order, so the head of the queue
says whose the next reply is, and the table `ANSWERS` says what the reply means for it. `feed` takes the server's
bytes and returns what the client gets. A reply that no table knows ends the session: wrong books must not be
kept on. A proxy does this with each frame of a client:

    if session.takes(frame.kind):
        if reply := ASKS.get(frame.kind):
            session.expect(Expect(reply))          # or with `error`, `tags`, `position`, `done` …
        server.write(frame.encode())

*Messages of our own* go in anywhere: `expect(Expect(reply, swallow=True))`, then write. Exactly their replies
are taken out. An error of ours in the extended protocol makes the server skip the client's messages up to its
Sync, so the client is told of it, unless the Sync that ends the skipping is ours as well. Extended messages
of ours outside a client's pipeline need a Sync of ours behind them.

*A refusal* is a statement that the server itself fails: write `refusal(kind)` in place of the message, and
expect what it is answered with (`refused_reply`) with `error` set. So the order of replies, the skipping up to
Sync, the implicit transaction that is rolled back and the status E of an open one are the server's own and can't
come apart. Only where nothing is under way (`is_quiet`) and no transaction is open is answering alone as good.

*Errors.* In the extended protocol the server skips everything up to the next Sync, Query and FunctionCall too;
what is on the queue and is skipped is told so (`failed` is empty bytes). Once the client could know of the
error, its messages are dropped here (`takes` says no), so that an injected Sync does not revive a pipeline
whose owner thinks it dead. Wait for quiet after an injected Sync: what was sent behind it before the error was
known has run. An error in a Query, FunctionCall or Sync skips nothing. FATAL ends the session and always passes.

*COPY in.* The server ignores a Sync between CopyInResponse and the end of the data, so it is not put on the
queue there, and one that stands behind the Execute already is taken off again when the response comes. If the
COPY fails there is no telling whether such a Sync was ignored or came late enough to count: it may be
answered by one ReadyForQuery more, which is passed on. So send nothing of ours while `is_copying_in`, nor behind
the data before the client's next Sync.

*Status.* `status` is that of the last ReadyForQuery: that after all replies only if `is_quiet`.
"""

from collections import deque
from collections.abc import Sequence

from sqlguard.errors import ProtocolViolation
from sqlguard.wire import reports
from sqlguard.wire.answers import READY_HEADER, STATUSES, Answers
from sqlguard.wire.buffer import DEFAULT_LIMIT, Bulk, Scanner
from sqlguard.wire.messages import ErrorResponse, ParameterDescription
from sqlguard.wire.replies import ANSWERS as ANSWERS
from sqlguard.wire.replies import ASKS as ASKS
from sqlguard.wire.replies import PLAIN as PLAIN
from sqlguard.wire.replies import REFUSED_TEXT as REFUSED_TEXT
from sqlguard.wire.replies import Effect as Effect
from sqlguard.wire.replies import Expect as Expect
from sqlguard.wire.replies import Part as Part
from sqlguard.wire.replies import Reply as Reply
from sqlguard.wire.replies import refusal as refusal
from sqlguard.wire.replies import refused_reply as refused_reply
from sqlguard.wire.states import NEXT as NEXT
from sqlguard.wire.states import Event as Event
from sqlguard.wire.states import State as State

#: What has a ReadyForQuery of its own, and so does not make the server skip.
_READY_OF_ITS_OWN = frozenset({Reply.QUERY, Reply.FUNCTION, Reply.SYNC})
_ERROR, _READY, _STATUS, _NOTICE, _NOTIFICATION = b"EZSNA"
_BODY = 5


class Session:
    """One per session, from the first ReadyForQuery on. `status` is the last one's: I, T or E."""

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        """*limit* bounds a message that has to be held whole: all but rows and COPY data."""
        self.expected: deque[Expect] = deque()
        #: Something of the answer to the first of them has come.
        self._has_begun = False
        self.state = State.READY
        self._legal = NEXT[State.READY]
        self.status = b"I"
        self.parameters: dict[str, str] = {}
        #: The server has said that the client's encoding is UTF8.
        self.is_utf8 = False
        #: The server skips up to a Sync that has not been sent yet.
        self._server_skips = False
        #: The server takes what comes for COPY data, up to a CopyDone or CopyFail that has not been sent yet.
        self.is_copying_in = False
        #: Syncs that the COPY under way swallows, unless it fails first.
        self._copy_syncs = 0
        #: ReadyForQuery messages that may come or not, because of such a Sync.
        self._spare_readies = 0
        self.scanner = Scanner(self._judge, self._bulk, limit, passes=self._passes)
        #: It holds no part of a message.
        self._is_whole = True
        self._answers = Answers()

    # --- the client's half

    def takes(self, kind: int) -> bool:
        """Judge a client's message by the table; False if it is to be dropped. Raises ProtocolViolation."""
        after = self._legal.get(kind)
        if after is None:
            raise ProtocolViolation(f"a message of type `{chr(kind)}` is not legal here ({self.state})")
        if after is not self.state:
            self._enter(after)
        return after is not State.SKIPPING

    def _enter(self, state: State) -> None:
        self.state, self._legal = state, NEXT[state]

    def _happens(self, event: Event) -> None:
        """Let the server's doing change what the client may send, if it does."""
        self._enter(self._legal.get(event, self.state))

    def expect(self, item: Expect) -> None:
        """Put what is about to be sent on the queue. Must come before it is sent."""
        reply = item.reply
        if reply is Reply.COPY_END:
            if self.is_copying_in:
                self.is_copying_in = False
            elif self.expected:
                self.expected.append(item)  # its COPY may begin yet
            return
        if reply is Reply.SYNC:
            if self.is_copying_in:
                self._copy_syncs += 1
                return
            self._server_skips = False
        elif self._server_skips:
            item.finish(b"")
            return
        self.expected.append(item)

    def expect_plainly(self, items: Sequence[Expect]) -> None:
        """Do the same with several of `PLAIN` at once; a Sync may only be the last of them."""
        if self._server_skips or self.is_copying_in:
            for item in items:
                self.expect(item)
        else:
            self.expected.extend(items)

    @property
    def is_quiet(self) -> bool:
        """Say whether everything that was sent has been answered."""
        return not self.expected

    @property
    def is_skipping(self) -> bool:
        """Say whether what is sent now is skipped, by the server or by us."""
        return self._server_skips or self.state is State.SKIPPING

    def abandon(self, failed: bytes = b"") -> None:
        """The server is gone: nothing that was expected will come."""
        while self.expected:
            self.expected.popleft().finish(failed)

    # --- the server's half

    def feed(self, chunk: bytes) -> bytes:
        """Take what the server sent and return what the client gets. Raises ProtocolViolation."""
        return chunk if self.takes_whole(chunk) else self.scan(chunk)

    def scan(self, chunk: bytes) -> bytes:
        """Do the same with what is no whole plain answer, or may be none."""
        out = self.scanner.feed(chunk)
        self._is_whole = self.scanner.is_between_messages
        return out

    def takes_whole(self, chunk: bytes) -> bool:
        """
        Take whole answers to plain messages, as most chunks are: they go out as they came.

        False, and nothing is done, if it is not one: it has to be scanned.
        """
        if chunk[-6:-1] != READY_HEADER or not self._is_whole:
            return False
        # After a COPY that failed, a ReadyForQuery of its own does not yet say that no further one comes.
        if self.is_copying_in or self._copy_syncs or self._spare_readies:
            return False
        expected = self.expected
        complete = self._answers.complete(chunk, expected, has_begun=self._has_begun)
        if not complete:
            return False
        if complete == len(expected):
            expected.clear()
            self._has_begun = False
        else:
            for _ in range(complete):
                self._pop()
        self.status = chunk[-1:]
        return True

    def _bulk(self) -> Bulk:
        head = self.expected[0] if self.expected else None
        if head is None or (head.reply is not Reply.QUERY and head.reply is not Reply.EXECUTE):
            raise ProtocolViolation("the server sent rows that nobody asked for")
        self._has_begun = True
        if not head.parts and not head.swallow:
            return Bulk.PASS
        if (part := head.part) is Part.CAPTURE or part is Part.KEEP:
            return Bulk.JUDGE
        return Bulk.DROP if part is Part.SWALLOW else Bulk.PASS

    def _passes(self, kind: int) -> bool:
        """Take a reply to a plain message without looking at it: most are such."""
        if not self.expected:
            return False
        head = self.expected[0]
        effect = ANSWERS[head.reply].get(kind)
        if effect is not Effect.MORE and effect is not Effect.PART and effect is not Effect.DONE:
            return False
        if not head.is_plain or self.is_copying_in or self._copy_syncs:
            return False
        if effect is Effect.DONE:
            self._pop()
        self._has_begun = True
        self._spare_readies = 0
        return True

    def _judge(self, kind: int, raw: bytes) -> bytes | None:
        """Return what goes out in place of the message *raw*, None for the message itself."""
        if kind == _READY:
            return self._ready(raw)
        if kind == _ERROR:
            return self._error(raw)
        if kind in (_NOTICE, _NOTIFICATION, _STATUS):
            return self._unasked(kind, raw)
        head = self.expected[0] if self.expected else None
        effect = ANSWERS[head.reply].get(kind) if head is not None else None
        if head is None or effect is None:
            raise ProtocolViolation(f"the server sent a `{chr(kind)}` that answers nothing")
        self._has_begun = True
        self._spare_readies = 0
        if effect is Effect.COPY_BEGINS:
            self._copy_begins()
        elif effect is not Effect.MORE:
            return self._complete(head, kind, raw, effect)
        return self._more(head, kind, raw)

    def _more(self, head: Expect, kind: int, raw: bytes) -> bytes | None:
        if head.hidden_parameters and raw[0] == ord("t"):
            types = ParameterDescription.decode(raw[_BODY:]).types[: -head.hidden_parameters]
            raw = ParameterDescription(types).encode()
        elif not head.parts and not head.swallow:
            return None
        part = head.part
        if part is Part.KEEP or (part is Part.CAPTURE and kind == ord("D")):
            head.capture(raw)
        return b"" if part in (Part.SWALLOW, Part.CAPTURE) else raw

    def _complete(self, head: Expect, kind: int, raw: bytes, effect: Effect) -> bytes | None:
        """One statement, or the whole message, is answered."""
        if self._copy_syncs or self.is_copying_in:
            self._copy_ends()
        if effect is Effect.DONE:
            self._pop()
        if not head.parts and not head.tags and not head.swallow:
            out = None
            if kind == ord("C"):
                head.tag = raw[_BODY:-1]
        else:
            out = self._complete_specially(head, kind, raw)
        head.statement += 1
        if effect is Effect.DONE:
            head.finish()
        return out

    def _complete_specially(self, head: Expect, kind: int, raw: bytes) -> bytes:
        part = head.part
        if part is Part.CAPTURE and kind == ord("T"):
            head.capture(raw)
        if part in (Part.SWALLOW, Part.CAPTURE):
            return b""
        if kind == ord("C"):
            if head.verb:
                raw = reports.with_verb(raw, head.verb)
            head.tag = raw[_BODY:-1]
        if part is Part.HOLD or part is Part.KEEP:
            head.held += raw
            return b""
        return raw

    def _ready(self, raw: bytes) -> bytes | None:
        self.status = raw[_BODY:]
        if self.status not in STATUSES:
            raise ProtocolViolation("the server sent an unknown transaction status")
        head = self.expected[0] if self.expected else None
        # A Query and a FunctionCall have had another answer before this one.
        if (
            head is None
            or head.reply not in _READY_OF_ITS_OWN
            or not (self._has_begun or head.reply is Reply.SYNC)
        ):
            self._spare_ready()
            return None
        self._pop()
        held = b""
        if head.held and head.failed is None and not head.keep_ready:
            held = (head.before_held(head) if head.before_held else b"") + head.held
        head.finish()
        if head.swallow or head.keep_ready:
            return held
        return held + raw if held else None

    def _spare_ready(self) -> None:
        """Answer a Sync of which it was not known whether it would be answered."""
        if not self._spare_readies:
            raise ProtocolViolation("the server sent a ReadyForQuery that answers nothing")
        self._spare_readies -= 1
        self._server_skips = False
        self._happens(Event.IS_READY)

    def _unasked(self, kind: int, raw: bytes) -> bytes | None:
        if kind == _STATUS:
            name, _, value = raw[_BODY:-1].partition(b"\0")
            if name == b"client_encoding":
                self.is_utf8 = value == b"UTF8"
            self.parameters[name.decode("ascii", "replace")] = value.decode("utf-8", "replace")
            return None
        if kind == _NOTICE and self.expected and self.expected[0].part in (Part.SWALLOW, Part.CAPTURE):
            return b""
        return None

    def _error(self, raw: bytes) -> bytes | None:
        report = ErrorResponse.decode(raw[_BODY:])
        head = self.expected[0] if self.expected else None
        if report.is_fatal or head is None:
            # It answers nothing: the server ends the session, or complains of what has no reply.
            if report.is_fatal:
                self.abandon(raw)
            return None
        self._has_begun = True
        told = reports.without_ours(raw)
        is_changed, raw = told is not raw, told
        head.failed = raw
        self._spare_readies = self._copy_syncs
        is_hidden = head.swallow
        if head.reply not in _READY_OF_ITS_OWN:
            is_hidden = self._skip(head, raw)
        self._copy_ends()
        if isinstance(head.error, bytes):
            return head.error
        if head.error is not None:
            raw, is_changed = head.error(raw), True
        if is_hidden or not raw:
            return b""
        if head.position is not None:
            return reports.moved(raw, head.position)
        return raw if is_changed else None

    def _skip(self, head: Expect, raw: bytes) -> bool:
        """Skip up to the next Sync; say whether the client need not know."""
        sync = next((item for item in self.expected if item.reply is Reply.SYNC), None)
        is_ours = sync is not None and sync.swallow
        is_hidden = head.swallow and head.error is None and is_ours
        if not is_hidden and (sync is None or is_ours):
            self._happens(Event.FAILS)
        self._server_skips = sync is None
        self._has_begun = False
        while self.expected and self.expected[0] is not sync:
            skipped = self.expected.popleft()
            skipped.finish(raw if skipped is head else b"")
        return is_hidden

    def _pop(self) -> None:
        self.expected.popleft()
        self._has_begun = False
        # What ended a COPY that was none: the server ignores it.
        while self.expected and self.expected[0].reply is Reply.COPY_END:
            self.expected.popleft()

    # --- COPY in

    def _copy_begins(self) -> None:
        """Take off the queue what the server will read as part of the COPY."""
        self._copy_syncs = 0
        kept = [self.expected.popleft()]
        while self.expected:
            item = self.expected.popleft()
            if item.reply is Reply.COPY_END:
                break
            if item.reply is Reply.SYNC:
                self._copy_syncs += 1
            else:
                kept.append(item)
        else:
            self.is_copying_in = True
            in_pipeline = kept[0].reply is Reply.EXECUTE
            self._happens(Event.COPY_BEGINS_IN_PIPELINE if in_pipeline else Event.COPY_BEGINS)
        self.expected.extendleft(reversed(kept))

    def _copy_ends(self) -> None:
        self._copy_syncs = 0
        self.is_copying_in = False
        self._happens(Event.COPY_ENDS)
