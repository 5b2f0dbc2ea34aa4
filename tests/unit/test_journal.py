"""The chain arithmetic finds every kind of damage, and says where."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlguard.journal import ACTION_FIELDS, Fault, Head, Intent, Link, chained, faults, redact, statement_hash

VALUES = st.lists(st.one_of(st.none(), st.text(max_size=20)), min_size=1, max_size=5)


def chain(entries: list[list[str | None]]) -> tuple[list[Link], Head]:
    links: list[Link] = []
    previous = b""
    for number, values in enumerate(entries, 1):
        own = chained(previous, values)
        links.append(Link(number, tuple(values), previous, own))
        previous = own
    return links, Head(len(links), previous)


@given(st.lists(VALUES, max_size=6))
def test_an_honest_chain_has_no_faults(entries: list[list[str | None]]) -> None:
    links, head = chain(entries)
    assert faults("t", "action", links, head) == []


@given(st.lists(VALUES, min_size=1, max_size=6), st.data())
def test_a_changed_entry_is_found_where_it_is(entries: list[list[str | None]], data: st.DataObject) -> None:
    links, head = chain(entries)
    at = data.draw(st.integers(0, len(links) - 1))
    values = tuple(data.draw(VALUES.filter(lambda v: tuple(v) != links[at].values)))
    links[at] = replace(links[at], values=values)
    assert faults("t", "action", links, head) == [
        Fault("t", "action", at + 1, "was changed after it was written")
    ]


@given(st.lists(VALUES, min_size=2, max_size=6), st.data())
def test_a_removed_entry_is_found_where_it_was(entries: list[list[str | None]], data: st.DataObject) -> None:
    links, head = chain(entries)
    at = data.draw(st.integers(0, len(links) - 1))
    del links[at]
    found = faults("t", "action", links, head)
    assert found
    assert found[0].entry == (at + 2 if at < len(links) else None)


@given(st.lists(VALUES, min_size=2, max_size=6), st.data())
def test_reordered_entries_are_found(entries: list[list[str | None]], data: st.DataObject) -> None:
    links, head = chain(entries)
    at = data.draw(st.integers(0, len(links) - 2))
    links[at], links[at + 1] = links[at + 1], links[at]
    assert faults("t", "action", links, head)[0].entry == at + 2


def test_a_changed_entry_with_a_new_hash_breaks_the_next_one() -> None:
    links, head = chain([["a"], ["b"], ["c"]])
    links[1] = Link(2, ("x",), links[1].prev_hash, chained(links[1].prev_hash or b"", ["x"]))
    assert [f.entry for f in faults("t", "action", links, head)] == [3]
    assert "removed or moved" in str(faults("t", "action", links, head)[0])


def test_entries_cut_off_the_end_are_missed() -> None:
    links, head = chain([["a"], ["b"]])
    assert str(faults("t", "event", links[:1], head)[0]) == (
        "task `t` at its end: has 1 entries where 2 were written"
    )
    assert faults("t", "event", links, None)[0].problem.startswith("the record of the chain's end")


def test_what_was_retired_leaves_a_chain_that_can_be_verified() -> None:
    links, head = chain([["a"], ["b"], ["c"]])
    kept = Head(1, head.last, first=links[1].hash or b"")
    assert faults("t", "action", links[2:], kept) == []
    assert faults("t", "action", [], Head(0, head.last, first=head.last)) == []


@given(
    st.lists(st.one_of(st.none(), st.text()), max_size=4),
    st.lists(st.one_of(st.none(), st.text()), max_size=4),
)
def test_different_values_never_share_a_text(a: list[str | None], b: list[str | None]) -> None:
    assert (chained(b"", a) == chained(b"", b)) is (a == b)


def test_an_intent_becomes_the_record_that_the_database_takes() -> None:
    intent = Intent(task="t", statement="SELECT 1", params=("a", None), rules=("r",), idempotency_key="k")
    record = intent.as_record()
    assert record["task_id"] == "t"
    assert "task" not in record
    assert record["statement_hash"] == statement_hash("SELECT 1", ("a", None))
    assert Intent(task="t").as_record()["statement_hash"] is None
    assert set(record) - {"statement_hash"} == set(ACTION_FIELDS) - {"id", "at"}


def test_a_statement_with_other_parameters_is_another_statement() -> None:
    hashes = {
        statement_hash("a", None),
        statement_hash("a", ()),
        statement_hash("a", ("1",)),
        statement_hash("a", (None,)),
        statement_hash("b", None),
        statement_hash("a\ud800", None),
    }
    assert len(hashes) == 6


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("ALTER ROLE x PASSWORD 'abc' -- 'c'", "ALTER ROLE x PASSWORD '***' -- 'c'"),
        ("CREATE USER a ENCRYPTED PASSWORD 'abc' VALID UNTIL '2030-01-01'",
         "CREATE USER a ENCRYPTED PASSWORD '***' VALID UNTIL '2030-01-01'"),
        ("ALTER USER MAPPING FOR a SERVER s OPTIONS (SET password 'x', SET host 'h')",
         "ALTER USER MAPPING FOR a SERVER s OPTIONS (SET password '***', SET host 'h')"),
        ("INSERT INTO u (id, Password, e) VALUES (1, 'a', 'b'), (2, 'c', 'd')",
         "INSERT INTO u (id, Password, e) VALUES (1, '***', 'b'), (2, '***', 'd')"),
        ("INSERT INTO u (id, token) SELECT 1, 'x'", "INSERT INTO u (id, token) SELECT 1, '***'"),
        ("UPDATE u SET api_key = 'é' || 17, n = 'ü' WHERE id = 3",
         "UPDATE u SET api_key = '***' || '***', n = 'ü' WHERE id = 3"),
        ("UPDATE u SET (a, secret) = (1, $$x$$)", "UPDATE u SET (a, secret) = ('***', '***')"),
        ("MERGE INTO u USING s ON true WHEN NOT MATCHED THEN INSERT (id, pwd) VALUES (1, 'x')",
         "MERGE INTO u USING s ON true WHEN NOT MATCHED THEN INSERT (id, pwd) VALUES (1, '***')"),
        ("SELECT 1 FROM u WHERE u.\"PASSWORD\" IN ('a', 'b') AND n = 'n'",
         "SELECT 1 FROM u WHERE u.\"PASSWORD\" IN ('***', '***') AND n = 'n'"),
        ("SELECT crypt('pw', salt)", "SELECT crypt('***', salt)"),
        ("SELECT dblink('host=x  password = y')", "SELECT dblink('***')"),
        ("CREATE SUBSCRIPTION s CONNECTION 'postgresql://a:b@c/d' PUBLICATION p",
         "CREATE SUBSCRIPTION s CONNECTION '***' PUBLICATION p"),
        ("SELECT 1; UPDATE u SET token = 'x'", "SELECT 1; UPDATE u SET token = '***'"),
        ('UPDATE u SET U&"t\\006fken" = \'x\'', 'UPDATE u SET U&"t\\006fken" = \'***\''),
        ("UPDATE u SET password = 'x' WHERE 'y'", "UPDATE u SET password = '***' WHERE 'y'"),
        ("UPDATE u SET password = 'x' WHERE WHERE n = 'y'", "UPDATE u SET password = '***' WHERE WHERE n = '***'"),
        ("SELECT 'password", "(a text of 16 bytes that can't be read)"),
        ("SELECT 'token', 'see https://example.org/a?b'", "SELECT 'token', 'see https://example.org/a?b'"),
        ("UPDATE orders SET status = 'paid' WHERE id = 7", "UPDATE orders SET status = 'paid' WHERE id = 7"),
    ],
)  # fmt: skip
def test_secrets_are_cut_out_of_a_statement(text: str, wanted: str) -> None:
    assert redact(text, None).text == wanted


def test_parameters_that_are_secrets_are_cut_out() -> None:
    text = "UPDATE u SET token = $2, n = $1 WHERE api_key = $3"
    assert redact(text, ("a", "b", None)).params == ("a", "***", None)
    assert redact("UPDATE token SET SET", ("a", None)).params == ("***", None)
    assert redact("SELECT $1", ("a",)).params == ("a",)


def test_a_policy_can_name_more_columns() -> None:
    intent = Intent(statement="UPDATE p SET ssn = '1'", executed="UPDATE p SET ssn = '1' -- x")
    record = intent.as_record(frozenset({"ssn"}))
    assert (record["statement"], record["executed"]) == (
        "UPDATE p SET ssn = '***'",
        "UPDATE p SET ssn = '***' -- x",
    )
    assert intent.as_record()["statement"] == "UPDATE p SET ssn = '1'"


def test_a_key_still_tells_statements_apart_that_differ_in_a_secret() -> None:
    one, two = (Intent(statement=f"ALTER ROLE x PASSWORD '{p}'", idempotency_key="k") for p in "ab")
    assert one.as_record()["statement"] == two.as_record()["statement"]
    assert one.as_record()["statement_hash"] != two.as_record()["statement_hash"]
