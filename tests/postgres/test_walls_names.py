"""Tables whose columns are called like what the walls' functions use inside."""

from datetime import timedelta

import pytest
from servers import Database

import sqlguard
from sqlguard.policy import parse_policy
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.tasks import open_task
from sqlguard.postgres.undo import undo

NAMES = [
    "change",
    "shape",
    "tx",
    "total",
    "remaining",
    "marked",
    "own",
    "nested",
    "rows",
    "n",
    "it",
    "c",
    "r",
    "u",
    "o",
    "i",
    "key",
    "image",
    "before",
    "after",
    "at",
    "task_id",
    "action_id",
    "run",
    "pair",
    "row_change",
    "row_text",
    "agent",
    "old",
    "new",
]
POLICY = """
name = "names"
[defaults]
max_share = 1.0
[tables."public.*"]
select = true
insert = true
update = true
delete = "{mode}"
"""


@pytest.mark.parametrize("mode", ["soft", "journal"])
@pytest.mark.parametrize("parent", [False, True])
def test_columns_called_like_variables(database: Database, mode: str, *, parent: bool) -> None:
    migrate(database.owner_dsn)
    owner = database.connect(database.owner_dsn)
    columns = ", ".join(f'"{name}" integer DEFAULT 1' for name in NAMES)
    owner.execute(f"CREATE TABLE odd (id integer PRIMARY KEY, {columns})")
    if parent:  # inheritance has functions by row
        owner.execute("CREATE TABLE odder () INHERITS (odd)")
    owner.execute("INSERT INTO odd (id) SELECT n FROM generate_series(1, 60) n")
    guard_tables(owner, ["odd"], mode)
    apply_policy(owner, parse_policy(POLICY.format(mode=mode), "names"))
    before = owner.execute("SELECT * FROM odd ORDER BY id").fetchall()
    task = open_task(owner, agent="tester", policy="names", ttl=timedelta(minutes=5))
    with sqlguard.connect(database.owner_dsn, task=task.task.id) as db:
        for name in NAMES:
            assert db.execute(f'UPDATE odd SET "{name}" = "{name}" + 1 WHERE id < 4').rowcount == 3
        assert db.execute("UPDATE odd SET total = total + 1 WHERE id = 5").rowcount == 1
        assert db.execute("INSERT INTO odd (id) VALUES (70), (71)").rowcount == 2
        assert db.execute("DELETE FROM odd WHERE id IN (8, 9)").rowcount == 2
    assert not undo(owner, task=task.task.id).stopped
    assert owner.execute("SELECT * FROM odd ORDER BY id").fetchall()[: len(before)] == before
