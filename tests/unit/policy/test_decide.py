"""The judge: strongest finding, fail closed, what carries a statement out, grants, tiers and gates."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from guard_world import ALL, CONTEXT, NONE, PATH, SESSION, context, read, verdict
from pydantic import ValidationError

from sqlguard.policy import decide, late, registry
from sqlguard.policy.context import Context
from sqlguard.policy.late import Measured
from sqlguard.policy.model import Gate
from sqlguard.policy.registry import BY_KIND, Rule
from sqlguard.policy.tiers import Facts, holds
from sqlguard.policy.verdict import Effect, Finding, Verdict
from sqlguard.statement.model import Kind, Session, Statement


def effect(text: str, where: Context = CONTEXT) -> Effect:
    return verdict(text, where=where).effect


@pytest.fixture
def extra(monkeypatch: pytest.MonkeyPatch) -> list[Rule]:
    """Rules for SELECT that a test adds."""
    rules = list(BY_KIND[Kind.SELECT])
    monkeypatch.setitem(registry.BY_KIND, Kind.SELECT, rules)
    return rules


def test_a_rule_that_raises_is_a_refusal(extra: list[Rule]) -> None:
    def broken(_statement: Statement, _session: Session, _context: Context) -> Iterator[Finding]:
        raise KeyError("secret")

    extra.append(Rule("broken", broken, frozenset({Kind.SELECT})))
    found = verdict("SELECT 1")
    assert found.effect is Effect.REFUSE
    assert found.decisive is not None
    assert found.decisive.sqlstate == "SG007"
    assert "secret" not in f"{found.decisive.message}{found.decisive.detail}"


def test_no_rule_speaking_is_a_refusal(extra: list[Rule]) -> None:
    extra.clear()
    assert effect("SELECT 1") is Effect.REFUSE


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_has_a_rule_that_speaks_for_it(kind: Kind) -> None:
    assert BY_KIND[kind], kind


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SELECT * FROM accounts", Effect.ALLOW),
        ("DELETE FROM orders WHERE id = 1", Effect.REWRITE),
        ("DELETE FROM docs WHERE id = 1", Effect.REFUSE),
        ("DELETE FROM audit_log WHERE id = 1", Effect.REFUSE),
        ("WITH d AS (DELETE FROM orders WHERE id = 1 RETURNING *) SELECT * FROM d", Effect.REWRITE),
        ("EXPLAIN DELETE FROM orders WHERE id = 1", Effect.ALLOW),
        ("EXPLAIN DELETE FROM docs WHERE id = 1", Effect.REFUSE),
        ("EXPLAIN DELETE FROM orders", Effect.REFUSE),
        ("EXPLAIN ANALYZE DELETE FROM orders WHERE id = 1", Effect.REFUSE),
        ("EXPLAIN ANALYZE SELECT 1", Effect.ALLOW),
        ("EXPLAIN ANALYZE SELECT refund(1)", Effect.REFUSE),
        ("PREPARE p AS DELETE FROM orders WHERE id = $1", Effect.REWRITE),
        ("PREPARE p AS DELETE FROM orders", Effect.REFUSE),
        ("DECLARE c CURSOR FOR SELECT pg_sleep(1)", Effect.REFUSE),
        ("UPDATE notes SET body = 'x' WHERE id = 1", Effect.REFUSE),  # nothing guards it
        ("SELECT * FROM v_active_accounts", Effect.ALLOW),
        ("SELECT * FROM v_sleepy", Effect.REFUSE),
        ("SELECT f_read(1)", Effect.ALLOW),
        ("SELECT grade(3)", Effect.ALLOW),
        ("SELECT innocent(1)", Effect.REFUSE),
        ("SELECT agg_nosy(id) FROM accounts", Effect.REFUSE),
        ("SELECT lower('A')", Effect.ALLOW),
        ("SELECT app.lower('A')", Effect.REFUSE),
        ("SELECT no_such_function(1)", Effect.REFUSE),
        ("SELECT nextval('s')", Effect.REFUSE),
        ("INSERT INTO kv VALUES (nextval('s')::text)", Effect.ALLOW),
        ("CALL refund(1)", Effect.REFUSE),
        ("SELECT pg_advisory_unlock_all()", Effect.ALLOW),
        ("SHOW ALL", Effect.APPROVE),
        ("FETCH ALL FROM c", Effect.REFUSE),
    ],
)
def test_verdicts(text: str, expected: Effect) -> None:
    assert effect(text) is expected


def test_what_does_not_exist_is_answered_as_postgres_would() -> None:
    states = {
        t: verdict(t).decisive for t in ("SELECT * FROM nowhere", "SELECT nothing(1)", "EXECUTE nothing")
    }
    assert [f.sqlstate for f in states.values() if f] == ["42P01", "42883", "26000"]


def test_a_temporary_table_is_the_sessions_own() -> None:
    session = Session(search_path=PATH, temporary={"orders": ("id",)})
    for text in (
        "DELETE FROM orders",
        "UPDATE orders SET id = 1",
        "INSERT INTO orders VALUES (1)",
        "TABLE orders",
    ):
        assert verdict(text, session).effect is Effect.ALLOW
    assert verdict("DELETE FROM app.orders", session).effect is Effect.REFUSE


def test_fetch_and_execute_of_what_was_decided() -> None:
    cursors = SESSION.after(cursors={"c": read("SELECT 1")})
    assert verdict("FETCH ALL FROM c", cursors).effect is Effect.ALLOW
    prepared = SESSION.after(prepared={"d": read("DELETE FROM orders")})
    assert verdict("EXECUTE d", prepared).effect is Effect.REFUSE


# --- grants ------------------------------------------------------------------------------------------------

COLUMNS = context(
    tables={
        "app.*": {"select": True},
        "app.accounts": {"select": ["id", "email"], "insert": ["id", "owner_name"], "update": ["status"]},
    }
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SELECT id, email FROM accounts", Effect.ALLOW),
        ("SELECT a.id FROM accounts a WHERE a.email = 'x'", Effect.ALLOW),
        ("SELECT balance FROM accounts", Effect.REFUSE),
        ("SELECT id FROM accounts WHERE balance > 1", Effect.REFUSE),
        ("SELECT id FROM accounts ORDER BY balance", Effect.REFUSE),
        ("SELECT * FROM accounts", Effect.REFUSE),
        ("SELECT a FROM accounts a", Effect.REFUSE),
        ("SELECT row_to_json(a) FROM accounts a", Effect.REFUSE),
        ("SELECT count(*) FROM accounts", Effect.ALLOW),
        ("COPY accounts TO STDOUT", Effect.REFUSE),
        ("UPDATE accounts SET status = 'x' WHERE id = 1", Effect.ALLOW),
        ("UPDATE accounts SET balance = 1 WHERE id = 1", Effect.REFUSE),
        ("UPDATE accounts SET (status, balance) = ('x', 1) WHERE id = 1", Effect.REFUSE),
        ("UPDATE accounts SET status = 'x' WHERE id = 1 RETURNING balance", Effect.REFUSE),
        ("INSERT INTO accounts (id, owner_name) VALUES (1, 'x')", Effect.ALLOW),
        ("INSERT INTO accounts VALUES (1, 'x')", Effect.ALLOW),
        ("INSERT INTO accounts VALUES (1, 'x', 'y')", Effect.REFUSE),
        ("INSERT INTO accounts SELECT * FROM accounts", Effect.REFUSE),
        (
            "INSERT INTO accounts (id, owner_name) VALUES (1, 'x') ON CONFLICT (id) DO UPDATE SET balance = 1",
            Effect.REFUSE,
        ),
        ("UPDATE v_active_accounts SET balance = 1 WHERE id = 1", Effect.REFUSE),
        ("DELETE FROM accounts WHERE id = 1", Effect.REFUSE),
    ],
)
def test_columns_that_the_policy_lists(text: str, expected: Effect) -> None:
    assert effect(text, COLUMNS) is expected


def test_a_policy_that_asks_about_unscoped_writes() -> None:
    where = context(defaults={"search_path": PATH, "unscoped": "approve"})
    assert effect("UPDATE accounts SET balance = 0", where) is Effect.APPROVE
    assert effect("UPDATE audit_log SET what = 'x'", where) is Effect.REFUSE


@pytest.mark.parametrize("key", ["app.refund(integer)", "app.refund( integer )", "app.refund", "app.*"])
def test_functions_that_the_policy_lists(key: str) -> None:
    where = context(functions={key: {"tier": "compensable"}})
    found = verdict("SELECT refund(1)", where=where)
    assert (found.effect, found.tier) == (Effect.ALLOW, "compensable")
    assert read("SELECT refund(1)").is_write


# --- tiers and gates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "tier"),
    [
        ("SELECT 1", "reversible"),
        ("UPDATE accounts SET status = 'x' WHERE id = 1", "reversible"),
        ("DELETE FROM tickets WHERE id = 1", "costly"),
        ("INSERT INTO docs VALUES (1)", "compensable"),
        ("UPDATE docs SET title = 'x' WHERE id = 1", "irreversible"),
        ("WITH u AS (UPDATE docs SET title = 'x' WHERE id = 1) INSERT INTO kv VALUES ('a')", "irreversible"),
    ],
)
def test_tiers(text: str, tier: str) -> None:
    assert verdict(text).tier == tier


def test_a_delete_wants_the_same_of_policy_and_guard() -> None:
    text = "DELETE FROM kv WHERE k = 'a'"
    found = verdict(text)
    assert found.decisive is not None
    assert (found.effect, found.decisive.sqlstate) == (Effect.REFUSE, "42501")
    assert "its policy says soft, the guard journal" in found.decisive.message
    tables = {"app.*": ALL, "app.kv": {**ALL, "delete": "journal"}}
    assert effect(text, context(tables=tables)) is Effect.ALLOW


def test_gates_in_order() -> None:
    tables = {
        "app.*": ALL,
        "app.orders": {**ALL, "class": ["financial"]},
        "app.audit_log": {"select": True, **NONE},
    }
    gates = [
        {"when": {"table": "app.kv"}, "then": "allow"},
        {"when": {"class": "financial", "kind": "update"}, "then": "refuse"},
        {"when": {"tier": ["compensable", "irreversible"]}, "then": "approve"},
    ]
    where = context(tables=tables, gates=gates)
    assert effect("UPDATE orders SET status = 'x' WHERE id = 1", where) is Effect.REFUSE
    assert effect("INSERT INTO orders (id) VALUES (1)", where) is Effect.ALLOW
    assert (
        effect("UPDATE docs SET title = 'x' WHERE id = 1", where) is Effect.REFUSE
    )  # no approval buys a guard
    assert effect("INSERT INTO kv VALUES ('a', 'b')", where) is Effect.ALLOW
    assert effect("SELECT * FROM orders", where) is Effect.ALLOW
    assert verdict("UPDATE orders SET status = 'x' WHERE id = 1", where=where).classes == ("financial",)


@pytest.mark.parametrize(
    ("when", "known", "matched"),
    [
        ({"rows": ">10"}, {"rows": 11}, True),
        ({"rows": ">10"}, {"rows": 10}, False),
        ({"rows": ">10"}, {}, None),
        ({"rows": ">10", "confidence": "<0.5"}, {"confidence": 0.9}, False),
        ({"share": ">=0.5"}, {"share": 0.5}, True),
        ({"confidence": "<0.70"}, {}, True),
        ({"days": "fri-sun"}, {}, True),
        ({"days": "mon,sat"}, {}, False),
        ({"hours": "22:00-06:00"}, {}, True),
        ({"hours": "22:00-06:00", "timezone": "Asia/Tokyo"}, {}, False),
        ({"hours": "08:00-23:30"}, {}, False),
        ({"confidence": "<0.70"}, {"confidence": 0.5}, True),
        ({"confidence": "<0.70"}, {"confidence": 0.9}, False),
        ({}, {}, True),
    ],
)
def test_gates_that_ask_for_what_is_measured(
    when: dict[str, Any], known: dict[str, Any], *, matched: bool | None
) -> None:
    gate = Gate.model_validate({"when": when, "then": "approve"})
    sunday_night = datetime(2026, 11, 29, 23, 45, tzinfo=UTC)
    assert holds(gate.when, Facts(sunday_night, **known)) is matched


@pytest.mark.parametrize("when", [{"rows": "many"}, {"hours": "25:00-26:00"}, {"days": "today"}])
def test_a_condition_that_says_nothing_is_an_error(when: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        Gate.model_validate({"when": when, "then": "approve"})


@pytest.mark.parametrize(
    ("gates", "measured", "effect", "approvals"),
    [
        ([({"rows": ">10"}, "approve")], None, None, 1),
        ([({"rows": ">10"}, "approve")], 11, Effect.APPROVE, 1),
        ([({"rows": ">10"}, "approve")], 10, Effect.ALLOW, 1),
        ([({"rows": "<5"}, "allow"), ({"confidence": "<0.7"}, "approve")], None, None, 1),
        ([({"rows": "<5"}, "allow"), ({"confidence": "<0.7"}, "approve")], 4, Effect.ALLOW, 1),
        ([({"rows": "<5"}, "allow"), ({"confidence": "<0.7"}, "approve")], 5, Effect.APPROVE, 1),
        ([({"confidence": "<0.7"}, "approve"), ({"rows": ">1"}, "refuse")], None, Effect.APPROVE, 1),
        ([({"rows": ">10"}, "refuse"), ({}, "approve", 2)], 11, Effect.REFUSE, 1),
        ([({"rows": ">10"}, "refuse"), ({}, "approve", 2)], 9, Effect.APPROVE, 2),
    ],
)
def test_the_first_gate_that_matches_decides_whichever_kind_it_is(
    gates: list[Any], measured: int | None, effect: Effect | None, approvals: int
) -> None:
    made = [
        Gate.model_validate({"when": when, "then": then, "approvals": (*more, 1)[0]})
        for when, then, *more in gates
    ]
    found = late.rule(
        Verdict(Effect.ALLOW, gates=tuple(made)),
        confidence=None,
        now=datetime(2026, 11, 29, tzinfo=UTC),
        measured=None if measured is None else Measured(measured),
    )
    assert (found and found.effect) is effect
    assert (found.approvals if found else 1) == approvals


# --- messages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("DELETE FROM orders", "the DELETE would touch every row of `app.orders`"),
        ("SELECT * FROM priv.secrets", "`priv.secrets` is not among the tables that this task may read"),
        ("TRUNCATE orders", "TRUNCATE removes every row for good"),
        ("SELECT pg_sleep(1)", "`pg_sleep()` can hold the session or fill memory"),
        ("ALTER TABLE orders ADD x int", "ALTER TABLE changes the schema"),
    ],
)
def test_a_refusal_says_what_is_wrong_with_the_statement(text: str, says: str) -> None:
    found = decide(read(text), SESSION, CONTEXT).decisive
    assert found is not None
    assert says in found.message
    assert found.hint


def test_the_next_number_of_a_sequence_is_drawn_by_the_insert_that_uses_it() -> None:
    found = verdict("SELECT nextval('accounts_id_seq')")
    assert found.effect is Effect.REFUSE
    assert found.decisive is not None
    assert "RETURNING" in (found.decisive.hint or "")
    assert (
        effect("INSERT INTO accounts (id) VALUES (nextval('accounts_id_seq')) RETURNING id") is Effect.ALLOW
    )
    assert effect("SELECT currval('accounts_id_seq')") is Effect.ALLOW


def test_a_write_that_nothing_keeps_is_refused_with_what_to_do() -> None:
    for text in ("INSERT INTO docs (id) VALUES (1)", "UPDATE docs SET title = 'x' WHERE id = 1"):
        found = verdict(text)
        assert found.effect is Effect.REFUSE
        assert found.decisive is not None
        assert "sqlguard guard app.docs" in (found.decisive.hint or "")
