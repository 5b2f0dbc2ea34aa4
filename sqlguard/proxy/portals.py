"""What the proxy remembers of prepared statements and portals: how they were decided, and with which values."""

from dataclasses import dataclass

from sqlguard.gate import Gate, is_session_bound
from sqlguard.plan import Decision
from sqlguard.proxy import control
from sqlguard.proxy.anchors import ties
from sqlguard.wire.messages import Bind


@dataclass(slots=True, eq=False)
class Portal:
    decision: Decision
    #: What the journal and plans need of a write, and of a read that a person has to let pass.
    bind: Bind | None = None
    is_fast: bool = False
    #: Set by the first Execute; a suspended portal is not journaled twice.
    action: int | None = None
    #: Of the parameters, as far as the client has said.
    types: tuple[int, ...] = ()

    def params(self, encoding: str) -> list[str | None] | None:
        """Return the parameters as the journal keeps them: text as it is, binary as `\\x…`; None for none."""
        if self.bind is None or not self.bind.values:
            return None
        values = self.bind.values
        formats = self.bind.formats or (0,)
        if len(formats) == 1:
            formats *= len(values)
        return [
            None if value is None else _shown(value, encoding) if form == 0 else "\\x" + value.hex()
            for value, form in zip(values, formats, strict=True)
        ]


def passes_always(decision: Decision) -> bool:
    """Say whether nothing but the catalog decides over a plain read, and its text goes out as it came."""
    return (
        decision.is_settled
        and not decision.rewritten
        and decision.tag is None
        and not is_session_bound(decision.statement)
        and not ties(decision)
    )


class Prepared:
    """A statement as it was decided, and the gate that did."""

    def __init__(self, decision: Decision, gate: Gate, types: tuple[int, ...] = ()) -> None:
        self.decision = decision
        #: Of the parameters, as far as the client has said.
        self.types = types
        self.gate = gate
        self.needs_read_write = decision.needs_read_write or decision.may_take_approval
        self.is_write = decision.is_write
        #: Its Execute needs no waiting.
        self.is_fast = (
            not decision.is_write
            and decision.is_settled
            and not control.is_followed(decision)
            and not is_session_bound(decision.statement)
        )
        #: Nor does its Bind, whatever transaction it comes in: row locks need one that may write.
        self.is_plain = self.is_fast and not self.needs_read_write
        #: Nothing but the catalog decides, and the text goes out as it came.
        self.passes_always = passes_always(decision)
        #: Portals of a read are all the same.
        self.portal = Portal(decision, is_fast=self.is_fast)

    def bound(self, bind: bytes) -> Portal:
        """Return the portal that *bind*, the body of a Bind, makes."""
        if self.is_write or self.decision.may_take_approval:
            return Portal(self.decision, Bind.decode(bind), types=self.types)
        return self.portal


def _shown(value: bytes, encoding: str) -> str:
    """Return a text parameter as JSON can hold it; PostgreSQL will refuse what is no text."""
    return value.decode(encoding, "replace").replace("\0", "\N{REPLACEMENT CHARACTER}")
