"""Names with everything that SQL, psycopg's placeholders and a terminal might take for something else."""

from datetime import timedelta

import pytest
from psycopg import sql
from servers import Database

import sqlguard
from sqlguard.policy import Policy
from sqlguard.postgres.erase import erase
from sqlguard.postgres.freeze import freeze, thaw
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.history import history
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.restore import restore
from sqlguard.postgres.tasks import open_task
from sqlguard.postgres.undo import undo

ODD = "we\"i'rd$q$ %s%% %(x)s {x} \\n\n--"
SCHEMA = "Sch\"e'ma $$%(a)s"


@pytest.mark.parametrize("mode", ["soft", "journal"])
def test_a_table_with_an_odd_name_is_guarded_and_restored_as_any_other(database: Database, mode: str) -> None:
    migrate(database.owner_dsn)
    owner = database.connect(database.owner_dsn)
    table, key, value = sql.Identifier(SCHEMA, ODD), sql.Identifier(ODD), sql.Identifier("v" + ODD)
    for text in (
        sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(SCHEMA)),
        sql.SQL("CREATE TABLE {} ({} text PRIMARY KEY, {} text)").format(table, key, value),
        sql.SQL("INSERT INTO {} SELECT 'k%s' || n, 'v%' FROM generate_series(1, 9) n").format(table),
    ):
        owner.execute(text)
    name = f"{SCHEMA}.{ODD}"
    guard_tables(owner, [name], mode)
    policy = {
        "name": "odd",
        "defaults": {"max_share": 1.0},
        "tables": {name: {"select": True, "update": True, "delete": mode}},
    }
    apply_policy(owner, Policy.model_validate(policy))
    before = owner.execute(sql.SQL("SELECT t.*::text FROM {} t ORDER BY 1").format(table)).fetchall()
    task = open_task(owner, agent="tester", policy="odd", ttl=timedelta(minutes=5)).task.id
    with sqlguard.connect(database.owner_dsn, task=task) as db:
        for text in ("DELETE FROM {} WHERE {} = 'k%s3'", "UPDATE {} SET {} = 'new%s' WHERE {} = 'k%s4'"):
            names = (table, key) if text.startswith("DELETE") else (table, value, key)
            db.execute(sql.SQL(text).format(*names).as_string(owner))
    assert [c.op for c in history(owner, name, ["k%s4"])] == ["update"]
    (deleted,) = history(owner, name, ["k%s3"])
    assert deleted.action is not None
    freeze(owner, [name], None, "now")
    assert [one.tables for one in thaw(owner)] == [[name]]
    assert restore(owner, table=name, keys=["k%s3"]).rows == 1
    undo(owner, task=task, on_conflict="skip")
    assert owner.execute(sql.SQL("SELECT t.*::text FROM {} t ORDER BY 1").format(table)).fetchall() == before
    assert erase(owner, name, keys=["k%s4"], live=True).rows == 1


def test_a_name_is_taken_as_it_is_written(database: Database) -> None:
    """`public.Ledger` is not `public.ledger`, and a freeze of the other one would have stopped nothing."""
    migrate(database.owner_dsn)
    owner = database.connect(database.owner_dsn)
    owner.execute(
        'CREATE TABLE ledger (id integer PRIMARY KEY); CREATE TABLE "Ledger" (id integer PRIMARY KEY)'
    )
    guard_tables(owner, ["public.ledger", "public.Ledger"], "journal")
    assert freeze(owner, ["public.Ledger"], None, "now").tables == ["public.Ledger"]
    assert freeze(owner, ["ledger", 'public."Ledger"'], None, "now").tables == [
        "public.ledger",
        "public.Ledger",
    ]
    assert history(owner, "public.Ledger", ["1"]) == []
