"""Idempotency keys through the wire: a repeat is answered and changes nothing, races run once."""

import threading
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from end_to_end.wired import POLICY, Agent, Wired, wired_shop
from servers import Database

import sqlguard
from sqlguard.errors import Refused
from sqlguard.policy import parse_policy
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.policy_apply import apply_policy

INSERT = "INSERT INTO plain (id, t, n) VALUES (%s, %s, %s) RETURNING id, t, n /*idempotency_key='{}'*/"


@pytest.mark.parametrize("mode", ["simple", "extended", "prepared", "binary", "pipeline", "block", "several"])
def test_a_repeat_gets_the_first_answer(wired_world: Wired, agent: Agent, mode: str) -> None:
    key = f"key {mode}"

    def once() -> tuple[Any, ...]:
        with agent.connect() as conn:
            cursor = conn.cursor()
            simple = "INSERT INTO plain (id, t, n) VALUES (1, 'é', 1.50) RETURNING id, t, n"
            match mode:
                case "simple":
                    cursor.execute(f"{simple} /*idempotency_key='{key}'*/".encode())
                case "block":
                    conn.execute("BEGIN")
                    cursor.execute(f"{simple} /*idempotency_key='{key}'*/".encode())
                    conn.execute("COMMIT")
                case "several":
                    cursor.execute(f"{simple} /*idempotency_key='{key}'*/; SELECT 1".encode())
                case "pipeline":
                    with conn.pipeline():
                        cursor.execute(INSERT.format(key).encode(), [1, "é", 1.5])
                case _:
                    cursor.execute(
                        INSERT.format(key).encode(),
                        [1, "é", 1.5],
                        prepare=mode == "prepared",
                        binary=mode == "binary",
                    )
            return cursor.statusmessage, [tuple(map(str, row)) for row in cursor.fetchall()]

    first = once()
    assert first[0] == "INSERT 0 1"
    assert once() == first
    assert once() == first
    assert wired_world.value("SELECT count(*) FROM plain WHERE deleted_at IS NULL") == 1
    assert set(wired_world.outcomes(agent)) == {"committed"}


def test_a_soft_delete_repeated(wired_world: Wired, agent: Agent) -> None:
    for _ in range(3):
        with agent.connect() as conn:
            cursor = conn.execute(
                "DELETE FROM customers WHERE id = 140 RETURNING name /*idempotency_key='d'*/"
            )
            assert (cursor.statusmessage, cursor.fetchall()) == ("DELETE 1", [("Customer 140",)])


def test_other_formats_than_the_first_time(agent: Agent) -> None:
    text = INSERT.format("formats").encode()
    with agent.connect() as conn:
        first = conn.execute(text, [2, "x", 2.5]).fetchall()
        assert conn.execute(text, [2, "x", 2.5], binary=True).fetchall() == first
        assert conn.execute(text, [2, "x", 2.5]).fetchall() == first


def test_the_key_of_another_statement(wired_world: Wired, agent: Agent) -> None:
    with agent.connect() as conn:
        conn.execute("SET sqlguard.idempotency_key = 'one'")
        conn.execute("UPDATE orders SET note = 'a' WHERE id = 80")
        for text, params in (
            ("UPDATE orders SET note = 'b' WHERE id = 80", None),
            ("UPDATE orders SET note = %s WHERE id = 80", ["b"]),
        ):
            with pytest.raises(psycopg.Error) as caught:
                conn.execute(text, params)
            assert caught.value.sqlstate == "SG002"
        assert conn.execute("SELECT note FROM orders WHERE id = 80").fetchone() == ("a",)


def test_a_write_that_failed_may_be_tried_again(wired_world: Wired, agent: Agent) -> None:
    with agent.connect() as conn:
        for params in ([1], None):
            text = f"INSERT INTO staff (id, name) VALUES ({'%s' if params else '1'}, 'x') /*idempotency_key='f{params}'*/"
            for _ in range(2):
                with pytest.raises(psycopg.errors.UniqueViolation):
                    conn.execute(text.encode(), params)
        conn.execute("BEGIN")
        conn.execute("UPDATE orders SET note = 'x' WHERE id = 81 /*idempotency_key='rolled'*/")
        conn.execute("ROLLBACK")
        conn.execute("UPDATE orders SET note = 'x' WHERE id = 81 /*idempotency_key='rolled'*/")
    assert wired_world.value("SELECT note FROM orders WHERE id = 81") == "x"


def test_a_dry_run_does_not_use_the_key_up(wired_world: Wired, agent: Agent) -> None:
    with agent.connect() as conn:
        text = "UPDATE orders SET note = 'real' WHERE id = 82 /*idempotency_key='dry'*/"
        conn.execute("SET sqlguard.dry_run = on")
        conn.execute(text)
        conn.execute("SET sqlguard.dry_run = off")
        assert conn.execute(text).statusmessage == "UPDATE 1"
    assert wired_world.value("SELECT note FROM orders WHERE id = 82") == "real"


@pytest.mark.parametrize("params", [None, [10]])
def test_races_run_once(wired_world: Wired, agent: Agent, params: list[int] | None) -> None:
    text = f"UPDATE orders SET total = total + {'%s' if params else '10'} WHERE id = 83 RETURNING total /*idempotency_key='race{params}'*/"
    before = wired_world.value("SELECT total FROM orders WHERE id = 83")
    answers: list[Any] = []
    gate = threading.Barrier(6)

    def work() -> None:
        with agent.connect() as conn:
            gate.wait(20)
            answers.append(conn.execute(text.encode(), params).fetchone())

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [(before + 10,)] * 6
    assert wired_world.value("SELECT total FROM orders WHERE id = 83") == before + 10


#: Statement, tag, and what kept it: the capture's number, or the answer itself where the two need not be the same.
WITHOUT_ROWS = (
    ("UPDATE plain SET t = 'a' WHERE id = 1", "UPDATE 1", "count"),
    (
        "UPDATE plain SET t = 'kept' WHERE id IN (1, 2, 3)",
        "UPDATE 1",
        "count",
    ),  # the trigger leaves two of three out
    ("UPDATE plain SET t = 'f' WHERE id > 1; -- behind it", "UPDATE 2", "count"),
    ("INSERT INTO plain (id) SELECT id + 20 FROM plain", "INSERT 0 3", "count"),
    ("DELETE FROM customers WHERE id = 94", "DELETE 1", "count"),  # its orders and their items go with it
    ("UPDATE plain SET t = 'b' WHERE id = 99", "UPDATE 0", "result"),
    (
        "INSERT INTO plain (id) VALUES (1), (4) ON CONFLICT (id) DO UPDATE SET t = 'met'",
        "INSERT 0 2",
        "result",
    ),
    (
        "WITH m AS (UPDATE plain SET t = 'c' WHERE id > 4) UPDATE plain SET t = 'd' WHERE id = 1",
        "UPDATE 1",
        "result",
    ),
    ("UPDATE split SET t = 'e' WHERE id IN (1, 2)", "UPDATE 2", "result"),
    (
        "UPDATE called SET n = DEFAULT WHERE id = 1",
        "UPDATE 1",
        "result",
    ),  # the function changes another table
)


def test_what_is_kept_of_a_write_without_rows_is_what_postgresql_says(database: Database) -> None:
    with wired_shop(database) as world:
        world.owner.execute("""
            CREATE TABLE split (id integer PRIMARY KEY, t text) PARTITION BY LIST (id);
            CREATE TABLE split_1 PARTITION OF split FOR VALUES IN (1);
            CREATE TABLE split_2 PARTITION OF split FOR VALUES IN (2);
            CREATE FUNCTION adds() RETURNS integer LANGUAGE sql AS 'INSERT INTO split VALUES (2, $$x$$) RETURNING 1';
            CREATE TABLE called (id integer PRIMARY KEY, n integer DEFAULT adds());
            CREATE FUNCTION one_only() RETURNS trigger LANGUAGE plpgsql
                AS $$ BEGIN RETURN CASE WHEN NEW.t = 'kept' AND NEW.id > 1 THEN NULL ELSE NEW END; END $$;
            CREATE TRIGGER one_only BEFORE UPDATE ON plain FOR EACH ROW EXECUTE FUNCTION one_only();
            INSERT INTO plain (id) VALUES (1), (2), (3);
            INSERT INTO split VALUES (1, '');
            INSERT INTO called (id) VALUES (1);
            DELETE FROM split WHERE id = 2;
            INSERT INTO split VALUES (2, '');
            CREATE OR REPLACE FUNCTION adds() RETURNS integer LANGUAGE sql AS $$ UPDATE split SET t = '' RETURNING 1 $$;
        """)
        guard_tables(world.owner, ["split", "called"], "soft")
        apply_policy(world.owner, parse_policy(POLICY, "wired.toml"))
        agent = world.agent()
        with agent.connect() as conn:
            for number, (text, tag, keeper) in enumerate(WITHOUT_ROWS):
                keyed = f"/*idempotency_key='{number}'*/ {text}".encode()
                assert conn.execute(keyed).statusmessage == tag, text
                last = database.execute(
                    "SELECT query FROM pg_stat_activity WHERE usename = %s", [agent.task.role]
                )
                assert f"keep_{keeper}" in last[0][0], text
                assert conn.execute(keyed).statusmessage == tag, text
        assert set(world.outcomes(agent)) == {"committed"}


# --- the Python door


def test_the_python_door_answers_a_repeat(wired_world: Wired, agent: Agent) -> None:
    sql = "INSERT INTO plain (id, t, b, n, a) VALUES (%s, %s, %s, %s, %s) RETURNING id, t, b, n, a"
    values = [7, "é", b"\0\1", None, [1, 2]]
    with sqlguard.connect(agent.direct) as door:
        first = door.execute(sql, values, idempotency_key="door")
        assert (first.tag, first.rows) == ("INSERT 0 1", ((7, "é", b"\0\1", None, [1, 2]),))
    with sqlguard.connect(agent.direct) as door:
        again = door.execute(sql, values, idempotency_key="door")
        assert (again.tag, again.rowcount, again.columns, again.rows) == (
            first.tag,
            first.rowcount,
            first.columns,
            first.rows,
        )
        assert again.affected == ()
        with pytest.raises(Refused):
            door.execute("DELETE FROM plain WHERE id = 7", idempotency_key="door")
        assert door.preview("DELETE FROM plain WHERE id = 7", idempotency_key="delete").tag == "DELETE 1"
        assert door.execute("DELETE FROM plain WHERE id = 7", idempotency_key="delete").tag == "DELETE 1"
        assert door.execute("DELETE FROM plain WHERE id = 7", idempotency_key="delete").tag == "DELETE 1"
        door.execute("BEGIN")
        assert door.execute(sql, values, idempotency_key="door").rows == first.rows
        door.execute("COMMIT")
    assert set(wired_world.outcomes(agent)) == {"committed", "previewed"}


def test_what_one_door_did_the_other_answers(agent: Agent) -> None:
    """For the same text; parameters are written down as they came, and drivers send them in forms of their own."""
    text = "INSERT INTO plain (id, t, n) VALUES ({0}, 'ü', 2.5) RETURNING id, t, n /*idempotency_key='doors {0}'*/"
    with agent.connect() as conn, sqlguard.connect(agent.direct) as door:
        here = conn.execute(text.format(8)).fetchall()
        assert door.execute(text.format(8)).rows == tuple(here)
        there = door.execute(text.format(9)).rows
        assert conn.execute(text.format(9), binary=True).fetchall() == list(there)


@pytest.mark.parametrize("way", ["simple", "extended", "block", "extended block"])
def test_the_journal_tells_a_repeat_from_the_write(wired_world: Wired, way: str) -> None:
    key = f"told {way}"
    text, values = f"UPDATE plain SET n = 1 WHERE id = 77 /*idempotency_key='{key}'*/", None
    if "extended" in way:
        text, values = text.replace("= 77", "= %s"), [77]
    with wired_world.visiting() as agent:
        for _ in range(2):
            with agent.connect(autocommit="block" not in way) as conn:
                conn.execute(text.encode(), values)
        first, second = wired_world.actions(agent)
        details = wired_world.owner.execute(
            "SELECT action_id, detail -> 'repeats' FROM sqlguard.event WHERE task_id = %s AND kind = 'committed'",
            [agent.task.task.id],
        ).fetchall()
    assert dict(details) == {first["id"]: None, second["id"]: first["id"]}


@pytest.mark.parametrize("encoding", ["utf8", "latin1"])
def test_a_key_of_any_characters(wired_world: Wired, agent: Agent, encoding: str) -> None:
    key = f'it\'s \\ "ä" $1 %s; -- {encoding}'
    text = f"INSERT INTO plain (id, t) VALUES (1, 'é') RETURNING t /*idempotency_key='{quote(key)}'*/"
    with agent.connect(client_encoding=encoding) as conn:
        for _ in range(2):
            assert conn.execute(text.encode(encoding)).fetchall() == [("é",)]
    stored = wired_world.value("SELECT array_agg(key) FROM sqlguard.idempotency")
    assert key in stored


def test_a_write_whose_commit_fails_leaves_the_key_free(wired_world: Wired, agent: Agent) -> None:
    wired_world.owner.execute("""
        CREATE FUNCTION not_yet() RETURNS trigger LANGUAGE plpgsql
            AS $$ BEGIN IF NEW.n < 0 THEN RAISE EXCEPTION 'too early' USING ERRCODE = '23514'; END IF; RETURN NULL; END $$;
        CREATE CONSTRAINT TRIGGER not_yet AFTER INSERT ON plain DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION not_yet();
    """)
    text = "INSERT INTO plain (id, n) VALUES (77, {}) /*idempotency_key='late'*/"
    with agent.connect() as conn:
        with pytest.raises(psycopg.errors.CheckViolation, match="too early"):
            conn.execute(text.format(-1).encode())
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        assert conn.execute(text.format(1).encode()).statusmessage == "INSERT 0 1"
    assert wired_world.outcomes(agent) == ["failed", "committed"]


@pytest.mark.parametrize("mode", ["simple", "extended", "block", "several", "setting", "dry"])
@pytest.mark.parametrize("said", ["reason='a%00b'", f"idempotency_key='{'k1' * 300}'", "step='%00'"])
def test_what_the_journal_can_not_take_is_told_and_nothing_runs(
    wired_world: Wired, agent: Agent, mode: str, said: str
) -> None:
    name, _, value = said.partition("=")
    text = f"INSERT INTO plain (id, t) VALUES (71, 'x') /*{said}*/"
    with agent.connect() as conn:
        if mode == "setting":
            if "%00" in value:
                pytest.skip("a setting can hold no NUL")
            conn.execute(f"SET sqlguard.{name} = {value}")
            text = "INSERT INTO plain (id, t) VALUES (71, 'x')"
        elif mode in ("block", "dry"):
            conn.execute("BEGIN" if mode == "block" else "SET sqlguard.dry_run = on")
        elif mode == "several":
            text += "; SELECT 1"
        with pytest.raises(psycopg.DatabaseError, match=name) as caught:
            conn.execute(text.encode(), prepare=mode == "extended")
        assert (caught.value.sqlstate, caught.value.diag.message_hint is None) == ("SG007", False)
        if mode == "block":
            conn.execute("ROLLBACK")
        # What is refused is written down all the same.
        with pytest.raises(psycopg.DatabaseError):
            conn.execute(f"DROP TABLE plain /*{said}*/".encode())
        assert conn.execute("SELECT 1").fetchone() == (1,)
    assert not wired_world.value("SELECT count(*) FROM plain WHERE id = 71")
    assert wired_world.outcomes(agent)[-1] == "refused"
