"""
Statements of our own among the client's messages, by the extended protocol.

They run under a name of ours, so that the client's unnamed statement and portal stay what they are, and their
replies are taken out. What an error left behind is closed before the name is used again.
"""

from typing import TYPE_CHECKING

from sqlguard.proxy.names import OWN
from sqlguard.rewrite.count import Count
from sqlguard.wire.messages import Bind, Close, Execute, Parse, Sync
from sqlguard.wire.replies import Expect, Part, Reply

if TYPE_CHECKING:
    from sqlguard.proxy.portals import Portal
    from sqlguard.proxy.session import AgentSession

_CLOSE = Close(is_portal=False, name=OWN).encode() + Close(is_portal=True, name=OWN).encode()
_BEFORE = (Reply.CLOSE, Reply.CLOSE, Reply.PARSE, Reply.BIND)
_BEHIND = (Reply.CLOSE, Reply.CLOSE)


def send(session: "AgentSession", text: str, *values: str | None, execute: Expect | None = None) -> Expect:
    """
    Send one statement of ours with *values* as its parameters; return what will come of its Execute.

    Its rows are captured. An error of it is the client's to know, unless the Sync that follows is ours.
    """
    encoding = session.encoding
    raw = tuple(None if value is None else value.encode(encoding) for value in values)
    bind = Bind(OWN, OWN, values=raw)
    return _send(session, Parse(OWN, text.encode(encoding)), bind, execute)


async def ask(session: "AgentSession", text: str, *values: str | None) -> Expect:
    """Run one statement of ours outside any pipeline of the client's; nothing of it reaches the client."""
    expect = send(session, text, *values)
    sync(session)
    await session.barrier()
    return expect


def sync(session: "AgentSession") -> None:
    """End what was sent outside any pipeline of the client's."""
    session.books.expect(Expect(Reply.SYNC, swallow=True))
    session.server.write(Sync().encode())


def convert(
    session: "AgentSession",
    types: tuple[int, ...],
    values: tuple[bytes | None, ...],
    formats: tuple[int, ...],
    wanted: tuple[int, ...],
) -> Expect:
    """Have the server turn *values* of *types* into the *wanted* formats: the row is captured."""
    text = "SELECT " + ", ".join(f"${n}" for n in range(1, len(types) + 1))
    bind = Bind(OWN, OWN, formats, values, wanted)
    return _send(session, Parse(OWN, text.encode("ascii"), types), bind, None)


def count(session: "AgentSession", count: Count, portal: "Portal | None") -> Expect:
    """Ask how many rows a write would change, with the values that the client has bound."""
    types: tuple[int, ...] = ()
    bind = Bind(OWN, OWN)
    if portal is not None and portal.bind is not None and count.params:
        given = portal.bind
        places = [n - 1 for n in count.params]
        types = tuple([portal.types[n] if n < len(portal.types) else 0 for n in places])
        formats = given.formats if len(given.formats) < 2 else tuple([given.formats[n] for n in places])  # noqa: PLR2004 (one stands for all)
        bind = Bind(OWN, OWN, formats, tuple([given.values[n] for n in places]))
    return _send(session, Parse(OWN, count.text.encode(session.encoding), types), bind, None)


def _send(session: "AgentSession", parse: Parse, bind: Bind, execute: Expect | None) -> Expect:
    expect = execute or Expect(Reply.EXECUTE, swallow=True, parts=(Part.CAPTURE,))
    for reply in _BEFORE:
        session.books.expect(Expect(reply, swallow=True))
    session.books.expect(expect)
    for reply in _BEHIND:
        session.books.expect(Expect(reply, swallow=True))
    session.server.write(_CLOSE + parse.encode() + bind.encode() + Execute(OWN).encode() + _CLOSE)
    return expect
