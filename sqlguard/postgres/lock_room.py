"""
Room in the server's lock table, kept for the moment when a task has filled it.

That table is one for all, and advisory locks are anybody's to take: a session that takes as many as there is room for
stops every writer and every log-in, and its own end would fail as well. So the janitor holds some locks that mean
nothing, and lets go of them when it needs the room.
"""

from typing import Any

import psycopg

#: Ending a task needs a few dozen at a time; the rest is for what others take while it does.
_ROOM = 300
#: Advisory locks that a session may hold and still be an honest one.
MANY = 1000
# Never waits: the numbers are guessed easily. `pg_backend_pid` keeps the janitors of one database apart.
_KEEP = "SELECT pg_try_advisory_lock(-pg_backend_pid(), n) FROM generate_series(1, %s) AS n"
#: Whose sessions hold the most; partitions of a big table are many locks, too, so all kinds count only in need.
LOCKERS = """
SELECT l.task_id, l.role::text, 'it filled the server''s table of locks'
FROM pg_locks k JOIN pg_stat_activity a ON a.pid = k.pid JOIN sqlguard.lease l ON l.role = a.usename
WHERE l.state <> 'ended' AND (k.locktype = 'advisory' OR %(in_need)s)
GROUP BY l.task_id, l.role HAVING count(*) > %(many)s ORDER BY count(*) DESC
"""


def keep(conn: psycopg.Connection[Any]) -> None:
    conn.execute(_KEEP, [_ROOM])


def give_back(conn: psycopg.Connection[Any]) -> None:
    """Let go of all advisory locks of this session; takes no lock itself."""
    conn.execute("SELECT pg_advisory_unlock_all()")
