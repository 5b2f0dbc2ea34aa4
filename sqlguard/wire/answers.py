"""
The quick look at what the server sends: whole answers to messages whose replies just pass, which most chunks are.

The hot path: a few microseconds here are a tenth of what a short read costs. Whatever is not quite so simple gets None
or False, and the books (`session`) look at it message by message.
"""

from collections.abc import Collection, Iterable, Mapping

from sqlguard.wire.buffer import HEADER
from sqlguard.wire.messages import CommandComplete, RowDescription
from sqlguard.wire.replies import ANSWERS, PLAIN, Effect, Expect, Reply
from sqlguard.wire.runs import RUN

READY_HEADER = b"Z\0\0\0\5"
STATUSES = frozenset((b"I", b"T", b"E"))
_READY_BYTES = 6
_BODY = 5
_QUERY_ANSWERS = frozenset(b"TDCI")
_NONE: Mapping[int, Effect] = {}
#: By identity, as hashing an Enum takes longer than all the rest.
_PLAIN_ANSWERS: Mapping[Expect | None, Mapping[int, Effect]] = {
    None: _NONE,
    **{item: ANSWERS[reply] for reply, item in PLAIN.items()},
}
_ALL_PLAIN = frozenset(PLAIN.values()).issuperset
#: Messages of one chunk, and sequences that are remembered.
_MOST, _KNOWN = 64, 1024
_ROW, _COMPLETE, _DESCRIPTION = b"DCT"
_QUERY = [PLAIN[Reply.QUERY]]
#: What the answer to `RUN` begins with, up to the description of its rows.
_BOUND = b"2\0\0\0\4T"
#: What the answer of a SELECT ends with that found one row, but for the transaction's status.
_ONE_ROW = CommandComplete(b"SELECT 1").encode() + READY_HEADER
_ONE_ROW_BYTES = len(_ONE_ROW) + 1
_NEW = -1
_known: dict[tuple[object, ...], int | None] = {}


class Answers:
    """One session's: knows what its last answers of one row began with, as the same is asked again and again."""

    def __init__(self) -> None:
        no_columns = RowDescription(()).encode()
        self._query_head, self._run_head = no_columns, _BOUND[:-1] + no_columns

    def complete(self, chunk: bytes, expected: Collection[Expect], *, has_begun: bool) -> int | None:
        """Return how many of *expected* a *chunk*, which ends with a ReadyForQuery, answers; as `answered` does."""
        asked = [*expected]
        if asked == _QUERY:
            if is_one_row(chunk, self._query_head):
                return 1
            if not is_one_answer(chunk):
                return None
            self._query_head = _head(chunk) or self._query_head
            return 1
        if asked == RUN and not has_begun:
            if is_one_row(chunk, self._run_head):
                return len(RUN)
            if is_one_run(chunk):
                self._run_head = _head(chunk) or self._run_head
                return len(RUN)
        return answered(chunk, expected, has_begun=has_begun)


def is_one_row(chunk: bytes, head: bytes) -> bool:
    """Say whether *chunk* is *head*, one row and the end of a SELECT; the quickest look, at what is asked most."""
    if chunk[-_ONE_ROW_BYTES:-1] != _ONE_ROW or not chunk.startswith(head):
        return False
    at, end = len(head), len(chunk) - _ONE_ROW_BYTES
    if at + _BODY > end:
        return False
    kind, length = HEADER.unpack_from(chunk, at)
    return kind == _ROW and at + 1 + length == end and chunk[-1:] in STATUSES


def _head(chunk: bytes) -> bytes | None:
    """Return what is before the row in a whole answer that `is_one_row` may know again, None if there is no such."""
    if chunk[-_ONE_ROW_BYTES:-1] != _ONE_ROW:
        return None
    at = _BODY if chunk.startswith(_BOUND) else 0
    kind, length = HEADER.unpack_from(chunk, at)
    return chunk[: at + 1 + length] if kind == _DESCRIPTION else None


def is_one_answer(chunk: bytes) -> bool:
    """Say whether *chunk* is the whole answer to a Query that asks for rows or runs a command."""
    at, end = 0, len(chunk) - _READY_BYTES
    unpack_from = HEADER.unpack_from
    while at < end:
        kind, length = unpack_from(chunk, at)
        if kind not in _QUERY_ANSWERS:
            return False
        at += 1 + length
    return at == end > 0 and chunk[-1:] in STATUSES


def is_one_run(chunk: bytes) -> bool:
    """Say whether *chunk* is the whole answer to `RUN`, which brings rows."""
    if not chunk.startswith(_BOUND):
        return False
    end, kind = len(chunk) - _READY_BYTES, _ROW
    unpack_from = HEADER.unpack_from
    _, length = unpack_from(chunk, _BODY)
    at = _BODY + 1 + length
    while at < end and kind == _ROW:
        kind, length = unpack_from(chunk, at)
        at += 1 + length
    return kind == _COMPLETE and at == end and chunk[-1:] in STATUSES


def answered(chunk: bytes, expected: Collection[Expect], *, has_begun: bool) -> int | None:
    """
    Return how many of *expected* a *chunk* answers, if it does so wholly and they are plain ones.

    *has_begun*: something of the answer to the first of them has come before.
    """
    kinds = _kinds(chunk)
    if kinds is None:
        return None
    # The same few messages are sent and answered again and again.
    key = (has_begun, kinds, *expected)
    found = _known.get(key, _NEW)
    if found == _NEW:
        found = _count(kinds, expected, has_begun=has_begun)
        if _ALL_PLAIN(expected):
            if len(_known) >= _KNOWN:
                _known.clear()
            _known[key] = found
    return found


def _kinds(chunk: bytes) -> bytes | None:
    """Return the types of the messages of *chunk*, runs of rows as one; None if it does not end with a message."""
    at, size, last = 0, len(chunk), 0
    unpack_from = HEADER.unpack_from
    found = bytearray()
    while size - at >= _BODY:
        kind, length = unpack_from(chunk, at)
        at += 1 + length
        if kind != last or kind != _ROW:
            found.append(kind)
            last = kind
            if len(found) > _MOST:
                return None
    return bytes(found) if at == size and chunk[-1:] in STATUSES else None


def _count(kinds: bytes, expected: Iterable[Expect], *, has_begun: bool) -> int | None:
    complete, begun = 0, has_begun
    heads = iter(expected)
    head = next(heads, None)
    answers = _plain_answers(head)
    for kind in kinds:
        effect = answers.get(kind)
        if effect is Effect.MORE or effect is Effect.PART:
            begun = True
            continue
        if effect is Effect.READY:
            # A Query and a FunctionCall have had another answer before this one.
            if head is None or not (begun or head.reply is Reply.SYNC):
                return None
        elif effect is not Effect.DONE:
            return None
        complete, begun = complete + 1, False
        head = next(heads, None)
        answers = _plain_answers(head)
    return complete if kinds[-1:] == READY_HEADER[:1] else None


def _plain_answers(head: Expect | None) -> Mapping[int, Effect]:
    found = _PLAIN_ANSWERS.get(head)
    if found is not None:
        return found
    return ANSWERS.get(head.reply, _NONE) if head is not None and head.is_plain else _NONE
