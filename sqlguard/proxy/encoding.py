"""PostgreSQL's client_encoding as a Python codec: statement text is decoded by it before it is judged."""

from functools import lru_cache

from sqlguard.errors import NotUnderstood

#: PostgreSQL's names (chapter "Character Set Support"), lower case without punctuation, to Python's.
_CODECS = {
    "utf8": "utf-8",
    "unicode": "utf-8",
    "sqlascii": "utf-8",
    "latin1": "iso8859-1",
    "latin2": "iso8859-2",
    "latin3": "iso8859-3",
    "latin4": "iso8859-4",
    "latin5": "iso8859-9",
    "latin6": "iso8859-10",
    "latin7": "iso8859-13",
    "latin8": "iso8859-14",
    "latin9": "iso8859-15",
    "latin10": "iso8859-16",
    "iso88595": "iso8859-5",
    "iso88596": "iso8859-6",
    "iso88597": "iso8859-7",
    "iso88598": "iso8859-8",
    "koi8r": "koi8-r",
    "koi8u": "koi8-u",
    "win866": "cp866",
    "win874": "cp874",
    "win1250": "cp1250",
    "win1251": "cp1251",
    "win1252": "cp1252",
    "win1253": "cp1253",
    "win1254": "cp1254",
    "win1255": "cp1255",
    "win1256": "cp1256",
    "win1257": "cp1257",
    "win1258": "cp1258",
    "eucjp": "euc_jp",
    "euckr": "euc_kr",
    "euccn": "gb2312",
}


@lru_cache(maxsize=64)
def codec(client_encoding: str) -> str:
    """Return Python's name; raises NotUnderstood for an encoding whose text is not judged (SJIS, BIG5 …)."""
    name = "".join(c for c in client_encoding.lower() if c.isalnum())
    try:
        return _CODECS[name]
    except KeyError:
        raise NotUnderstood(
            f"client_encoding `{client_encoding}` is not accepted", hint="SET client_encoding = 'UTF8'"
        ) from None
