"""
The columns that a user's BEFORE trigger may fill: every `NEW.column` of its body that is not plainly only read.

A trigger in plpgsql can change a row in no other way than by naming NEW, and what it executes as text can't see NEW at
all. So the body's words are enough: which of them stand where something is assigned. In doubt it is filled.
"""

import postgast

from sqlguard.catalog import Catalog, Function, Table
from sqlguard.rewrite.source import COMMENTS

#: Behind one of these a name begins a statement, or is one of those that something is put into.
_TARGETS = frozenset(
    {";", "begin", "then", "else", "loop", ">>", "into", "strict", ",", "diagnostics", "for", "foreach"}
)


def filled(table: Table, event: str, catalog: Catalog) -> frozenset[str] | None:
    """Return the columns that triggers may fill before a row of *table* is written, None where it may be any."""
    found: set[str] = set()
    for one in (table, *catalog.descendants(table.oid)):
        for trigger in one.triggers:
            if (
                trigger.ours
                or not trigger.for_each_row
                or trigger.timing == "AFTER"
                or event not in trigger.events
            ):
                continue
            columns = _filled_by(catalog.functions.get(trigger.function))
            if columns is None:
                return None
            found |= columns
    return frozenset(found)


def _filled_by(function: Function | None) -> frozenset[str] | None:
    if function is None or function.language != "plpgsql":
        return None
    words = _words(function.source)
    if "call" in words:  # a procedure may give its arguments other values
        return None
    found = set()
    for at, word in enumerate(words):
        if word == "return" and words[at + 1 : at + 2] not in (["new"], ["null"]):
            return None
        if word != "new":
            continue
        if words[at + 1 : at + 2] == ["."]:
            if at == 0 or words[at - 1] in _TARGETS:
                found.add(words[at + 2])
        elif words[at - 1 : at] != ["return"]:
            return None
    return frozenset(found)


def _words(source: str) -> list[str]:
    raw = source.encode()
    tokens = (t for t in postgast.scan(source).tokens if t.token not in COMMENTS)
    return [_folded(raw[token.start : token.end].decode()) for token in tokens]


def _folded(word: str) -> str:
    return word[1:-1].replace('""', '"') if word.startswith('"') else word.lower()
