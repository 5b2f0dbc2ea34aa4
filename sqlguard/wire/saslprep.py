"""
SASLprep (RFC 4013) as PostgreSQL does it, which is not to the letter.

PostgreSQL judges the characters *before* it normalises them, maps U+200B to a blank although RFC 3454 lists it
as mapped to nothing too, and takes a password that does not fit as it is (src/common/saslprep.c, 15 to 18).
"""

import stringprep
import unicodedata

_PROHIBITED = (
    stringprep.in_table_c12,
    stringprep.in_table_c21_c22,
    stringprep.in_table_c3,
    stringprep.in_table_c4,
    stringprep.in_table_c5,
    stringprep.in_table_c6,
    stringprep.in_table_c7,
    stringprep.in_table_c8,
    stringprep.in_table_c9,
    stringprep.in_table_a1,
)


def prepared(password: str | bytes) -> bytes:
    """Return the bytes that go into the hash; bytes that are no UTF-8 go in as they are."""
    raw = password.encode("utf-8", "surrogateescape") if isinstance(password, str) else password
    if raw.isascii():
        return raw
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return raw
    mapped = "".join(map(_mapped, text))
    if not mapped or any(check(one) for one in mapped for check in _PROHIBITED) or not _directed(mapped):
        return raw
    return unicodedata.normalize("NFKC", mapped).encode()


def _mapped(character: str) -> str:
    if stringprep.in_table_c12(character):
        return " "
    return "" if stringprep.in_table_b1(character) else character


def _directed(text: str) -> bool:
    """Say whether right-to-left characters stand alone and at both ends, if there are any (RFC 3454, 6)."""
    if not any(map(stringprep.in_table_d1, text)):
        return True
    if any(map(stringprep.in_table_d2, text)):
        return False
    return stringprep.in_table_d1(text[0]) and stringprep.in_table_d1(text[-1])
