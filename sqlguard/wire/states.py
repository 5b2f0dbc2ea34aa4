"""The client's half of a session as a table: which message is legal in which state, and what comes after it."""

from enum import Enum, StrEnum


class State(StrEnum):
    """What the client may send."""

    READY = "ready"
    #: Extended messages have come since the last Sync.
    PIPELINE = "pipeline"
    #: One of them has failed and the client can know: all is skipped up to Sync.
    SKIPPING = "skipping"
    COPY_IN = "copy in"
    #: The same, begun by an Execute.
    COPY_IN_PIPELINE = "copy in, in a pipeline"
    CLOSED = "closed"


class Event(Enum):
    """What the server does to it."""

    COPY_BEGINS = "copy begins"
    COPY_BEGINS_IN_PIPELINE = "copy begins in a pipeline"
    COPY_ENDS = "copy ends"
    #: An extended message has failed, and no Sync of the client's is under way.
    FAILS = "fails"
    #: It is ready although the last Sync was thought to be swallowed by a COPY.
    IS_READY = "is ready"


def _row(text: str, state: State) -> dict[int | Event, State]:
    return dict.fromkeys(text.encode(), state)


_COPY_BEGINS: dict[int | Event, State] = {
    Event.COPY_BEGINS: State.COPY_IN,
    Event.COPY_BEGINS_IN_PIPELINE: State.COPY_IN_PIPELINE,
}
#: COPY data outside a COPY is what a client had under way when its COPY failed; the server ignores it.
_STRAY = "dcf"
NEXT: dict[State, dict[int | Event, State]] = {
    State.READY: _row("QFS" + _STRAY, State.READY)
    | _row("PBEDCH", State.PIPELINE)
    | _row("X", State.CLOSED)
    | _COPY_BEGINS
    | {Event.FAILS: State.READY},
    State.PIPELINE: _row("QFPBEDCH" + _STRAY, State.PIPELINE)
    | _row("S", State.READY)
    | _row("X", State.CLOSED)
    | _COPY_BEGINS
    | {Event.FAILS: State.SKIPPING},
    State.SKIPPING: _row("QFPBEDCH" + _STRAY, State.SKIPPING)
    | _row("S", State.READY)
    | _row("X", State.CLOSED)
    | {Event.FAILS: State.SKIPPING, Event.IS_READY: State.READY},
    State.COPY_IN: _row("dHS", State.COPY_IN)
    | _row("cf", State.READY)
    | _row("X", State.CLOSED)
    | {Event.COPY_ENDS: State.READY},
    State.COPY_IN_PIPELINE: _row("dHS", State.COPY_IN_PIPELINE)
    | _row("cf", State.PIPELINE)
    | _row("X", State.CLOSED)
    | {Event.COPY_ENDS: State.PIPELINE, Event.FAILS: State.SKIPPING},
    State.CLOSED: {},
}
