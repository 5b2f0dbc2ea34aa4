"""What an agent is told when its task is over, and when a wall stops it."""

import psycopg
import pytest
from end_to_end.wired import Agent, Wired

from sqlguard.postgres.tasks import end_task


def test_the_login_of_an_ended_task_is_told_so(wired_world: Wired, agent: Agent) -> None:
    end_task(wired_world.owner, agent.task.task.id, "over")
    with pytest.raises(psycopg.OperationalError, match="the task of this login has ended"):
        agent.connect()


def test_an_error_of_the_walls_tells_nothing_of_their_code(wired_world: Wired, agent: Agent) -> None:
    assert wired_world.value("SELECT count(*) FROM items") > 5000
    with agent.connect() as conn, pytest.raises(psycopg.Error) as caught:
        conn.execute("UPDATE items SET quantity = quantity + 1 WHERE id > 0")
    assert caught.value.sqlstate == "SG006"
    assert caught.value.diag.message_hint
    assert caught.value.diag.context is None
