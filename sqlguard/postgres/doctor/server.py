"""What must hold of the server, of sqlguard's own schema, and of who is connected."""

from collections.abc import Iterator

from sqlguard.postgres import migrate
from sqlguard.postgres.doctor.finding import Check, Connection, Finding, Severity

OLDEST, NEWEST = 15, 18
_GUARD, _SERVER = "guard", "server"

CHECKS = (
    Check(
        "bypassing-session",
        Severity.NOTE,
        _GUARD,
        "session {object} of task role `{more}` did not come through a proxy or the Python door: it is held by the "
        "role and the tables alone",
        """SELECT a.pid AS object, a.usename AS more, format('SELECT pg_terminate_backend(%s)', a.pid) AS sql
           FROM pg_stat_activity a
           WHERE a.datname = current_database() AND a.usename LIKE 'sg\\_tk\\_%'
               AND a.application_name !~ '^sqlguard:'
               AND NOT EXISTS (SELECT FROM sqlguard.door_session d
                               WHERE d.pid = a.pid AND d.role = a.usename AND coalesce(d.joined_at >= a.backend_start, true))""",
    ),
    Check(
        "prepared-transactions",
        Severity.OPEN,
        _SERVER,
        "max_prepared_transactions is {object}: a transaction that an agent prepares keeps its locks past the task's end. "
        "As a superuser, then restart the server",
        """SELECT s.setting AS object, 'ALTER SYSTEM SET max_prepared_transactions = 0' AS sql FROM pg_settings s
           WHERE s.name = 'max_prepared_transactions' AND s.setting <> '0' AND NOT s.pending_restart""",
    ),
    Check(
        "restart-pending",
        Severity.NOTE,
        _SERVER,
        "`{object}` was changed and waits for a restart of the server",
        "SELECT s.name AS object FROM pg_settings s WHERE s.pending_restart",
    ),
    Check(
        "left-prepared",
        Severity.OPEN,
        _SERVER,
        "the transaction `{object}` was prepared by task role `{more}`",
        """SELECT x.gid AS object, x.owner AS more, format('ROLLBACK PREPARED %L', x.gid) AS sql
           FROM pg_prepared_xacts x WHERE x.owner LIKE 'sg\\_tk\\_%' AND x.database = current_database()""",
    ),
    Check(
        "asynchronous-commit",
        Severity.OPEN,
        _SERVER,
        "synchronous_commit is off in this database: an intent could be lost in a crash while its statement ran",
        """SELECT 'synchronous_commit' AS object,
                  format('ALTER DATABASE %I SET synchronous_commit = on', current_database()) AS sql
           FROM pg_settings s WHERE s.name = 'synchronous_commit' AND s.reset_val = 'off'
               AND coalesce((SELECT option_value FROM pg_db_role_setting r, pg_options_to_table(r.setconfig)
                             WHERE r.setrole = 0 AND option_name = 'synchronous_commit'
                                 AND r.setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())),
                            'off') = 'off'""",
    ),
    Check(
        "unsafe-storage",
        Severity.NOTE,
        _SERVER,
        "`{object}` is off: the journal, like all data, may not outlive a crash. As a superuser, then reload",
        """SELECT s.name AS object, format('ALTER SYSTEM SET %s = on', s.name) AS sql FROM pg_settings s
           WHERE s.name IN ('fsync', 'full_page_writes') AND s.setting = 'off'""",
    ),
    Check(
        "activity-hidden",
        Severity.NOTE,
        _SERVER,
        "track_activities is off: sessions of tasks can't be seen well. As a superuser, then reload",
        """SELECT s.name AS object, 'ALTER SYSTEM SET track_activities = on' AS sql FROM pg_settings s
           WHERE s.name = 'track_activities' AND s.setting = 'off'""",
    ),
    Check(
        "trusted-login",
        Severity.OPEN,
        _SERVER,
        "pg_hba.conf line {object} lets {more} in without a password: whoever reaches the server may be the owner. "
        "Change `trust` to `scram-sha-256` there and reload",
        """SELECT h.line_number AS object, array_to_string(h.user_name, ', ') || ' from '
                  || coalesce(h.address, h.type) AS more
           FROM pg_hba_file_rules h
           WHERE h.auth_method = 'trust' AND NOT h.user_name && ARRAY['replication']""",
        needs="pg_catalog.has_function_privilege('pg_catalog.pg_hba_file_rules()', 'EXECUTE')",
    ),
    Check(
        "no-event-trigger",
        Severity.NOTE,
        _SERVER,
        "an event trigger could refuse DDL by tasks whatever rights they got. As a superuser",
        """SELECT current_database() AS object, 'sqlguard migrate --event-trigger' AS command
           WHERE NOT EXISTS (SELECT FROM pg_event_trigger e WHERE e.evtname = 'sqlguard_refuse_ddl')""",
    ),
    Check(
        "event-trigger-off",
        Severity.BROKEN,
        _SERVER,
        "the event trigger `{object}` is disabled: it refuses nothing. As a superuser",
        """SELECT e.evtname AS object, format('ALTER EVENT TRIGGER %I ENABLE', e.evtname) AS sql
           FROM pg_event_trigger e WHERE e.evtname ^@ 'sqlguard_' AND e.evtenabled NOT IN ('O', 'A')""",
    ),
)


def check_versions(conn: Connection) -> Iterator[Finding]:
    major = conn.info.server_version // 10_000
    if not OLDEST <= major <= NEWEST:
        yield Finding(
            "server-version",
            Severity.BROKEN if major < OLDEST else Severity.NOTE,
            _SERVER,
            f"PostgreSQL {major}",
            f"sqlguard is made for PostgreSQL {OLDEST} to {NEWEST}",
        )
    there, known = migrate.current(conn), migrate.head()
    if there != known:
        yield Finding(
            "schema-version",
            Severity.BROKEN,
            _SERVER,
            f"sqlguard {there}",
            f"the schema sqlguard is at revision {there}, this version of sqlguard knows {known}",
            command="sqlguard migrate",
        )
