"""A real database, whole: guarded in one go, deleted from across foreign keys, previewed, done and undone."""

from datetime import timedelta
from typing import Any

import psycopg
import pytest
from end_to_end.inprocess import proxied
from servers import Database

from sqlguard.dsn import url
from sqlguard.policy import parse_policy
from sqlguard.postgres.guard_table import guard_tables, user_tables
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.tasks import OpenedTask, open_task
from sqlguard.postgres.undo import undo

POLICY = """
name = "curator"
[defaults]
max_rows = 5000
[tables."public.*"]
select = true
insert = true
update = true
delete = "{mode}"
"""
TRACKS = "(SELECT track_id FROM track WHERE album_id IN (SELECT album_id FROM album WHERE artist_id = 90))"
DELETES = [
    f"DELETE FROM playlist_track WHERE track_id IN {TRACKS}",
    f"DELETE FROM invoice_line WHERE track_id IN {TRACKS} RETURNING invoice_line_id, unit_price",
    "DELETE FROM track t USING album a WHERE a.album_id = t.album_id AND a.artist_id = 90",
    "WITH gone AS (DELETE FROM album WHERE artist_id = 90 RETURNING *) SELECT count(*) FROM gone",
    "DELETE FROM artist WHERE artist_id = 90",
]


class Chinook:
    def __init__(self, database: Database, mode: str) -> None:
        self.database = database
        migrate(database.owner_dsn)
        self.owner = database.connect(database.owner_dsn)
        self.tables = user_tables(self.owner)
        guard_tables(self.owner, self.tables, mode=mode)
        apply_policy(self.owner, parse_policy(POLICY.format(mode=mode), "curator"))

    def task(self) -> OpenedTask:
        return open_task(self.owner, agent="curator", policy="curator", ttl=timedelta(minutes=10))

    def connect(self, port: int, task: OpenedTask) -> psycopg.Connection[Any]:
        login = {"user": task.role, "password": task.password, "dbname": self.database.name}
        return psycopg.connect(url(host="127.0.0.1", port=port, **login), autocommit=True)

    def dump(self) -> dict[str, bytes]:
        """Every table as COPY writes it, bookkeeping columns included, in the order of its key."""
        found = {}
        for table in self.tables:
            query = f'COPY (SELECT * FROM {table} t ORDER BY t.*::text COLLATE "C") TO STDOUT'
            with self.owner.cursor().copy(query.encode()) as copy:
                found[table] = b"".join(bytes(chunk) for chunk in copy)
        return found


@pytest.fixture(params=["soft", "journal"])
def world(chinook: Database, request: pytest.FixtureRequest) -> Chinook:
    return Chinook(chinook, request.param)


def test_an_artist_is_deleted_and_brought_back(world: Chinook) -> None:
    before = world.dump()
    with proxied(world.database.owner_dsn) as port:
        task = world.task()
        with world.connect(port, task) as agent:
            with pytest.raises(psycopg.errors.ForeignKeyViolation):
                agent.execute("DELETE FROM artist WHERE artist_id = 90")
            assert world.dump() == before
            announced = preview(agent)
            assert world.dump() == before
            tags = [agent.execute(sql.encode()).statusmessage for sql in DELETES]
            assert agent.execute("SELECT count(*) FROM track t JOIN album a USING (album_id)").fetchone() == (
                3290,
            )
        assert tags == ["DELETE 516", "DELETE 140", "DELETE 213", "SELECT 1", "DELETE 1"]
    changed = world.owner.execute(
        "SELECT table_name, sum(rows)::int FROM sqlguard.change_set c JOIN sqlguard.action a ON a.id = c.action_id"
        " WHERE c.task_id = %s GROUP BY 1",
        [task.task.id],
    ).fetchall()
    assert announced == dict(changed)
    assert world.dump() != before
    report = undo(world.owner, task=task.task.id, preview=True)
    assert report.rows == sum(announced.values())
    undo(world.owner, task=task.task.id)
    assert world.dump() == before
    assert undo(world.owner, task=task.task.id).already_undone


def preview(agent: psycopg.Connection[Any]) -> dict[str, int]:
    """Run all deletes as one dry block and return the rows it announces, table by table."""
    reports: list[str] = []
    agent.add_notice_handler(lambda notice: reports.append(notice.message_primary or ""))
    agent.execute("SET sqlguard.dry_run = on")
    agent.execute("BEGIN")
    for sql in DELETES:
        agent.execute(sql.encode())
    agent.execute("COMMIT")
    agent.execute("SET sqlguard.dry_run = off")
    counts: dict[str, int] = {}
    told, _, plan = reports[-1].removeprefix("dry run, rolled back: ").partition("; plan ")
    assert plan.isdigit()
    for part in told.split(", "):
        number, _, _, table = part.split(" ")
        counts[table.removeprefix("public.")] = counts.get(table.removeprefix("public."), 0) + int(number)
    return counts


def test_an_agent_all_over_the_place_is_undone_to_the_byte(world: Chinook) -> None:
    before = world.dump()
    with proxied(world.database.owner_dsn) as port:
        task = world.task()
        with world.connect(port, task) as agent:
            for sql in DELETES:
                agent.execute(sql.encode())
            agent.execute("UPDATE customer SET email = lower(email), phone = NULL WHERE country = 'Brazil'")
            agent.execute("UPDATE track SET unit_price = unit_price * 2 WHERE genre_id = 25")
            agent.execute("INSERT INTO genre (genre_id, name) VALUES (900, 'Agent Pop')")
            agent.execute("UPDATE track SET genre_id = 900 WHERE track_id IN (1, 2, 3)")
            agent.execute("UPDATE employee SET reports_to = 1 WHERE employee_id = 8")
            agent.execute("DELETE FROM invoice_line WHERE invoice_id = 5")
            agent.execute("DELETE FROM invoice WHERE invoice_id = 5")
            agent.execute("UPDATE playlist SET name = name || '!' WHERE playlist_id < 5")
            agent.execute("UPDATE media_type SET name = 'gone' WHERE media_type_id = 5")
            agent.execute("UPDATE album SET title = 'x' WHERE album_id = 5")
            agent.execute("UPDATE artist SET name = NULL WHERE artist_id = 5")
    assert world.dump() != before
    undo(world.owner, task=task.task.id)
    assert world.dump() == before
