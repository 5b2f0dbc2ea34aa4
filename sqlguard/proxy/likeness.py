"""
Texts that differ in a number only: what was decided of one holds for the other, where no number can matter.

That is said of a read in whose text a small integer stands behind a comparison, and which calls nothing but
comparisons of PostgreSQL's own: what it reads and what it may run is then the same for every such number. Texts with
quotes, comments, `$` or a backslash are left alone, so that what looks like a number is one; at most nine digits, so
that it is always an `integer`.
"""

import re

from sqlguard.plan import Decision

_NUMBER = re.compile(rb"(?:(?<=[=<>])|(?<=[=<>] ))[0-9]{1,9}(?=[\s;),\x00])")
_DOUBTFUL = re.compile(rb"['\"$\\\x80-\xff]|--|/\*")
_COMPARISONS = frozenset({"=", "<>", "!=", "<", "<=", ">", ">="})
_HEADER = 5
#: Stands for a number. It ends a text and can't be in one, so nothing else looks like it.
_ANY = b"\0"
#: Longer texts are seldom the same but for a number.
_LONGEST = 1024


def likeness(message: bytes) -> bytes | None:
    """
    Return what is alike in all such Query messages, None if nothing can be said; the length is left out.

    A message whose likeness is known from `certain` is certain, too: it differs in nothing but digits.
    """
    size = len(message)
    if size > _LONGEST or int.from_bytes(message[1:_HEADER], "big") != size - 1:
        return None
    if message.find(_ANY, _HEADER) != size - 1:
        return None
    found, count = _NUMBER.subn(_ANY, message[_HEADER:])
    return found if count else None


def certain(message: bytes) -> bytes | None:
    """Return the likeness of a message, None also if what looks like a number may be none."""
    return None if _DOUBTFUL.search(message, _HEADER) else likeness(message)


def is_alike(decisions: tuple[Decision, ...]) -> bool:
    """Say whether no number behind a comparison can change what was decided; they pass as they are already."""
    if len(decisions) != 1:
        return False
    statement = decisions[0].statement
    if statement.inner is not None or statement.writes:
        return False
    return all(
        call.what == "operator" and call.name in _COMPARISONS and not call.candidates
        for call in statement.calls
    )
