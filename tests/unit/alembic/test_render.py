"""What generated revisions say, and that Alembic reads it back as the operation that was meant."""

from typing import Any

import pytest
from alembic.autogenerate.api import AutogenContext
from alembic.autogenerate.render import render_op_text
from alembic.migration import MigrationContext
from alembic.operations import MigrateOperation, Operations
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from sqlguard.alembic import GuardOp, LoosenOp, UnguardOp


def context(prefix: str = "op.") -> AutogenContext:
    migration = MigrationContext.configure(
        dialect=PGDialect_psycopg(), opts={"alembic_module_prefix": prefix}
    )
    return AutogenContext(migration, autogenerate=False)


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (GuardOp(["orders"]), "op.guard_table('orders', mode='auto')"),
        (
            GuardOp(["a", "b"], schema="s", mode="soft", unique="keep"),
            "op.guard_tables(['a', 'b'], schema='s', mode='soft', unique='keep')",
        ),
        (
            GuardOp(["a"], mode="soft", existing_mode="journal"),
            "op.guard_table('a', mode='soft', existing_mode='journal')",
        ),
        (
            GuardOp(["a"], mode="soft", fix_views=True),
            "op.guard_table('a', mode='soft', fix_views=True)",
        ),
        (UnguardOp(["a"], restore=True, mode="soft"), "op.unguard_table('a', restore=True)"),
        (UnguardOp(["a", "b"], purge=True), "op.unguard_tables(['a', 'b'], purge=True)"),
        (LoosenOp(["a"], schema="s", mode="soft"), "op.loosen_guard('a', schema='s')"),
        (LoosenOp(["a", "b"]), "op.loosen_guards(['a', 'b'])"),
    ],
)
def test_one_line_where_it_fits(op: MigrateOperation, text: str) -> None:
    made = context()
    assert render_op_text(made, op) == text
    assert made.imports == {"import sqlguard.alembic  # op.guard_table and its kin"}


def test_many_tables_stand_one_below_the_other() -> None:
    names = [f"table_number_{n}" for n in range(6)]
    assert render_op_text(context(), GuardOp(names, mode="soft")).splitlines() == [
        "op.guard_tables(",
        "    [",
        *(f"        '{name}'," for name in names),
        "    ],",
        "    mode='soft',",
        ")",
    ]


def test_the_prefix_of_the_project_is_used() -> None:
    assert render_op_text(context("migrate."), UnguardOp(["a"])) == "migrate.unguard_table('a')"


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=63)


@given(
    st.lists(NAMES, min_size=1, max_size=8),
    st.none() | NAMES,
    st.sampled_from(["auto", "soft", "journal"]),
    st.sampled_from(["partial", "keep"]),
    st.sampled_from([None, "soft", "journal"]),
    st.lists(st.sampled_from(["user_delete_trigger", "function_returns_row"]), unique=True),
    st.booleans(),
)
def test_what_is_written_is_what_was_meant(  # noqa: PLR0917
    names: list[str],
    schema: str | None,
    mode: Any,
    unique: Any,
    existing: Any,
    accept: list[str],
    fix_views: bool,  # noqa: FBT001 (hypothesis draws it)
) -> None:
    op = GuardOp(
        names,
        schema=schema,
        mode=mode,
        unique=unique,
        existing_mode=existing,
        accept=accept,
        fix_views=fix_views,
    )
    read: list[MigrateOperation] = []
    operations = Operations(MigrationContext.configure(dialect=PGDialect_psycopg()))
    operations.invoke = read.append  # type: ignore[assignment, method-assign]
    eval(render_op_text(context(), op), {"op": operations})  # noqa: S307 (what a revision is)
    assert [vars(one) for one in read] == [vars(op)]
