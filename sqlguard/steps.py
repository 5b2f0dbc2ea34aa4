"""
Steps that are not SQL: an agent's tools, and what answers each of them when its task is undone.

The one idea: what will answer a call is written down, with the arguments, before the call is made. So an undo
that comes after a crash knows what to do, and one that comes from another process does the same.

    guard = Tools()

    @guard.compensation
    def refund(done: Done) -> None:
        payments.refund(done.result, idempotency_key=done.idempotency_key)

    @guard.tool(tier="compensable", compensation=refund)
    def charge(order: int, cents: int, *, idempotency_key: str) -> str:
        return payments.charge(order, cents, idempotency_key=idempotency_key)

    with guard.on(steps):              # sqlguard.postgres.steps.Steps: a task's journal
        charge(42, 999)

No I/O here: the journal is whoever keeps to `Journal`. A tool that is called outside of `on` does not run.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

from sqlguard.errors import ApprovalRequired, NotConfigured, Refused

TIERS = ("reversible", "costly", "compensable", "irreversible")
#: What an answer is: it takes the effect back, or it only makes up for it.
REVERSAL, MITIGATION = "reversal", "mitigation"
KIND = "tool"
P = ParamSpec("P")
R = TypeVar("R")


class NotDone(Exception):
    """Raised by a tool to say that it certainly had no effect; any other exception leaves that open."""


@dataclass(frozen=True, slots=True)
class Answer:
    """
    What answers an action: a compensation of the registry (`where` is `tool`) or a function of the database.

    *arguments* are those of a database function as texts, None when the statement does not tell them.
    """

    name: str
    kind: str = REVERSAL
    where: str = "tool"
    arguments: tuple[str | None, ...] | None = ()

    def as_dict(self) -> dict[str, Any]:
        own = {"name": self.name, "kind": self.kind, "where": self.where}
        if self.where == "tool":
            return own
        return own | {"arguments": None if self.arguments is None else list(self.arguments)}


def answers_text(answers: Sequence[Answer]) -> str | None:
    """Return what the journal keeps as `compensation`; None when nothing answers."""
    return json.dumps([a.as_dict() for a in answers], ensure_ascii=False) if answers else None


def read_answers(text: str | None) -> tuple[Answer, ...]:
    """Read what `answers_text` made; what is something else (a note of an operator's) is no answer."""
    try:
        found = json.loads(text) if text else []
        return tuple(
            Answer(
                a["name"],
                a["kind"],
                a["where"],
                None if a.get("arguments", ()) is None else tuple(a.get("arguments", ())),
            )
            for a in found
        )
    except (ValueError, TypeError, KeyError):
        return ()


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool, as the journal gets it before it is made."""

    tool: str
    tier: str
    arguments: Mapping[str, Any]
    answer: Answer | None = None
    idempotency_key: str | None = None
    reason: str | None = None
    confidence: float | None = None
    step: str | None = None


@dataclass(frozen=True, slots=True)
class Begun:
    """The journal's word that a call may be made: its action, its key, and the result of an earlier twin."""

    action: int
    key: str
    repeats: int | None = None
    result: Any = None


@dataclass(frozen=True, slots=True)
class Done:
    """
    What a compensation is told of the call that it answers.

    `certain` is False when the call failed or nobody saw it end: it may have had its effect or not, and
    `result` is None. `idempotency_key` is the compensation's own, the same at every attempt; `key` is the call's.
    """

    action: int
    tool: str
    arguments: Mapping[str, Any]
    result: Any
    certain: bool
    key: str
    idempotency_key: str


class Journal(Protocol):
    """Where calls are written down. `begin` commits before it returns, or raises and nothing runs."""

    def begin(self, call: Call) -> Begun: ...

    def refused(self, call: Call) -> int: ...

    def ended(self, action: int, kind: str, detail: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    tier: str
    answer: Answer | None

    def __post_init__(self) -> None:
        if self.tier not in TIERS:
            raise ValueError(f"a tier is one of {', '.join(TIERS)}")
        kind = self.answer.kind if self.answer else None
        if self.tier == "irreversible" and kind == REVERSAL:
            raise ValueError(f"`{self.name}` is irreversible: what answers it is a mitigation")
        if self.tier != "irreversible" and kind is None:
            raise ValueError(f"`{self.name}` is {self.tier}: name its compensation or its mitigation")
        if self.tier in ("reversible", "costly") and kind == MITIGATION:
            raise ValueError(f"`{self.name}` can't be {self.tier}: a mitigation takes nothing back")


@dataclass
class Step:
    """What a `with guard.step(…)` block works with: set `result`, pass `key` on."""

    action: int
    key: str
    repeated: bool = False
    result: Any = None


Compensation = Callable[[Done], Any]


@dataclass(frozen=True)
class Said:
    """What the agent says about calls, for `guard.because`."""

    idempotency_key: str | None = None
    reason: str | None = None
    confidence: float | None = None
    step: str | None = None


_JOURNAL: ContextVar[Journal | None] = ContextVar("sqlguard_journal", default=None)
_SAID: ContextVar[Said] = ContextVar("sqlguard_said", default=Said())  # noqa: B039 (frozen)


@dataclass
class Tools:
    """A registry of tools and of what answers them; one per application, made when its modules are imported."""

    tools: dict[str, Tool] = field(default_factory=dict)
    compensations: dict[str, Compensation] = field(default_factory=dict)

    def compensation(self, function: Compensation) -> Compensation:
        """Register *function* under its own name; it must do its work once for one idempotency key."""
        name = function.__name__
        if self.compensations.setdefault(name, function) is not function:
            raise ValueError(f"there are two compensations `{name}`")
        return function

    def tool(
        self,
        *,
        tier: str,
        compensation: Compensation | str | None = None,
        mitigation: Compensation | str | None = None,
        name: str | None = None,
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """
        Register a function as a tool: each call is journaled before it is made.

        *compensation* takes the effect back, *mitigation* only makes up for it (a second mail).
        """
        answer = self._answer(compensation, mitigation)

        def register(function: Callable[P, R]) -> Callable[P, R]:
            made = Tool(name or function.__name__, tier, answer)
            if self.tools.setdefault(made.name, made) is not made:
                raise ValueError(f"there are two tools `{made.name}`")
            return self._wrapped(made, function)

        return register

    @contextmanager
    def on(self, journal: Journal) -> Iterator[None]:
        """Let tools run, on the task whose *journal* it is; per thread and per asynchronous task."""
        token = _JOURNAL.set(journal)
        try:
            yield
        finally:
            _JOURNAL.reset(token)

    @contextmanager
    def because(
        self,
        reason: str | None = None,
        *,
        idempotency_key: str | None = None,
        confidence: float | None = None,
        step: str | None = None,
    ) -> Iterator[None]:
        """Say why the calls in the block are made. With a key, a call that was made before is not made again."""
        token = _SAID.set(Said(idempotency_key, reason, confidence, step))
        try:
            yield
        finally:
            _SAID.reset(token)

    @contextmanager
    def step(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        tier: str,
        compensation: Compensation | str | None = None,
        mitigation: Compensation | str | None = None,
    ) -> Iterator[Step]:
        """
        Journal what the block does as one step; the caller sets `result` and passes `key` on.

        A block whose key was done before still runs: look at `repeated` first.
        """
        tool = Tool(name, tier, self._answer(compensation, mitigation))
        begun, journal = _begin(tool, arguments)
        made = Step(begun.action, begun.key, begun.repeats is not None, begun.result)
        if made.repeated:
            yield made
            return
        with _ending(journal, begun.action) as ended:
            yield made
            ended.append(made.result)

    def _answer(
        self, compensation: Compensation | str | None, mitigation: Compensation | str | None
    ) -> Answer | None:
        if compensation is not None and mitigation is not None:
            raise ValueError("a tool has a compensation or a mitigation, not both")
        given = compensation if compensation is not None else mitigation
        if given is None:
            return None
        if not isinstance(given, str):
            self.compensation(given)
            given = given.__name__
        return Answer(given, REVERSAL if compensation is not None else MITIGATION)

    def _wrapped(self, tool: Tool, function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        takes_key = "idempotency_key" in signature.parameters

        def begin(args: Any, kwargs: Any) -> tuple[Begun, Journal, dict[str, Any]]:
            if takes_key and not kwargs.get("idempotency_key"):
                kwargs = {**kwargs, "idempotency_key": None}
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = {n: v for n, v in bound.arguments.items() if n != "idempotency_key"}
            begun, journal = _begin(tool, arguments, kwargs.get("idempotency_key"))
            return begun, journal, {**kwargs, "idempotency_key": begun.key} if takes_key else kwargs

        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def later(*args: P.args, **kwargs: P.kwargs) -> Any:
                begun, journal, given = begin(args, kwargs)
                if begun.repeats is not None:
                    return begun.result
                with _ending(journal, begun.action) as ended:
                    ended.append(await function(*args, **given))
                return ended[0]

            return later  # type: ignore[return-value]  # R is what the function's call gives: an awaitable

        @wraps(function)
        def now(*args: P.args, **kwargs: P.kwargs) -> R:
            begun, journal, given = begin(args, kwargs)
            if begun.repeats is not None:
                return begun.result  # type: ignore[no-any-return]
            with _ending(journal, begun.action) as ended:
                ended.append(function(*args, **given))
            return ended[0]  # type: ignore[no-any-return]

        return now


def _begin(tool: Tool, arguments: Mapping[str, Any], key: str | None = None) -> tuple[Begun, Journal]:
    """Write the call down; raises what keeps it from being made."""
    journal = _JOURNAL.get()
    if journal is None:
        raise NotConfigured(
            f"the tool `{tool.name}` was called outside of any task",
            hint="call it inside `with guard.on(…):`, so that it is journaled",
        )
    said = _SAID.get()
    call = Call(
        tool.name,
        tool.tier,
        plain(arguments),
        tool.answer,
        key or said.idempotency_key,
        said.reason,
        said.confidence,
        said.step,
    )
    try:
        return journal.begin(call), journal
    except ApprovalRequired as fault:
        action = journal.refused(call)
        raise ApprovalRequired(
            fault.message,
            detail=f"action {action}",
            hint=f"have `sqlguard step approve {action}` run, then make the same call again",
        ) from None


@contextmanager
def _ending(journal: Journal, action: int) -> Iterator[list[Any]]:
    """Write down how a call ended; its result is the one item of the list."""
    ended: list[Any] = []
    try:
        yield ended
    except NotDone as fault:
        journal.ended(action, "failed", {"effect": "none", "error": type(fault).__name__})
        raise
    except BaseException as fault:
        # A time-out says nothing about what happened at the other end.
        journal.ended(action, "failed", {"effect": "unknown", "error": type(fault).__name__})
        raise
    journal.ended(action, "committed", {"result": plain(ended[0]) if ended else None})


def plain(value: Any) -> Any:
    """Return *value* as JSON gives it back; what JSON has no word for becomes text."""
    return json.loads(json.dumps(value, default=str, ensure_ascii=False))


def compensation_key(action: int, key: str | None, number: int = 0) -> str:
    """Return the idempotency key of what answers an action: the same at every attempt."""
    return f"{key or f'action-{action}'}:compensation" + (f":{number}" if number else "")


def unknown(name: str, hint: str) -> Refused:
    return Refused(f"there is no compensation `{name}` in the registry", hint=hint)
