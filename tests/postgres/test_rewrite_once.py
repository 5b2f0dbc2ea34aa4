"""A DELETE whose sub-select has LIMIT or row locks marks the rows that this finds once, whatever the plan."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import Database, fresh_database
from soft_world import Worlds

from sqlguard.embedded import EmbeddedServer

SETUP = """
CREATE TABLE jobs (id int PRIMARY KEY, kind text);
CREATE TABLE todo (job int);
INSERT INTO jobs SELECT n, CASE WHEN n % 2 = 1 THEN 'odd' ELSE 'even' END FROM generate_series(1, 6) AS n;
INSERT INTO todo VALUES (1), (2);
"""
#: Hundreds of deleted rows beside six live ones, and a planner that knows of them.
TOMBSTONES = """
INSERT INTO jobs SELECT n, 'old', now(), 'agent-0' FROM generate_series(101, 300) AS n;
ANALYZE jobs;
"""
#: With these a join executes its inner side again for each row of the outer one.
AGAIN_AND_AGAIN = (
    *("enable_hashjoin", "enable_mergejoin", "enable_hashagg", "enable_sort"),
    *("enable_material", "enable_memoize", "enable_indexscan", "enable_bitmapscan"),
)
NEXT = "SELECT id FROM jobs ORDER BY id LIMIT 2 FOR UPDATE SKIP LOCKED"


def made(database: Database) -> Worlds:
    worlds = Worlds(database)
    worlds.build(SETUP, ["jobs"])
    worlds.admin.execute(TOMBSTONES)
    worlds.admin.execute("ANALYZE hard.jobs")
    worlds.hard.autocommit = worlds.soft.autocommit = False
    return worlds


@pytest.fixture(scope="module")
def one_build(server: EmbeddedServer) -> Iterator[Worlds]:
    with fresh_database(server) as database:
        yield made(database)


@pytest.fixture
def worlds(one_build: Worlds) -> Iterator[Worlds]:
    """Two worlds in which every statement, and every setting, is rolled back."""
    yield one_build
    one_build.hard.rollback()
    one_build.soft.rollback()


@pytest.mark.parametrize("plan", ["as planned", "again and again"])
@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"DELETE FROM jobs WHERE id IN ({NEXT})", [3, 4, 5, 6]),
        (f"DELETE FROM jobs WHERE id = ANY (({NEXT})) RETURNING id", [3, 4, 5, 6]),
        (f"DELETE FROM jobs j WHERE j.kind = 'odd' AND j.id IN ({NEXT})", [2, 3, 4, 5, 6]),
        (f"DELETE FROM jobs USING ({NEXT}) AS n WHERE n.id = jobs.id", [3, 4, 5, 6]),
        (f"DELETE FROM jobs USING todo JOIN ({NEXT}) AS n ON n.id = job WHERE jobs.id = job", [3, 4, 5, 6]),
        (f"WITH n AS ({NEXT}) DELETE FROM jobs WHERE id IN (SELECT id FROM n)", [3, 4, 5, 6]),
        (f"WITH n AS (SELECT id FROM jobs WHERE id IN ({NEXT})) DELETE FROM jobs USING n WHERE n.id = jobs.id", [3, 4, 5, 6]),
        (f"WITH gone AS (DELETE FROM jobs WHERE id IN ({NEXT}) RETURNING id) SELECT id FROM gone", [3, 4, 5, 6]),
        (f"MERGE INTO jobs USING ({NEXT}) AS n ON n.id = jobs.id WHEN MATCHED THEN DELETE", [3, 4, 5, 6]),
        # Rows that are locked only are not there any more for a second look when they have been marked.
        ("DELETE FROM jobs WHERE kind IN (SELECT kind FROM jobs WHERE id < 3 ORDER BY id FOR UPDATE)", []),
        ("DELETE FROM jobs WHERE kind IN (SELECT kind FROM jobs ORDER BY kind, id LIMIT 2 FOR UPDATE)", [1, 3, 5]),
        ("DELETE FROM jobs WHERE id IN (SELECT id FROM jobs ORDER BY random() LIMIT 0)", [1, 2, 3, 4, 5, 6]),
        ("DELETE FROM jobs WHERE id NOT IN (SELECT id FROM jobs ORDER BY id OFFSET 2 FOR UPDATE)", [3, 4, 5, 6]),
        ("DELETE FROM jobs WHERE id < ALL (SELECT id FROM jobs ORDER BY id OFFSET 2 FOR UPDATE)", [3, 4, 5, 6]),
        # As often as there are rows: it depends on them.
        ("DELETE FROM jobs j WHERE id IN (SELECT o.id FROM jobs o WHERE o.kind = j.kind ORDER BY o.id LIMIT 1)", [3, 4, 5, 6]),
    ],
)  # fmt: skip
def test_the_rows_of_one_look_are_marked(worlds: Worlds, text: str, left: list[int], plan: str) -> None:
    if plan == "again and again":
        for setting in AGAIN_AND_AGAIN:
            worlds.soft.execute(f"SET {setting} = off")
    worlds.ask_soft(text)
    assert [row[0] for row in worlds.visible("jobs")[1]] == left


def test_as_many_are_marked_as_a_delete_deletes(worlds: Worlds) -> None:
    """In the case that was seen: PostgreSQL expects one live row, and executes a plain sub-select for each."""
    text = f"DELETE FROM jobs WHERE id IN ({NEXT}) RETURNING id"
    assert worlds.ask_soft(text) == worlds.ask_hard(text)
    assert worlds.visible("jobs")[0] == worlds.visible("jobs")[1]


def waits(worlds: Worlds, pid: int) -> bool:
    query = "SELECT FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
    return worlds.admin.execute(query, [pid]).fetchone() is not None


def test_rows_that_are_changed_while_the_sub_select_waits(database: Database) -> None:
    """FOR UPDATE waits for the other session, then looks at what became of the row: 1 fits no longer, 2 does."""
    worlds = made(database)
    text = "DELETE FROM jobs WHERE id IN (SELECT id FROM jobs WHERE kind <> 'taken' AND id < 4 FOR UPDATE) RETURNING *"
    answers = []
    for schema, agent, ask in (
        ("hard", worlds.hard, worlds.ask_hard),
        ("soft", worlds.soft, worlds.ask_soft),
    ):
        with database.connect(autocommit=False) as other, ThreadPoolExecutor(1) as thread:
            other.execute(f"SET search_path = {schema}")
            other.execute("UPDATE jobs SET kind = CASE id WHEN 1 THEN 'taken' ELSE 'new' END WHERE id < 3")
            answer = thread.submit(ask, text)
            while not answer.done() and not waits(worlds, agent.info.backend_pid):
                time.sleep(0.01)
            other.commit()
            answers.append(answer.result(30))
        agent.commit()
    assert answers[0] == answers[1]
    assert sorted(answers[1].rows) == [(2, "new"), (3, "odd")]
    hard, soft = worlds.visible("jobs")
    assert soft == hard
    assert [row[0] for row in soft] == [1, 4, 5, 6]
