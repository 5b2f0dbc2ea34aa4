"""Which table a person means by a name: the one that is called so, else the one that SQL would find by it."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import psycopg


def find_named(conn: psycopg.Connection[Any], queries: Iterable[str], name: str) -> tuple[Any, ...] | None:
    """
    Return the first row that one of *queries* finds for *name*, None if none does.

    Take the name as it stands first, and `to_regclass` after it: read as SQL, `a.B` may be another table than `a.b`,
    and a name that SQL can't read names nothing.
    """
    for query in queries:
        with suppress(psycopg.errors.InvalidName), conn.transaction():
            if (row := conn.execute(query.encode(), [name]).fetchone()) is not None:
                return tuple(row)
    return None
