"""
THE PATH: text -> Statement -> Verdict -> Decision. Every door calls it; nothing else reaches the database.

No I/O: the catalog, the policy and the session are values. A Decision is carried out by an executor
(`postgres.executor` for Python, `proxy.session` for the wire), which journals the intent of a write before
the write runs.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from sqlguard.annotation import Annotation, checked, clipped
from sqlguard.errors import (
    ApprovalRequired,
    CapExceeded,
    Frozen,
    NotUnderstood,
    Refused,
    SqlguardError,
    TaskEnded,
)
from sqlguard.journal import Intent
from sqlguard.plan import Decision, needs_no_approval
from sqlguard.policy import decide
from sqlguard.policy.answers import answers_to, bound
from sqlguard.policy.context import Context
from sqlguard.policy.verdict import Effect, Finding, Verdict
from sqlguard.rewrite import rewrite
from sqlguard.rewrite.copy_in import staged
from sqlguard.rewrite.count import Count, counting
from sqlguard.rewrite.steady import steady
from sqlguard.statement import analyse
from sqlguard.statement.ending import ending, ends_so, with_number
from sqlguard.statement.model import Kind, Relation, Session, Statement
from sqlguard.statement.text import SyntaxFault
from sqlguard.steps import answers_text

#: What a decision on these depends on besides text and search_path is the session's own history, also where
#: another statement carries them (EXPLAIN EXECUTE).
_SESSION_BOUND = frozenset({Kind.EXECUTE, Kind.FETCH, Kind.CLOSE, Kind.DEALLOCATE})
#: Later statements may mean something else after one of these.
CHANGES_SESSION = frozenset(
    {
        Kind.SET,
        Kind.RESET,
        Kind.DISCARD,
        Kind.PREPARE,
        Kind.DEALLOCATE,
        Kind.DECLARE,
        Kind.CLOSE,
        Kind.CREATE_TEMP,
        Kind.DROP_TEMP,
    }
)
_ERRORS: dict[str, type[SqlguardError]] = {
    e.sqlstate: e for e in (ApprovalRequired, Refused, NotUnderstood, TaskEnded, Frozen, CapExceeded)
}
LAST_PLAN = "sqlguard.last_plan"
_LAST_PLAN_TEXT = f'SELECT sqlguard.last_plan() AS "{LAST_PLAN}"'
#: Entries, not bytes: texts longer than `_CACHED_TEXT` are decided anew each time, so memory stays bounded.
_CACHE_ENTRIES = 4096
_CACHED_TEXT = 16_384


@dataclass
class Gate:
    """One gate per policy version and catalog version; its cache is shared by all sessions of that pair."""

    context: Context
    _cache: OrderedDict[object, tuple[Decision, ...]] = field(default_factory=OrderedDict, repr=False)
    #: Decisions that hold for other texts as well, by what these begin with (`statement.ending`).
    _beginnings: OrderedDict[object, Decision] = field(default_factory=OrderedDict, repr=False)
    hits: int = 0
    misses: int = 0

    def decide(self, text: str, session: Session, types: Sequence[int] = ()) -> tuple[Decision, ...]:
        """
        Return one Decision per statement of *text*, in order; never raises one of our own errors.

        What can't be understood is one refused Decision for the whole text. *types* are those that the client says
        its parameters have, as oids: an operator on a user's type needs no more than that to be meant.
        """
        if types:
            known = self.context.catalog.types
            session = session.after(parameters=tuple(sorted({t for t in types if t in known})))
        key = (text, session.search_path, tuple(session.temporary), session.parameters)
        cached = self._cache.get(key)
        if cached is not None:
            self._cache.move_to_end(key)
            self.hits += 1
            return cached
        found = ending(text)
        decisions = None if found is None else self._alike(text, found, key)
        if decisions is not None:
            self.hits += 1
            _keep(self._cache, key, decisions)
            return decisions
        self.misses += 1
        decisions = self._decide(text, session)
        if len(text) <= _CACHED_TEXT and not any(is_session_bound(d.statement) for d in decisions):
            _keep(self._cache, key, decisions)
            if found is not None:
                self._remember(text, found[0], key, decisions)
        return decisions

    def _alike(
        self, text: str, found: tuple[str, int], key: tuple[object, ...]
    ) -> tuple[Decision, ...] | None:
        """Return what is decided of *text* if it differs in its last number only from what was decided before."""
        before, number = found
        place = (before, *key[1:])
        known = self._beginnings.get(place)
        if known is None:
            return None
        self._beginnings.move_to_end(place)
        statement = with_number(known.statement, text, number)
        # What is made of the statement later is made of this one.
        return (
            replace(
                known,
                statement=statement,
                text=text,
                counting=partial(self._count, statement),
                steadying=partial(steady, statement, self.context.catalog),
            ),
        )

    def _remember(
        self, text: str, before: str, key: tuple[object, ...], decisions: tuple[Decision, ...]
    ) -> None:
        """Remember a decision for texts that are alike: none that is rewritten, because its text is another's then."""
        if len(decisions) != 1:
            return
        (decision,) = decisions
        if not decision.allowed or decision.rewritten or decision.text != text or decision.answers:
            return
        if ends_so(decision.statement, before):
            _keep(self._beginnings, (before, *key[1:]), decision)

    def forget(self) -> None:
        """Empty the cache."""
        self._cache.clear()
        self._beginnings.clear()

    def _decide(self, text: str, session: Session) -> tuple[Decision, ...]:
        try:
            statements = analyse(text, self.context.catalog, session)
        except SqlguardError as fault:
            return (refusal(text, fault),)
        decisions: list[Decision] = []
        changed = False
        for statement in statements:
            again = statement
            if changed:
                # What the statement means depends on one before it in the same message.
                try:
                    again = analyse(statement.text, self.context.catalog, session)[0]
                except SqlguardError as fault:
                    decisions.append(refusal(statement.text, fault))
                    continue
            decision = self._judge(again, session)
            session = advance(session, decision)
            changed = changed or decision.kind in CHANGES_SESSION
            decisions.append(decision)
        return tuple(decisions)

    def _judge(self, statement: Statement, session: Session) -> Decision:
        verdict = decide(statement, session, self.context)
        if verdict.effect > Effect.APPROVE:
            return Decision(statement, verdict, statement.text)
        if statement.kind is Kind.SHOW and statement.subject == LAST_PLAN:
            # A value of the database, not of the session: what was decided since shows.
            return Decision(
                statement, verdict, _LAST_PLAN_TEXT, tag="SHOW", rewritten=True, position=_nowhere
            )
        try:
            changed = rewrite(statement.text, None, self.context.catalog, session, read=statement.tree)
        except SqlguardError as fault:
            return refusal(statement.text, fault, statement)
        if statement.kind is Kind.COPY_IN:
            return self._copied_in(Decision(statement, verdict, changed.text, rewritten=changed.changed))
        answers, counting = answers_to(statement, self.context), partial(self._count, statement)
        steadying = partial(steady, statement, self.context.catalog)
        if not changed.changed:
            tag = _prepared_tag(statement, session)
            return Decision(
                statement,
                verdict,
                statement.text,
                tag=tag,
                answers=answers,
                counting=counting,
                steadying=steadying,
            )
        return Decision(
            statement,
            verdict,
            changed.text,
            tag=changed.tag,
            rewritten=True,
            execute_tag=changed.execute_tag,
            position=changed.position,
            answers=answers,
            counting=counting,
            steadying=steadying,
        )

    def _count(self, statement: Statement) -> Count | None:
        """Return how to measure a write that no approval could let go over its cap."""
        policy = self.context.policy
        for write in statement.writes:
            table = write.table.schema or "", write.table.name
            if not write.table.temporary and policy.on_excess(*table) == "refuse":
                most = policy.max_rows(*table)
                return None if most is None else counting(statement, most, self.context.catalog)
        return None

    def _copied_in(self, decision: Decision) -> Decision:
        """Return *decision*, a COPY … FROM STDIN, as it can be run."""
        statement = decision.statement
        if decision.verdict.effect is Effect.APPROVE:
            return refusal(statement.text, needs_no_approval(), statement)
        table = self.context.catalog.tables.get(statement.writes[0].table.oid) if statement.writes else None
        if table is None or not table.row_security:
            return replace(decision, position=_nowhere if decision.rewritten else None)
        try:
            found = staged(decision.text, table)
        except SqlguardError as fault:
            return refusal(statement.text, fault, statement)
        if found is None:
            return decision
        return replace(
            decision,
            text=found.text,
            before=found.before,
            after=found.after,
            rewritten=True,
            position=_nowhere,
        )


_V = TypeVar("_V")


def _keep(entries: OrderedDict[object, _V], key: object, value: _V) -> None:
    entries[key] = value
    if len(entries) > _CACHE_ENTRIES:
        entries.popitem(last=False)


def is_session_bound(statement: Statement) -> bool:
    """Say whether the same text may mean something else in another session, or later."""
    inner = statement.inner
    return statement.kind in _SESSION_BOUND or (inner is not None and is_session_bound(inner))


def _prepared_tag(statement: Statement, session: Session) -> str | None:
    """An EXECUTE of a prepared soft delete is a DELETE to the client."""
    if (
        statement.kind is not Kind.EXECUTE
        or statement.subject is None
        or statement.subject not in session.prepared
    ):
        return None
    tag: str | None = session.prepared[statement.subject].details.get("execute_tag")
    return tag


def refusal(text: str, fault: SqlguardError, statement: Statement | None = None) -> Decision:
    """Return the refused Decision that stands for *fault*, raised while *text* was read or rewritten."""
    effect = Effect.APPROVE if isinstance(fault, ApprovalRequired) else Effect.REFUSE
    rule = fault.rules[0] if fault.rules else type(fault).__name__
    position = fault.position if isinstance(fault, SyntaxFault) else 0
    # A text that PostgreSQL's grammar does not take is answered as PostgreSQL would.
    sqlstate = "42601" if position else fault.sqlstate
    finding = Finding(rule, effect, fault.message, fault.hint, fault.detail, sqlstate)
    stands_for = statement or Statement(Kind.OTHER, text, details={"position": position})
    return Decision(stands_for, Verdict(effect, (finding,)), text)


def error(decision: Decision) -> SqlguardError:
    """Return the error that a refused *decision* is answered with."""
    finding = decision.verdict.decisive
    if finding is None:
        return NotUnderstood("the statement could not be judged")
    if decision.verdict.effect is Effect.APPROVE:
        return ApprovalRequired(
            finding.message, detail=finding.detail, hint=finding.hint, rules=decision.verdict.rules
        )
    kind = _ERRORS.get(finding.sqlstate, Refused)
    made = kind(finding.message, detail=finding.detail, hint=finding.hint, rules=decision.verdict.rules)
    made.sqlstate = finding.sqlstate
    made.position = int(decision.statement.details.get("position") or 0)
    return made


def _nowhere(_: int) -> None:
    """The position of an error would point into a text that the client has not sent."""


def first_refused(decisions: Sequence[Decision]) -> Decision | None:
    """
    None of a message's statements runs if one of them is refused: return that one.

    What a person may approve is no refusal yet: whether it is approved shows when its turn comes.
    """
    return next((d for d in decisions if not (d.allowed or d.can_be_planned)), None)


def advance(  # noqa: PLR0911 (one match over the kinds that change a session)
    session: Session, decision: Decision
) -> Session:
    """Return *session* as it is after *decision* has been carried out without an error."""
    statement = decision.statement
    name = statement.subject
    match statement.kind:
        case Kind.PREPARE if name and statement.inner:
            known = {**statement.inner.details, "execute_tag": decision.execute_tag}
            return session.after(prepared={**session.prepared, name: replace(statement.inner, details=known)})
        case Kind.DEALLOCATE:
            return session.after(prepared={k: v for k, v in session.prepared.items() if name and k != name})
        case Kind.DECLARE if name and statement.inner:
            return session.after(cursors={**session.cursors, name: statement.inner})
        case Kind.CLOSE:
            return session.after(cursors={k: v for k, v in session.cursors.items() if name and k != name})
        case Kind.CREATE_TEMP if name:
            columns = tuple(statement.details.get("columns", ()))
            return session.after(temporary={**session.temporary, name: columns})
        case Kind.DROP_TEMP if name:
            return session.after(temporary={k: v for k, v in session.temporary.items() if k != name})
        case Kind.SET | Kind.RESET if name == "search_path" and "search_path" in statement.details:
            return session.after(search_path=tuple(statement.details["search_path"]))
        case Kind.DISCARD:
            return session.after(prepared={}, cursors={}, temporary={})
        case _:
            return session


def begin_text(decision: Decision) -> str:
    """
    Return the text that opens a block: with READ WRITE, unless the client asked for READ ONLY.

    The session's default is read only, so that a read outside a block is run as one. The text is made from the
    modes that were judged, so nothing behind the client's own (a comment, a semicolon) can get in the way.
    """
    details = decision.statement.details
    modes = details.get("modes", {})
    words = ["START TRANSACTION" if details.get("what") == "TRANS_STMT_START" else "BEGIN"]
    if isolation := modes.get("transaction_isolation"):
        words.append(f"ISOLATION LEVEL {str(isolation).upper()}")
    words.append("READ ONLY" if details.get("read_only") else "READ WRITE")
    if "transaction_deferrable" in modes:
        words.append("NOT DEFERRABLE" if modes["transaction_deferrable"] in ("0", "off") else "DEFERRABLE")
    return " ".join(words)


def intent(
    decision: Decision, params: Sequence[object] | None, annotation: Annotation, *, via: str
) -> Intent:
    """
    Return what the journal must know of a decision before it is carried out.

    Raises NotUnderstood when it could not take what is said about a statement that would run.
    """
    fit = clipped if decision.verdict.effect is Effect.REFUSE else checked
    annotation = fit(annotation)
    return Intent(
        kind=decision.kind.value,
        verdict=str(decision.verdict.effect),
        tier=decision.verdict.tier,
        rules=decision.verdict.rules,
        tables=tuple(sorted({qualified(w.table) for w in decision.statement.writes})),
        statement=decision.statement.text,
        executed="; ".join([*decision.before, decision.text, *decision.after])
        if decision.rewritten
        else None,
        params=None if params is None else tuple(None if p is None else str(p) for p in params),
        reason=annotation.reason,
        confidence=annotation.confidence,
        idempotency_key=annotation.idempotency_key,
        step=annotation.step,
        compensation=answers_text(bound(decision.answers, params)) if decision.answers else None,
        via=via,
    )


def qualified(relation: Relation) -> str:
    """Return the name of a written relation as the journal keeps it."""
    return f"{relation.schema}.{relation.name}" if relation.schema else relation.name
