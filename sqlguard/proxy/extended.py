"""
The extended query protocol: Parse, Bind, Describe, Execute, Close, Flush, Sync, in pipelines of any shape.

Decided at Parse, journaled at Execute. Messages keep their names and their order. Outside a block the messages
up to a Sync are one implicit transaction, and it can be made writable only before anything has run in it: so
the SET goes in front of its first message. A statement or portal that is not known here was never decided: it is
answered as if it did not exist.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sqlguard import gate as gates
from sqlguard.errors import NotUnderstood, ProtocolViolation
from sqlguard.plan import Decision
from sqlguard.policy.verdict import Effect, Verdict
from sqlguard.proxy import again
from sqlguard.proxy.names import Names, misleading
from sqlguard.proxy.portals import Portal, Prepared
from sqlguard.proxy.steps import Steps
from sqlguard.statement.model import Kind, Statement
from sqlguard.wire.buffer import HEADER
from sqlguard.wire.messages import Close, Parse
from sqlguard.wire.reader import text_at
from sqlguard.wire.replies import ASKS, PLAIN, Expect, Reply, refusal, refused_reply
from sqlguard.wire.reports import error_response
from sqlguard.wire.runs import SYNC, TAILS

if TYPE_CHECKING:
    from sqlguard.proxy.session import AgentSession

_PARSE, _BIND, _DESCRIBE, _CLOSE, _EXECUTE, _SYNC, _CALL = b"PBDCESF"
_PLAIN = {kind: PLAIN[ASKS[kind]] for kind in b"PBDES"}
_HEADER_BYTES = 5
_EMPTY = Decision(Statement(Kind.EMPTY, ""), Verdict(Effect.ALLOW), "")


class Extended(Steps):
    """Handles the extended protocol's messages of one session."""

    def __init__(self, session: "AgentSession") -> None:
        self._session = session
        self._statements: Names[Prepared] = Names()
        self._portals: Names[Portal] = Names()
        #: Messages have been sent since the last Sync: the implicit transaction may have begun.
        self.is_open = False
        #: It may write.
        self._writable = False
        #: It matters whether all of it succeeds: it writes, or has changed the session.
        self._is_watched = False
        #: Something of it has failed.
        self._failed = False
        #: Actions of it that its Sync will commit.
        self._actions: list[int] = []
        self.repeated: dict[int, dict[str, Any]] = {}  # of actions that were answered from their keys
        #: The unnamed statement and portal as long as only plain reads were made so: whichever it is, it may run.
        self._plain_statement: Prepared | None = None
        self._plain: Portal | None = None
        #: The fast way of each message: forwards it if that needs no waiting, and says whether it did.
        self.ways: dict[int, Callable[[bytes], bool]] = {
            ord("P"): self._parse,
            ord("B"): self._bind,
            ord("D"): self._describe,
            ord("E"): self._execute,
            ord("C"): self._close,
            ord("S"): self._sync,
            ord("H"): self._flush,
            ord("F"): self._call,
        }

    # --- the fastest way

    # long: one loop over a few bytes, the hot path
    def passes(self, data: bytes) -> bool:  # noqa: C901, PLR0911, PLR0912 (the same)
        """
        Forward *data* at once if it runs plain reads on the unnamed portal, up to its one Sync at the end.

        That is what drivers send most. False if it has to be looked at message by message; nothing is done then.
        """
        session = self._session
        passing = session.passing
        # Only in a block the Sync at the end leaves everything as it is where the session has changed something.
        if passing is None or self.is_open or (session.memory.is_open and session.books.status == b"I"):
            return False
        if self._portals.is_used and not self._has_plain_portal():
            return False
        statement, portal = self._plain_statement, self._plain
        names = self._statements
        replies: tuple[Expect, ...] = ()
        at, kind, size = 0, 0, len(data)
        while size - at >= _HEADER_BYTES:
            kind, length = HEADER.unpack_from(data, at)
            end = at + 1 + length
            if kind == _BIND:
                # The portal comes first, and has no name here, and then the statement.
                start = at + _HEADER_BYTES + 1
                name = data[start : data.find(b"\0", start, end)]
                prepared = names.find(name) if name else statement
                if data[start - 1] or prepared is None or not prepared.is_plain:
                    return False
                if prepared.gate is not passing.gate:
                    return False
                portal = prepared.portal
                tail = TAILS.get(data[end:])
                if tail is not None:
                    replies = replies + tail if replies else tail
                    at, kind = size, _SYNC
                    break
            elif kind == _EXECUTE:
                if portal is None or data[at + _HEADER_BYTES]:
                    return False
            elif kind == _PARSE:
                statement = passing.prepared(data[at:end])
                if statement is None or names.find(b"") is not None:
                    return False
            elif kind != _DESCRIBE and (kind != _SYNC or end != size):
                return False
            replies += (_PLAIN[kind],)
            at = end
        if at != size or kind != _SYNC:
            return False
        session.books.expect_plainly(replies)
        self._plain_statement, self._plain = statement, portal
        passing.hits += 1
        session.server.write(data)
        return True

    def _has_plain_portal(self) -> bool:
        """Say whether no portal is there but the unnamed one of a plain read; from then on it is `_plain`."""
        portal = self._portals.only(b"")
        if portal is None or not portal.is_fast:
            return False
        self._portals.forget(b"")
        self._plain = portal
        return True

    # --- the fast way

    def _send(self, raw: bytes, expect: Expect) -> None:
        session = self._session
        if self._is_watched:
            expect = self._watched(expect)
        session.books.expect(expect)
        session.server.write(raw)
        self.is_open = True

    def _watched(self, expect: Expect) -> Expect:
        """Return *expect* so that a failure of the transaction in which actions are under way is noted."""
        if expect is PLAIN.get(expect.reply):
            expect = Expect(expect.reply)
        self._watch(expect)
        return expect

    def _watch(self, expect: Expect) -> None:
        """Note a failure of the transaction in which actions are under way."""
        then = expect.done

        def done(e: Expect) -> None:
            if e.failed is not None:
                self._failed = True
            if then is not None:
                then(e)

        expect.done = done

    def _refuse(self, kind: int, error: bytes) -> None:
        """Have the server fail in place of a message, so that it skips to the Sync as after any error."""
        expect = Expect(refused_reply(kind), error=error)
        if self._is_watched:
            self._watch(expect)
        self._session.books.expect(expect)
        self._session.server.write(refusal(kind))
        self.is_open = self.is_open or refused_reply(kind) is Reply.PARSE

    def _parse(self, raw: bytes) -> bool:
        session = self._session
        parse = Parse.decode(raw[_HEADER_BYTES:])
        if self._is_misleading(_PARSE, parse.statement):
            return True
        decisions = session.decide(parse.text, parse.parameter_types)
        if again.depends_on_answers(session, decisions) or session.newest.is_wanted(decisions):
            return False
        refused = gates.first_refused(decisions)
        if refused is not None:
            self._refuse(_PARSE, session.refused(refused))
            return True
        if len(decisions) > 1:
            # PostgreSQL takes one statement here and says so itself; nothing of it can run.
            self._send(raw, Expect(Reply.PARSE))
            return True
        decision = decisions[0] if decisions else _EMPTY
        if (decision.needs_read_write or decision.may_take_approval) and not self._writable:
            return False
        self._prepare(parse, raw, decision)
        return True

    def _prepare(self, parse: Parse, raw: bytes, decision: Decision) -> None:
        session = self._session
        text = gates.begin_text(decision) if decision.kind is Kind.BEGIN else decision.text
        if decision.rewritten or decision.kind is Kind.BEGIN:
            raw = Parse(parse.statement, text.encode(session.encoding), parse.parameter_types).encode()
        prepared = Prepared(decision, session.gate, parse.parameter_types)
        name = parse.statement
        if not name and self._parse_plainly(raw, prepared):
            return
        made = self._statements.make(name, prepared)
        if name:
            types = parse.parameter_types
            made = self._then(made, lambda: session.memory.prepared(self._text(name), decision, types))
        self._send(raw, Expect(Reply.PARSE, position=decision.position, done=made))

    def _parse_plainly(self, raw: bytes, prepared: Prepared) -> bool:
        """Prepare the unnamed statement without waiting for what becomes of it, if only plain reads were there."""
        before = self._statements.settled(b"")
        if before is not None and before.is_fast:
            self._statements.forget(b"")
        if not (prepared.is_fast and prepared.passes_always) or self._statements.find(b"") is not None:
            self._plain_statement = None
            return False
        self._plain_statement = prepared
        if (passing := self._session.passing) is not None:
            passing.remember(raw, prepared)
        self._send(raw, PLAIN[Reply.PARSE])
        return True

    def find_statement(self, name: bytes) -> Prepared | None:
        if not name and self._plain_statement is not None:
            return self._plain_statement
        found = self._statements.find(name)
        if found is not None or not name:
            return found
        inner = self._session.memory.state.prepared.get(self._text(name))
        if inner is None:
            return None
        decision = Decision(inner, Verdict(Effect.ALLOW), inner.text, tag=inner.details.get("execute_tag"))
        return Prepared(decision, self._session.gate)

    def _bind(self, raw: bytes) -> bool:
        session = self._session
        portal, at = text_at(raw, _HEADER_BYTES)
        name, _ = text_at(raw, at)
        if self._is_misleading(_BIND, portal):
            return True
        prepared = self.find_statement(name)
        if prepared is None:
            self._refuse(_BIND, self._missing("26000", "prepared statement", name))
            return True
        if prepared.gate is not session.gate and (stale := again.at_bind(session, prepared)) is not None:
            self._refuse(_BIND, stale)
            return True
        if prepared.needs_read_write and not self._writable:
            return False
        if not portal and prepared.is_fast and not self._portals.is_used:
            self._plain = prepared.portal
            self._send(raw, PLAIN[Reply.BIND])
            return True
        decision = prepared.decision
        made = self._portals.make(portal, prepared.bound(raw[_HEADER_BYTES:]))
        if not portal:
            self._plain = None
        else:
            cursor = None if prepared.is_write else decision.statement
            made = self._then(made, lambda: session.memory.opened(self._text(portal), cursor))
        self._send(raw, Expect(Reply.BIND, done=made))
        return True

    @staticmethod
    def _then(made: Callable[[Expect], None], act: Callable[[], None]) -> Callable[[Expect], None]:
        """Return what does *made*, and *act* too if all went well."""

        def done(expect: Expect) -> None:
            made(expect)
            if expect.failed is None:
                act()

        return done

    def _text(self, name: bytes) -> str:
        return name.decode(self._session.encoding, "replace")

    def _is_misleading(self, kind: int, name: bytes) -> bool:
        """Refuse a name that is another one to PostgreSQL than it is here."""
        fault = misleading(name, self._session.encoding)
        if fault is not None:
            self._refuse(kind, self._session.error(NotUnderstood(fault, hint="use another name")))
        return fault is not None

    def _missing(self, sqlstate: str, what: str, name: bytes) -> bytes:
        encoding = self._session.encoding
        shown = f'{what} "{name.decode(encoding, "replace")}"' if name else f"unnamed {what}"
        return error_response("ERROR", sqlstate, f"{shown} does not exist", encoding=encoding)

    def _execute(self, raw: bytes) -> bool:
        name, _ = text_at(raw, _HEADER_BYTES)
        portal = self._find_portal(name)
        if portal is None:
            self._refuse(_EXECUTE, self._missing("34000", "portal", name))
            return True
        if not portal.is_fast:
            return False
        self._send(raw, PLAIN[Reply.EXECUTE])
        return True

    def _find_portal(self, name: bytes) -> Portal | None:
        if not name and self._plain is not None:
            return self._plain
        found = self._portals.find(name)
        if found is not None or not name:
            return found
        # SQL's cursors are portals too.
        declared = self._session.memory.state.cursors.get(self._text(name))
        if declared is None:
            return None
        return Portal(Decision(declared, Verdict(Effect.ALLOW), declared.text), is_fast=True)

    def _describe(self, raw: bytes) -> bool:
        self._send(raw, PLAIN[Reply.DESCRIBE])
        return True

    def _flush(self, raw: bytes) -> bool:
        if len(raw) > _HEADER_BYTES:
            # An error to PostgreSQL that answers nothing: whose it is could not be told.
            raise ProtocolViolation("malformed Flush")
        self._session.server.write(raw)
        return True

    def _call(self, _: bytes) -> bool:
        """Any function by its number, with no text to judge (WIRE section 3)."""
        fault = NotUnderstood("the fast-path function call is not accepted", hint="call functions in SQL")
        self._refuse(_CALL, self._session.error(fault))
        return True

    def _close(self, raw: bytes) -> bool:
        session = self._session
        close = Close.decode(raw[_HEADER_BYTES:])
        if self._is_misleading(_CLOSE, close.name):
            return True
        if close.is_portal and not close.name:
            self._plain = None
        name = self._text(close.name)
        if close.is_portal:
            done = self._then(self._portals.close(close.name), lambda: session.memory.closed(name))
        else:
            if not name:
                self._plain_statement = None
            done = self._then(self._statements.close(close.name), lambda: session.memory.deallocated(name))
        self._send(raw, Expect(Reply.CLOSE, done=done))
        return True

    def _sync(self, raw: bytes) -> bool:
        session = self._session
        done = self._sync_done()
        session.books.expect(PLAIN[Reply.SYNC] if done is None else Expect(Reply.SYNC, done=done))
        session.server.write(raw)
        if not session.books.is_copying_in:
            self.is_open = self._writable = self._is_watched = False
        return True

    def _sync_done(self) -> Callable[[Expect], None] | None:
        """Return what is to be done when a Sync that is sent now is answered, if anything."""
        if not (self._actions or self._writable or self._portals.is_used or self._session.memory.is_open):
            return None
        mine, self._actions = self._actions, []
        return lambda expect: self._synced(expect, mine)

    def _synced(self, expect: Expect, actions: list[int]) -> None:
        """A Sync is answered: outside a block it has ended the transaction of what came before it."""
        session = self._session
        failed, self._failed = self._failed or expect.failed is not None, False
        session.open_actions += [(action, self.repeated.pop(action, {})) for action in actions]
        if not session.in_block:
            session.settle("failed" if failed else "committed", {})
            session.memory.end(committed=not failed)
            self._portals.clear()

    def interrupted(self, expect: Expect) -> None:
        """A Query comes before the Sync: *expect* says how the implicit transaction ends."""
        if self._is_watched:
            self._watch(expect)
        self._over()

    def _over(self) -> None:
        self.is_open = self._writable = self._is_watched = False

    async def finish(self) -> None:
        """End the implicit transaction before the Sync, so that another one can begin; the session must be quiet."""
        session = self._session
        if self.is_open and not session.in_block:
            session.books.expect(Expect(Reply.SYNC, swallow=True, done=self._sync_done()))
            session.server.write(SYNC)
            await session.barrier()
        self._over()

    def follow(self, decision: Decision) -> None:
        """Forget statements that SQL has deallocated."""
        statement = decision.statement
        if decision.kind is Kind.DEALLOCATE and statement.subject:
            self._statements.forget(statement.subject.encode(self._session.encoding))
        elif decision.kind is Kind.DEALLOCATE or statement.details.get("target") == "DISCARD_ALL":
            self._statements.clear()
