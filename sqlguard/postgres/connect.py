"""
Operator connections: one place that opens them, so that every failure reads the same.

These are the connections of sqlguard's own work (migrate, guard, control), never an agent's.
"""

import psycopg

from sqlguard.errors import DatabaseUnavailable

APPLICATION_NAME = "sqlguard"


def connect(dsn: str, *, autocommit: bool = True) -> psycopg.Connection:
    """Open a connection to *dsn*; raise DatabaseUnavailable when there is none to be had."""
    try:
        return psycopg.connect(dsn, autocommit=autocommit, fallback_application_name=APPLICATION_NAME)
    except psycopg.OperationalError as fault:
        raise DatabaseUnavailable(f"can't connect to PostgreSQL: {str(fault).strip()}") from None
