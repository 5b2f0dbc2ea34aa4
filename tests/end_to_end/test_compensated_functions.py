"""Functions that the policy lists with a compensation, called through the proxy: an undo answers them among the rows."""

import psycopg
import pytest
from end_to_end.inprocess import proxied
from psycopg.conninfo import make_conninfo
from servers import Database
from task_world import POLICY, shop

from sqlguard.postgres import compensate
from sqlguard.postgres.undo_plan import Scope

FUNCTION = (
    '[functions."public.refund(integer)"]\ntier = "compensable"\ncompensation = "public.back(integer)"\n'
)
BACK = """
    CREATE TABLE backs (i int GENERATED ALWAYS AS IDENTITY, n int, status text);
    CREATE FUNCTION back(n int) RETURNS int LANGUAGE sql
        AS 'INSERT INTO backs (n, status) SELECT n, status FROM orders WHERE id = 1 RETURNING n';
    ALTER FUNCTION refund VOLATILE;
"""


@pytest.mark.parametrize("way", ["simple", "extended", "block", "keyed", "prepared"])
def test_a_call_is_answered_in_its_turn(database: Database, way: str) -> None:
    """`back` sees the order as it was when the function was called: later changes have been taken back by then."""
    with shop(database) as made:
        made.op.execute(BACK)
        made.apply(POLICY + FUNCTION)
        opened = made.task()
        with proxied(database.owner_dsn) as port:
            dsn = make_conninfo(
                "",
                host="127.0.0.1",
                port=port,
                user=opened.role,
                password=opened.password,
                dbname=database.name,
            )
            with psycopg.connect(dsn, autocommit=True) as conn:
                conn.execute("UPDATE orders SET status = 'x' WHERE id = 1")
                match way:
                    case "simple":
                        conn.execute("SELECT refund(7)")
                    case "keyed":
                        for _ in range(2):
                            conn.execute("SELECT refund(7) /*idempotency_key='once'*/")
                    case "block":
                        with conn.transaction():
                            conn.execute("SELECT refund(7)")
                        with pytest.raises(psycopg.errors.DivisionByZero), conn.transaction():
                            conn.execute("SELECT refund(8)")
                            conn.execute("SELECT 1 / 0")
                    case _:
                        conn.execute("SELECT refund(%s)", [7], prepare=way == "prepared")
                conn.execute("UPDATE orders SET status = 'y' WHERE id = 1")
        report = compensate.undo(made.op, Scope(task=opened.task.id))
        assert [(a.state, a.result) for a in report.answers] == [("compensated", "7")]
        assert made.op.execute("SELECT n, status FROM backs").fetchall() == [(7, "x")]
        assert made.value("SELECT status FROM orders WHERE id = 1") == "new"
        assert compensate.undo(made.op, Scope(task=opened.task.id)).rows.already_undone
