"""
What `alembic upgrade --sql` can say about guards: that they have to be there.

Guarding looks at the catalog first and builds indexes in steps that depend on what it finds, so it can't be
written down beforehand. The script checks instead: it stops, and its transaction with the new version number
is rolled back, unless `sqlguard guard` has been run at that point. So a script never claims a guard that is not
there.
"""

from alembic.runtime.migration import MigrationContext
from psycopg import sql

from sqlguard.alembic.operations import GuardOp, LoosenOp, UnguardOp

_CHECK = sql.SQL("""\
-- Guards are put on and taken off by sqlguard itself, which reads the catalog first:
--     {command}
DO $sqlguard$
DECLARE
    wanted text;
BEGIN
    FOREACH wanted IN ARRAY {names}::text[] LOOP
        IF {there} EXISTS (
            SELECT FROM sqlguard.guarded_table g
            WHERE g.relid = to_regclass(wanted) AND ({mode}::text IS NULL OR g.mode = {mode}::text)
        ) THEN
            RAISE EXCEPTION '`%` {fault}', wanted USING HINT = {hint};
        END IF;
    END LOOP;
END $sqlguard$;""")


def require_guard(context: MigrationContext, op: GuardOp) -> None:
    """Write a check that stops the script unless the tables are guarded."""
    mode = None if op.mode == "auto" else op.mode
    command = ["sqlguard guard", *names(op), *([f"--mode {mode}"] if mode else [])]
    if op.unique != "partial":
        command.append(f"--unique {op.unique}")
    command += [f"--accept {code}" for code in op.accept]
    if op.fix_views:
        command.append("--fix-views")
    _write(context, op, " ".join(command), mode, guarded=True)


def require_no_guard(context: MigrationContext, op: UnguardOp) -> None:
    """Write a check that stops the script while the tables are guarded."""
    command = ["sqlguard unguard", *names(op)]
    command += [f"--{word}" for word, wanted in (("purge", op.purge), ("restore", op.restore)) if wanted]
    _write(context, op, " ".join(command), None, guarded=False)


def names(op: GuardOp | UnguardOp) -> list[str]:
    return [".".join(part) for part in parts(op)]


def parts(op: GuardOp | UnguardOp | LoosenOp) -> list[tuple[str, ...]]:
    """Return each table as (schema, name) or (name,); without a schema, a name may be `schema.table`."""
    if op.schema is not None:
        return [(op.schema, table) for table in op.tables]
    return [tuple(table.split(".", 1)) for table in op.tables]


def _write(
    context: MigrationContext, op: GuardOp | UnguardOp, command: str, mode: str | None, *, guarded: bool
) -> None:
    statement = _CHECK.format(
        command=sql.SQL(command.replace("\n", " ")),  # within a comment
        names=sql.Literal([sql.Identifier(*part).as_string() for part in parts(op)]),
        there=sql.SQL("NOT" if guarded else ""),
        mode=sql.Literal(mode),
        fault=sql.SQL("is not guarded" if guarded else "is still guarded"),
        hint=sql.Literal(f"run `{command}`, then the script again from here"),
    )
    # What comes before is committed, so that sqlguard finds it; the check belongs to the transaction of what
    # follows, so that a failed one takes the version number back.
    with context.autocommit_block():
        pass
    context.impl.static_output(statement.as_string())
