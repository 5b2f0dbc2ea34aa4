"""Every encoding that is accepted is one that Python knows; the others are refused."""

import codecs

import pytest

from sqlguard.errors import NotUnderstood
from sqlguard.proxy.encoding import _CODECS, codec


def test_pythons_codecs_exist() -> None:
    for name in _CODECS.values():
        assert codecs.lookup(name)


@pytest.mark.parametrize(
    ("name", "found"), [("UTF8", "utf-8"), ("LATIN1", "iso8859-1"), ("EUC_JP", "euc_jp")]
)
def test_postgresqls_names(name: str, found: str) -> None:
    assert codec(name) == found


@pytest.mark.parametrize("name", ["SJIS", "BIG5", "GBK", "GB18030", "JOHAB", "UHC", "MULE_INTERNAL", ""])
def test_encodings_whose_bytes_may_look_like_sql(name: str) -> None:
    with pytest.raises(NotUnderstood):
        codec(name)
