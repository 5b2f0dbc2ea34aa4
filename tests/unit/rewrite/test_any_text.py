"""Properties of the rewrite of any statement: it is proved, and its copied parts stand where it says."""

import postgast
from hypothesis import given, settings
from soft_catalog import fixture_catalog
from soft_statements import texts

from sqlguard.errors import NotUnderstood, Refused
from sqlguard.rewrite import rewrite
from sqlguard.statement.model import Session

CATALOG = fixture_catalog()


@given(text=texts())
@settings(max_examples=300, deadline=None)
def test_any_statement_is_rewritten_and_proved(text: str) -> None:
    tree = postgast.parse(text).stmts[0].stmt
    try:
        done = rewrite(text, tree, CATALOG, Session())
    except NotUnderstood:
        raise
    except Refused:
        return
    assert done.changed or "DELETE" not in text
    for place in range(1, len(done.text) + 2):
        original = done.position(place)
        assert original is None or done.text[place - 1 : place] == text[original - 1 : original]
    again = rewrite(text, None, CATALOG, Session())
    assert again == done
