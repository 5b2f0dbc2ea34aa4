"""
A psql script cut into the texts that psql sends, with the data behind COPY … FROM stdin.

psql has no grammar but a scanner: it looks for the semicolon outside of quotes, comments, parentheses and BEGIN … END.
Meta-commands are left out; those that send what is there (`\\g`, `\\gset`, `\\;`) end a text as a semicolon does.
Variables are not filled in.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""
    (?P<escaped>[eE]'(?:[^'\\]|\\.|'')*')
  | (?P<quoted>'(?:[^']|'')*'|"(?:[^"]|"")*")
  | (?P<dollar>\$(?P<tag>(?:[A-Za-z_\x80-\U0010ffff][\w\x80-\U0010ffff]*)?)\$.*?\$(?P=tag)\$)
  | (?P<line>--[^\n]*)
  | (?P<block>/\*)
  | (?P<meta>\\(?P<command>[a-z?!;]*)[^\n]*)
  | (?P<word>[A-Za-z_\x80-\U0010ffff][\w$\x80-\U0010ffff]*)
  | (?P<end>;)
  | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_SENDS = ("g", "gx", "gset", "gexec", "gdesc", "crosstabview", "watch", ";")
_FROM_STDIN = re.compile(r"\s*copy\b.*\bfrom\s+stdin\b", re.IGNORECASE | re.DOTALL)
_ROUTINE = re.compile(r"\s*create\s+(or\s+replace\s+)?(function|procedure)\b", re.IGNORECASE)
_COMMENT = re.compile(r"/\*|\*/")


@dataclass(frozen=True, slots=True)
class Piece:
    """One text that goes to the server, and what follows it as data."""

    text: str
    data: str = ""


def pieces(script: str) -> Iterator[Piece]:
    """Yield the texts of *script* in order."""
    at = start = 0
    depth = blocks = 0
    kept: list[str] = []
    while found := _TOKEN.match(script, at):
        kind = found.lastgroup if found.lastgroup != "tag" else "dollar"
        word = found[0]
        at = found.end()
        if kind == "block":
            at = _comment_end(script, at)
        ends = (kind == "end" and depth <= 0 and blocks <= 0) or found["command"] in _SENDS
        if not ends:
            depth += (word == "(") - (word == ")")
            blocks = (
                _blocks(blocks, word, "".join(kept) + script[start : found.start()])
                if kind == "word"
                else blocks
            )
            if found["meta"] is not None:
                kept.append(script[start : found.start()])
                start = at
            continue
        text = ("".join(kept) + script[start : found.start()]).strip()
        if found["command"] == ";":
            # What follows on the line is the next text.
            at = found.start() + 2
        data = ""
        if _FROM_STDIN.match(text):
            data, at = _data(script, at)
        start, depth, blocks, kept = at, 0, 0, []
        if text:
            yield Piece(text, data)


def _comment_end(script: str, at: int) -> int:
    depth = 1
    while depth:
        found = _COMMENT.search(script, at)
        if found is None:
            return len(script)
        depth += 1 if found[0] == "/*" else -1
        at = found.end()
    return at


def _blocks(blocks: int, word: str, before: str) -> int:
    """Count BEGIN … END of a routine's body in the standard's form, and CASE … END in it."""
    lower = word.lower()
    if lower not in ("begin", "case", "end") or not _ROUTINE.match(before):
        return blocks
    if lower == "end":
        return max(blocks - 1, 0)
    return blocks + 1 if lower == "begin" or blocks else blocks


def _data(script: str, at: int) -> tuple[str, int]:
    begin = script.find("\n", at) + 1
    end = script.find("\n\\.", begin - 1)
    if not begin or end < 0:
        return "", at
    after = script.find("\n", end + 1)
    return script[begin : end + 1], after if after >= 0 else len(script)
