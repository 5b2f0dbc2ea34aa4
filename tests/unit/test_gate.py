"""The path as a whole: every text gives decisions, and nothing but decisions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlguard import gate as gates
from sqlguard.catalog import Catalog, Column, Guard, Table, Unique
from sqlguard.errors import ApprovalRequired, SqlguardError
from sqlguard.gate import Gate
from sqlguard.policy import parse_policy
from sqlguard.policy.context import Context
from sqlguard.policy.verdict import Effect
from sqlguard.statement.model import Kind, Session

POLICY = """
name = "test"
[tables."public.*"]
select = true
insert = true
update = true
delete = "soft"
"""


def column(name: str, number: int, *, not_null: bool = False) -> Column:
    return Column(name, number, 23, "integer", not_null=not_null)


ORDERS = Table(
    oid=20001,
    schema="public",
    name="orders",
    kind="r",
    columns=(
        column("id", 1, not_null=True),
        column("total", 2),
        Column("deleted_at", 3, 1184, "timestamp with time zone"),
        Column("deleted_by_agent", 4, 25, "text"),
    ),
    uniques=(Unique("orders_pkey", ("id",), primary=True, constraint=True),),
    guard=Guard("soft", 1, ("deleted_at", "deleted_by_agent")),
)


@pytest.fixture
def gate() -> Gate:
    catalog = Catalog("1", 180000, {ORDERS.oid: ORDERS})
    return Gate(Context(catalog, parse_policy(POLICY, "test"), None))


@pytest.mark.parametrize(
    ("text", "effects"),
    [
        ("SELECT 1", [Effect.ALLOW]),
        ("", [Effect.ALLOW]),
        ("SELECT id FROM orders; SELECT 2", [Effect.ALLOW, Effect.ALLOW]),
        ("DELETE FROM orders WHERE id = 1", [Effect.REWRITE]),
        ("BEGIN; DELETE FROM orders WHERE id = 1; COMMIT", [Effect.ALLOW, Effect.REWRITE, Effect.ALLOW]),
        ("DROP TABLE orders", [Effect.REFUSE]),
        ("SELECT 1; DROP TABLE orders", [Effect.ALLOW, Effect.REFUSE]),
        ("this is no SQL", [Effect.REFUSE]),
    ],
)
def test_one_decision_per_statement(gate: Gate, text: str, effects: list[Effect]) -> None:
    assert [d.verdict.effect for d in gate.decide(text, Session())] == effects


def test_a_rewrite_says_how_it_is_to_be_shown(gate: Gate) -> None:
    (decision,) = gate.decide("DELETE FROM orders WHERE id = 1", Session())
    assert decision.rewritten
    assert decision.tag == "DELETE"
    assert decision.text.startswith("UPDATE orders SET deleted_at")
    assert decision.is_write


def test_what_is_read_keeps_its_bytes(gate: Gate) -> None:
    text = "SELECT  id\n FROM orders -- all of them"
    (decision,) = gate.decide(text, Session())
    assert decision.text == text
    assert not decision.rewritten


def test_the_cache_knows_what_a_text_depends_on(gate: Gate) -> None:
    text = "DELETE FROM orders WHERE id = 1"
    first = gate.decide(text, Session())
    assert gate.decide(text, Session()) is first
    elsewhere = gate.decide(text, Session(search_path=("other",)))
    assert elsewhere is not first
    assert elsewhere[0].verdict.effect is Effect.REFUSE
    assert (gate.hits, gate.misses) == (1, 2)


def test_an_execute_is_decided_by_what_was_prepared(gate: Gate) -> None:
    decisions = gate.decide("PREPARE gone AS DELETE FROM orders WHERE id = $1", Session())
    session = gates.advance(Session(), decisions[0])
    (execute,) = gate.decide("EXECUTE gone(1)", session)
    assert execute.kind is Kind.EXECUTE
    assert execute.allowed
    assert execute.is_write
    assert execute.tag == "DELETE"
    (unknown,) = gate.decide("EXECUTE gone(1)", Session())
    assert not unknown.allowed


def test_several_statements_see_what_the_earlier_ones_changed(gate: Gate) -> None:
    decisions = gate.decide("PREPARE p AS SELECT 1; EXECUTE p", Session())
    assert [d.allowed for d in decisions] == [True, True]


def test_a_refusal_becomes_an_error_for_the_agent_without_the_rule(gate: Gate) -> None:
    refused = gates.first_refused(gate.decide("DROP TABLE orders", Session()))
    assert refused is not None
    fault = gates.error(refused)
    assert fault.sqlstate == "SG002"
    assert fault.hint
    assert fault.rules
    assert not any(rule in f"{fault.message} {fault.detail} {fault.hint}" for rule in fault.rules)


def test_a_syntax_error_is_told_as_postgresql_would(gate: Gate) -> None:
    fault = gates.error(gate.decide("SELECT FROM WHERE 1", Session())[0])
    assert fault.sqlstate == "42601"
    assert fault.position > 0


def test_approval_is_an_error_of_its_own() -> None:
    decision = gates.refusal("x", ApprovalRequired("ask first"))
    assert decision.verdict.effect is Effect.APPROVE
    assert isinstance(gates.error(decision), ApprovalRequired)


@given(st.text(max_size=200))
def test_no_text_raises(text: str) -> None:
    gate = Gate(Context(Catalog("1", 180000, {ORDERS.oid: ORDERS}), parse_policy(POLICY, "test"), None))
    for decision in gate.decide(text, Session()):
        if not decision.allowed:
            assert isinstance(gates.error(decision), SqlguardError)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("BEGIN", "BEGIN READ WRITE"),
        (
            "START TRANSACTION ISOLATION LEVEL SERIALIZABLE",
            "START TRANSACTION ISOLATION LEVEL SERIALIZABLE READ WRITE",
        ),
        ("BEGIN READ ONLY", "BEGIN READ ONLY"),
        ("BEGIN -- now", "BEGIN READ WRITE"),
    ],
)
def test_a_block_is_opened_for_writing_unless_the_client_says_otherwise(
    gate: Gate, text: str, expected: str
) -> None:
    assert gates.begin_text(gate.decide(text, Session())[0]) == expected


# --- texts that end in a number

ALIKE = (
    "UPDATE orders SET total = 1 WHERE id = {}",
    "update public.orders as o set total=2 where o.id={} ; ",
    "UPDATE orders SET total = total + 1 WHERE total = {}",
    "SELECT id, total FROM orders WHERE id = {}",
    "SELECT total FROM orders WHERE id = {} /*idempotency_key='k{}', reason='a = 5'*/",
    "UPDATE orders SET total = 7 /* = 3 */ WHERE id = {}\n/*\nreason='x'*/ ",
)
NOT_ALIKE = (
    "DELETE FROM orders WHERE id = {}",  # rewritten
    "SELECT * FROM orders WHERE id = {}",  # too
    "UPDATE orders SET total = {}",
    "UPDATE orders SET total = 5 WHERE {} = {}",
    "UPDATE orders SET total = 5 WHERE id >= {}",
    "UPDATE orders SET total = 5 WHERE id = - {}",
    "UPDATE orders SET total = 5 WHERE id = 1 OR id = {}",
    "UPDATE orders SET total = 5 WHERE id = 1 -- AND total = {}",
    "UPDATE orders SET total = 5 WHERE id = 1 /* /* */ total = {}",
    "UPDATE orders SET total = 5 WHERE id = {} /* a */ /* b */",
    "UPDATE orders SET total = 5 WHERE id = {} /* a /* b */ c */",
    "UPDATE orders SET total = 5 WHERE id = {}.5",
    "UPDATE orders SET total = 5 WHERE id = 1{}0000000000",
    "UPDATE orders SET total = 5 WHERE id = {} RETURNING id",
    "SELECT id FROM orders WHERE id = {} LIMIT {}",
    "EXPLAIN SELECT id FROM orders WHERE id = {}",
    "SELECT id FROM orders WHERE id = {}; SELECT id FROM orders WHERE id = {}",
    "UPDATE orders SET total = 5 WHERE id = {} \u00e9",
)


@pytest.mark.parametrize("form", [*ALIKE, *NOT_ALIKE])
def test_what_is_decided_of_a_number_is_decided_of_another(gate: Gate, form: str) -> None:
    for number in ("3", "4", "123456789", "03", "1234567890"):
        text = form.format(*[number] * form.count("{}"))
        known = gate.hits
        found = gate.decide(text, Session())
        is_alike = form in ALIKE and number in ("4", "123456789")
        assert gate.hits - known == is_alike
        (decision, *more), (other, *others) = found, Gate(gate.context).decide(text, Session())
        assert len(more) == len(others)
        assert decision.statement == other.statement
        assert (decision.verdict, decision.text, decision.answers) == (
            other.verdict,
            other.text,
            other.answers,
        )
        assert (decision.count, decision.steady) == (other.count, other.steady)
        assert gate.decide(text, Session()) is found


def test_a_number_is_remembered_for_what_the_session_was(gate: Gate) -> None:
    gate.decide("UPDATE orders SET total = 1 WHERE id = 1", Session())
    elsewhere = Session(search_path=("other",))
    assert (
        gate.decide("UPDATE orders SET total = 1 WHERE id = 2", elsewhere)[0].statement.writes[0].table.oid
        == 0
    )
    gate.forget()
    known = gate.hits
    gate.decide("UPDATE orders SET total = 1 WHERE id = 3", Session())
    assert gate.hits == known
