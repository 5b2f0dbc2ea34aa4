"""
Writes with an idempotency key: done once, answered as often as they are asked for.

The key is claimed, the write run and its answer kept in one transaction (`postgres.idempotency` says why that is
enough). A twin that is at work with the same key is waited for, by PostgreSQL itself.

Most writes give no rows, so their answer is a number that the capture has counted as well: all of the transaction goes
with one message then. Where the database finds that the one number need not be the other, nothing has been done, and
the answer is waited for before it is kept.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sqlguard.catalog import Catalog
from sqlguard.errors import Refused
from sqlguard.journal import statement_hash
from sqlguard.plan import Decision
from sqlguard.policy.late import wants_share
from sqlguard.postgres import plans
from sqlguard.postgres.idempotency import call
from sqlguard.proxy import kept, own
from sqlguard.proxy.kept import Answer
from sqlguard.proxy.plans import note_text, stop_block, weigh_text
from sqlguard.proxy.report import around, claim, sqlstate
from sqlguard.statement.model import Kind
from sqlguard.wire.messages import CommandComplete, DataRow, Describe, ReadyForQuery
from sqlguard.wire.reader import text_at
from sqlguard.wire.replies import Expect, Part, Reply

if TYPE_CHECKING:
    from sqlguard.proxy.portals import Portal
    from sqlguard.proxy.session import AgentSession

_CLAIM = (
    "SELECT claimed, action_id, tag, columns, rows FROM sqlguard.claim_key($1::text, $2::text, $3::bigint)"
)
_HEADER_BYTES = 5
#: What `claim_key_or_stop` says when the key was used before, and `keep_count` when it can't tell.
_TAKEN, _UNCOUNTED = "SG010", "SG011"
#: How the answer to a write begins that gives no rows; the number of its rows follows.
_TAGS = {Kind.INSERT: "INSERT 0", Kind.UPDATE: "UPDATE", Kind.DELETE: "DELETE"}
#: What a write must not have for its rows to be those that the capture counts under its table: rows to give, or others
#: than its own.
_UNCOUNTABLE = ("returningClause", "withClause", "onConflictClause")
_KEEP = "SELECT sqlguard.keep_result($1::text, $2::text, $3::jsonb, $4::jsonb)"


async def simple(session: "AgentSession", decision: Decision, action: int) -> None:
    """Carry out a Query of one such write; the session must be quiet."""
    told = b""
    if session.in_block:
        session.open_actions.append((action, {}))
        await inside(session, decision, action)
    else:
        planner = session.plans
        is_weighed = planner.is_weighed(decision, planner.ruling(decision), in_block=True)
        expect = None if is_weighed else await _at_once(session, decision, action)
        if expect is None:
            expect = await _in_steps(session, decision, action)
        kind = "committed" if expect.failed is None else "failed"
        session.operator.event(action, kind, _detail(expect))
        told = expect.held
    session.client.write(told + ReadyForQuery(session.books.status).encode())


async def _at_once(session: "AgentSession", decision: Decision, action: int) -> Expect | None:
    """
    Claim the key and run the write with one message, keep its answer and commit with the same or another.

    What the client is still to be told is in `held`. Return None, with nothing done, if the key is taken: what stands
    behind the claim is skipped then.
    """
    key, digest = _key(session, decision, None)
    before = ["BEGIN READ WRITE", call("claim_key_or_stop", key, digest, str(action)), claim(action)]
    table = counted_table(decision, session.gate.context.catalog)
    if table is not None:
        tag = _TAGS[decision.kind]
        after = [call("keep_count", key, tag, str(table)), "COMMIT"]
        expect = await _kept(session, decision, before, after, error=_unless_ours)
        if await _is_ended(session, expect):
            return expect
        if sqlstate(expect.failed or b"") == _TAKEN:
            return None
    expect = await _kept(session, decision, before, error=_unless_ours)
    if expect.failed is not None:
        return expect if await _is_ended(session, expect) else None
    end = ["COMMIT"] if expect.was_cut else [call("keep_result", key, *_stored(session, expect)), "COMMIT"]
    ended = await session.ask("; ".join(end))
    if session.in_block:
        await session.ask("ROLLBACK")
    if ended.failed is not None:
        expect.failed = expect.held = ended.failed
    return expect


async def _is_ended(session: "AgentSession", expect: Expect) -> bool:
    """Say whether a message was carried out to its end, or failed for a reason that the client has been told."""
    if expect.failed is None:
        return True
    expect.held = b""
    if session.in_block:
        await session.ask("ROLLBACK")
    return sqlstate(expect.failed) not in (_TAKEN, _UNCOUNTED)


def counted_table(decision: Decision, catalog: Catalog) -> int | None:
    """
    Return the table whose changed rows, as its capture counts them, are those that a write's answer will tell.

    The capture runs once per statement and table, so nothing else in the statement may change this table, and no other
    table may belong to it. Whether the capture has run is the database's to find out.
    """
    statement = decision.statement
    if len(statement.writes) != 1 or statement.kind not in _TAGS or not statement.tree:
        return None
    (write,), (body,) = statement.writes, statement.tree.values()
    table = catalog.tables.get(write.table.oid)
    if table is None or table.guard is None or write.view is not None or write.rule is not None:
        return None
    if table.kind != "r" or table.is_partition or table.parents or table.children:
        return None
    return None if any(name in body for name in _UNCOUNTABLE) else table.oid


def _unless_ours(error: bytes) -> bytes:
    """Keep the errors back that are no news to the client."""
    return b"" if sqlstate(error) in (_TAKEN, _UNCOUNTED) else error


async def _in_steps(session: "AgentSession", decision: Decision, action: int) -> Expect:
    """Do the same one after the other, for what is looked at in between."""
    # Its answer comes with the claim's: nothing has to wait for it.
    session.send_query("BEGIN READ WRITE", Expect(Reply.QUERY, swallow=True))
    stored: list[Expect] = []
    expect = await inside(session, decision, action, hold=True, stored=stored)
    if expect.failed is not None:
        expect.held = b""
        await session.ask("ROLLBACK")
        return expect
    commit = await session.ask("COMMIT")
    # A COMMIT behind what failed is a roll-back, and no error.
    expect.failed = next((s.failed for s in stored if s.failed is not None), commit.failed)
    if expect.failed is not None:
        expect.held = expect.failed
    return expect


async def inside(
    session: "AgentSession",
    decision: Decision,
    action: int,
    *,
    hold: bool = False,
    stored: list[Expect] | None = None,
) -> Expect:
    """
    Carry out one such write inside an open block and pass on its rows, and its CommandComplete unless *hold*.

    Whatever failed, the client has been told of it and the block has failed too. With a list as *stored* the keeping
    of the answer is not waited for, and put there.
    """
    key, digest = _key(session, decision, None)
    asked = await own.ask(session, _CLAIM, key, digest, str(action))
    if asked.failed is not None:
        session.client.write(asked.failed)
        return asked
    answer = kept.from_store(asked.captured[0], session.encoding)
    if answer is not None:
        _note(session, action, answer)
        return await _repeat(session, answer, hold=hold)
    planner, is_staged = session.plans, session.plans.is_staging
    is_weighed = is_staged or planner.is_weighed(decision, planner.ruling(decision), in_block=True)
    expect = await _kept(session, decision, [claim(action), *_looking(session, is_weighed=is_weighed)])
    if expect.failed is None and is_staged:
        await own.ask(session, note_text(action))
        planner.add(decision, action)
    elif expect.failed is None and is_weighed and (stopped := await _stopped(session, decision, action)):
        return stopped
    if expect.failed is None and not expect.was_cut:
        storing = own.send(session, _KEEP, key, *_stored(session, expect))
        own.sync(session)
        if stored is not None:
            stored.append(storing)
            return expect
        await session.barrier()
        if storing.failed is not None:
            session.client.write(storing.failed)
            return storing
    if expect.failed is None and not hold:
        session.client.write(expect.held)
        expect.held = b""
    return expect


async def _kept(
    session: "AgentSession",
    decision: Decision,
    before: list[str],
    after: Sequence[str] = (),
    error: Callable[[bytes], bytes] | None = None,
) -> Expect:
    """Send the write among statements of ours; its answer goes out but for the CommandComplete, and is kept."""
    own = [(text, Part.SWALLOW) for text in after]
    text, expect = around(decision, before, Part.KEEP, own, error=error)
    session.send_query(text, expect)
    await session.barrier()
    return expect


def _looking(session: "AgentSession", *, is_weighed: bool) -> list[str]:
    """Return what comes before a write whose rows decide."""
    if not is_weighed:
        return []
    return session.plans.begin() if session.plans.is_staging else [plans.BEGIN]


async def _stopped(session: "AgentSession", decision: Decision, action: int) -> Expect | None:
    """Weigh a write that was run in an open block; if it is stopped, the block has failed and the client been told."""
    share = wants_share(decision.verdict.gates)
    weight = await own.ask(session, weigh_text(action, share=share))
    if weight.failed is not None:
        return weight
    weighed = await session.plans.weigh(decision, action, weight.captured, own.ask)
    if weighed.goes_on:
        return None
    await stop_block(session, weighed)
    return Expect(Reply.QUERY, failed=b"")


def _note(session: "AgentSession", action: int, answer: Answer) -> None:
    """Have the journal say that *action* changed nothing itself: it was answered from its key."""
    known = {"repeats": answer.action}
    for number, detail in session.open_actions:
        if number == action:
            detail.update(known)
            return
    if session.extended.is_open:
        session.extended.repeated[action] = known


async def _repeat(session: "AgentSession", answer: Answer, *, hold: bool) -> Expect:
    expect = Expect(Reply.QUERY, keep_ready=True)
    if answer.tag is None:
        # The block has to fail as well, for what the client believes now.
        expect.error = session.error(_lost(answer))
        session.send_query("sqlguard refused this statement", expect)
        await session.barrier()
        return expect
    text = (0,) * len(answer.columns)
    rows = await _rows(session, answer, text, in_pipeline=False)
    head = answer.description(text) if answer.columns else b""
    expect.held = CommandComplete(answer.tag.encode(session.encoding)).encode()
    expect.tag = answer.tag.encode(session.encoding)
    session.client.write(head + rows + (b"" if hold else expect.held))
    expect.captured = [b"repeats %d" % (answer.action or 0)]
    return expect


async def extended(session: "AgentSession", portal: "Portal", raw: bytes) -> None:
    """Carry out an Execute of one such write; `claim` has been sent for its action."""
    key, digest = _key(session, portal.decision, portal.params(session.encoding))
    asked = own.send(session, _CLAIM, key, digest, str(portal.action))
    await session.barrier()
    if asked.failed is not None:
        return
    answer = kept.from_store(asked.captured[0], session.encoding)
    if answer is not None:
        _note(session, portal.action or 0, answer)
        await _repeat_extended(session, portal, answer)
        return
    planner, is_staged = session.plans, session.plans.is_staging
    ruling = planner.ruling(portal.decision)
    is_weighed = is_staged or planner.is_weighed(portal.decision, ruling, in_block=True)
    for text in _looking(session, is_weighed=is_weighed):
        own.send(session, text)
    name, _ = text_at(raw, _HEADER_BYTES)
    described = Expect(Reply.DESCRIBE, swallow=True, parts=(Part.CAPTURE,))
    session.books.expect(described)
    session.server.write(Describe(is_portal=True, name=name).encode())
    expect = session.extended.send_execute(portal, raw, Expect(Reply.EXECUTE, parts=(Part.KEEP,)))
    await session.barrier()
    if expect.failed is not None:
        return
    if is_staged:
        own.send(session, note_text(portal.action or 0))
        planner.add(portal.decision, portal.action or 0, portal)
    elif is_weighed and (fault := await session.extended.weigh(portal, expect)) is not None:
        session.extended.refuse_execute(fault)
        return
    if expect.tag and not expect.was_cut:
        expect.captured = described.captured + expect.captured
        stored = own.send(session, _KEEP, key, *_stored(session, expect))
        await session.barrier()
        if stored.failed is not None:
            return
    session.client.write(expect.held)


async def _repeat_extended(session: "AgentSession", portal: "Portal", answer: Answer) -> None:
    if answer.tag is None:
        session.extended.refuse_execute(_lost(answer))
        return
    given = portal.bind.result_formats if portal.bind else ()
    formats = kept.wanted_formats(given, len(answer.columns))
    rows = await _rows(session, answer, formats, in_pipeline=True)
    session.client.write(rows + CommandComplete(answer.tag.encode(session.encoding)).encode())


async def _rows(
    session: "AgentSession", answer: Answer, formats: tuple[int, ...], *, in_pipeline: bool
) -> bytes:
    """Return the kept rows as DataRow messages in the *formats* that are wanted now."""
    if formats == answer.formats:
        return b"".join([DataRow(row).encode() for row in answer.rows])
    types = tuple([column.type for column in answer.columns])
    asked = [own.convert(session, types, row, answer.formats, formats) for row in answer.rows]
    if not in_pipeline:
        own.sync(session)
    await session.barrier()
    return b"".join([row for expect in asked for row in expect.captured])


def _key(session: "AgentSession", decision: Decision, params: list[str | None] | None) -> tuple[str, str]:
    given = None if params is None else tuple(params)
    return session.said(decision).idempotency_key or "", statement_hash(decision.statement.text, given)


def _stored(session: "AgentSession", expect: Expect) -> tuple[str, str | None, str | None]:
    """Return tag, columns and rows as `keep_result` takes them."""
    tag = expect.tag.decode(session.encoding)
    if not expect.captured or expect.captured[0][:1] != b"T":
        return tag, None, None
    return tag, *kept.to_store(expect.captured[0], expect.captured[1:], session.encoding)


def _detail(expect: Expect) -> dict[str, object]:
    if expect.captured and expect.captured[0].startswith(b"repeats "):
        return {"repeats": int(expect.captured[0].split()[1])}
    return {"tag": expect.tag.decode("ascii", "replace")}


def _lost(answer: Answer) -> Refused:
    return Refused(
        f"this write was done before, by action {answer.action}, and its answer was not kept",
        hint="look at the rows it changed; a new idempotency key would do it again",
    )
