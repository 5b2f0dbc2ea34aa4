"""
A statement's text as bytes and tokens: where a clause begins and where it ends.

The tree says what a text means but hardly ever where a clause stands; the tokens say where but not what. So
every place is found from a location that the tree gives and from there by counting parentheses. All offsets
are byte offsets in UTF-8, which is what libpg_query speaks.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import postgast
from google.protobuf.message import DecodeError
from postgast import pg_query_pb2 as pg

from sqlguard.errors import NotUnderstood

OPEN, CLOSE, DOT, SEMICOLON, COMMA = pg.ASCII_40, pg.ASCII_41, pg.ASCII_46, pg.ASCII_59, pg.ASCII_44
BRACKET, UNBRACKET, STAR = pg.ASCII_91, pg.ASCII_93, pg.ASCII_42
COMMENTS = frozenset({pg.SQL_COMMENT, pg.C_COMMENT})


@dataclass(frozen=True, slots=True)
class Token:
    kind: int
    start: int
    end: int


def parse(text: str) -> Any:
    """Return the tree of the one statement in *text*."""
    try:
        statements = postgast.parse(text).stmts
    except postgast.PgQueryError as error:
        raise NotUnderstood(f"not understood: {error}", rules=("syntax",)) from error
    except DecodeError:
        # protobuf reads a hundred levels, fewer than PostgreSQL's grammar.
        raise NotUnderstood(
            "the statement is nested too deeply",
            hint="use fewer sub-selects in each other",
            rules=("text-limits",),
        ) from None
    if len(statements) != 1:
        raise NotUnderstood("one statement at a time can be rewritten", rules=("several-statements",))
    return statements[0].stmt


def parts(message: Any) -> Iterator[Any]:
    """Yield the messages that are fields of *message*, in lists too."""
    for field, value in message.ListFields():
        if field.message_type is not None:
            yield from value if field.is_repeated else (value,)


@lru_cache(maxsize=4096)
def quote(name: str) -> str:
    """Return *name* as an identifier that PostgreSQL reads back as exactly that name."""
    plain = name.isascii() and name == name.lower() and name.isidentifier()
    if plain:
        tokens = postgast.scan(name).tokens
        if len(tokens) == 1 and tokens[0].keyword_kind in (pg.NO_KEYWORD, pg.UNRESERVED_KEYWORD):
            return name
    return '"' + name.replace('"', '""') + '"'


class Source:
    """One statement's text with its tokens, comments left out."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.bytes = text.encode()
        self.tokens = tuple(
            Token(t.token, t.start, t.end) for t in postgast.scan(text).tokens if t.token not in COMMENTS
        )
        self._content = text.lower()
        self._starts = [t.start for t in self.tokens]

    def may_name(self, name: str) -> bool:
        """Say whether the text may have the identifier *name* in it; False is certain."""
        return name.lower().replace('"', '""') in self._content or "u&" in self._content

    def __getitem__(self, index: int) -> Token:
        return self.tokens[index]

    def __len__(self) -> int:
        return len(self.tokens)

    def kind(self, index: int) -> int | None:
        """Return the kind of token *index*, None outside the text."""
        return self.tokens[index].kind if 0 <= index < len(self.tokens) else None

    def at(self, offset: int) -> int:
        """Return the index of the token that starts at byte *offset*."""
        index = bisect_left(self._starts, offset)
        if index == len(self._starts) or self._starts[index] != offset:
            raise NotUnderstood("a name was not found where the parser saw it", rules=("rewrite-not-placed",))
        return index

    def level(self, start: int) -> Iterator[int]:
        """Yield the indices from *start* on outside of parentheses opened after it, to the end of its own."""
        depth = 0
        for index in range(start, len(self.tokens)):
            kind = self.tokens[index].kind
            if kind in (CLOSE, UNBRACKET):
                depth -= 1
            if depth < 0 or (depth == 0 and kind == SEMICOLON):
                return
            if depth == 0:
                yield index
            if kind in (OPEN, BRACKET):
                depth += 1

    def find(self, start: int, kinds: Collection[int]) -> int | None:
        """Return the first token of *kinds* at the level of *start*; `a.where` and `AS where` are names."""
        for index in self.level(start):
            if self.tokens[index].kind in kinds and not self.is_name(index):
                return index
        return None

    def is_name(self, index: int) -> bool:
        """Say whether a keyword at *index* is used as a column or label."""
        return self.kind(index - 1) in (DOT, pg.AS)

    def gap(self, offset: int) -> str:
        """Return the blank that an insertion at byte *offset* needs behind it, if it needs one."""
        following = self.bytes[offset : offset + 1]
        return "" if following in (b"", b" ", b"\n", b"\t", b"\r", b")", b";") else " "

    def word(self, index: int) -> tuple[int, int]:
        """Return the bytes of token *index* with the blanks behind it: what to cut to be rid of it."""
        end = self.tokens[index].end
        while self.bytes[end : end + 1] in (b" ", b"\n", b"\t", b"\r"):
            end += 1
        return self.tokens[index].start, end

    def stop(self, start: int) -> int:
        """Return the index just behind the last token at the level of *start*."""
        return max(self.level(start), default=start - 1) + 1

    def around(self, index: int) -> Iterator[int]:
        """Yield the indices of the parentheses that are open at token *index*, from the inside out."""
        depth = 0
        for here in range(index - 1, -1, -1):
            kind = self.tokens[here].kind
            depth += (kind == CLOSE) - (kind == OPEN)
            if depth < 0:
                yield here
                depth = 0

    def close(self, index: int) -> int:
        """Return the index of the parenthesis that closes the one at *index*."""
        depth = 0
        for here in range(index, len(self.tokens)):
            kind = self.tokens[here].kind
            depth += (kind == OPEN) - (kind == CLOSE)
            if depth == 0:
                return here
        raise NotUnderstood("unbalanced parentheses", rules=("rewrite-not-placed",))
