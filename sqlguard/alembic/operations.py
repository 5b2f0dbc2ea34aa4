"""
The operations of a revision as values: what is to be guarded, without how (Alembic's own split).

One class guards, one lifts the guard and one loosens it, for one table or many: the tables of one operation are
looked at together, so that parents and children of foreign keys may come in any order.
"""

from collections.abc import Sequence
from typing import Any, Literal

from alembic.operations import MigrateOperation, Operations

Mode = Literal["auto", "soft", "journal"]
UniqueChoice = Literal["partial", "keep"]
MODES = ("auto", "soft", "journal")
UNIQUES = ("partial", "keep")


@Operations.register_operation("guard_table")
@Operations.register_operation("guard_tables")
@Operations.register_operation("add_soft_delete")
class GuardOp(MigrateOperation):
    """
    Guard *tables*; safe to repeat, and finishes what an earlier run left half done.

    *accept* names reason codes of the pre-flight that do not matter here, *fix_views* sets `security_invoker` on
    the views over soft tables. *existing_mode* is the mode in which
    the tables are guarded already: what a downgrade goes back to. Without it a downgrade lifts the guard.
    *loosened* says that it follows a LoosenOp, which a downgrade then begins with.
    """

    loosened = False

    def __init__(  # noqa: PLR0913 (an option each)
        self,
        tables: Sequence[str],
        *,
        schema: str | None = None,
        mode: Mode = "auto",
        unique: UniqueChoice = "partial",
        accept: Sequence[str] = (),
        fix_views: bool = False,
        existing_mode: Mode | None = None,
    ) -> None:
        self.tables = tuple(tables)
        self.schema = schema
        self.mode = one_of(mode, MODES, "mode")
        self.unique = one_of(unique, UNIQUES, "unique")
        self.accept = tuple(accept)
        self.fix_views = fix_views
        self.existing_mode = existing_mode

    @classmethod
    def guard_table(  # noqa: PLR0913 (an option each)
        cls,
        operations: Operations,
        name: str,
        *,
        schema: str | None = None,
        mode: Mode = "auto",
        unique: UniqueChoice = "partial",
        accept: Sequence[str] = (),
        fix_views: bool = False,
        existing_mode: Mode | None = None,
    ) -> Any:
        """Guard the table *name* in *mode*; `auto` takes the mode that the pre-flight finds fit."""
        return operations.invoke(
            cls(
                [name],
                schema=schema,
                mode=mode,
                unique=unique,
                accept=accept,
                fix_views=fix_views,
                existing_mode=existing_mode,
            )
        )

    @classmethod
    def guard_tables(  # noqa: PLR0913 (an option each)
        cls,
        operations: Operations,
        names: Sequence[str],
        *,
        schema: str | None = None,
        mode: Mode = "auto",
        unique: UniqueChoice = "partial",
        accept: Sequence[str] = (),
        fix_views: bool = False,
        existing_mode: Mode | None = None,
    ) -> Any:
        """Guard several tables; without *schema*, a name may be `schema.table`."""
        return operations.invoke(
            cls(
                names,
                schema=schema,
                mode=mode,
                unique=unique,
                accept=accept,
                fix_views=fix_views,
                existing_mode=existing_mode,
            )
        )

    @classmethod
    def add_soft_delete(  # noqa: PLR0913 (an option each)
        cls,
        operations: Operations,
        name: str,
        *,
        schema: str | None = None,
        unique: UniqueChoice = "partial",
        accept: Sequence[str] = (),
        fix_views: bool = False,
    ) -> Any:
        """Guard the table *name* in mode `soft`."""
        op = cls([name], schema=schema, mode="soft", unique=unique, accept=accept, fix_views=fix_views)
        return operations.invoke(op)

    def reverse(self) -> MigrateOperation:
        same: dict[str, Any] = {
            "schema": self.schema,
            "unique": self.unique,
            "accept": self.accept,
            "fix_views": self.fix_views,
        }
        if self.existing_mode is None:
            return UnguardOp(self.tables, mode=self.mode, **same)
        if self.loosened:
            return LoosenOp(self.tables, mode=self.mode, next_mode=self.existing_mode, **same)
        return GuardOp(self.tables, mode=self.existing_mode, existing_mode=self.mode, **same)

    def to_diff_tuple(self) -> tuple[Any, ...]:
        return ("guard_tables", self.schema, self.tables, self.mode, self.unique)


@Operations.register_operation("unguard_table")
@Operations.register_operation("unguard_tables")
@Operations.register_operation("drop_soft_delete")
class UnguardOp(MigrateOperation):
    """
    Lift the guard off *tables*. Refused while deleted rows are in them, unless *purge* or *restore* says
    what shall become of those rows. *mode*, *unique*, *accept* and *fix_views* are what a reversal guards with.
    """

    def __init__(  # noqa: PLR0913 (an option each)
        self,
        tables: Sequence[str],
        *,
        schema: str | None = None,
        purge: bool = False,
        restore: bool = False,
        mode: Mode = "auto",
        unique: UniqueChoice = "partial",
        accept: Sequence[str] = (),
        fix_views: bool = False,
    ) -> None:
        if purge and restore:
            raise ValueError("the deleted rows can be purged or restored, not both")
        self.tables = tuple(tables)
        self.schema = schema
        self.purge = purge
        self.restore = restore
        self.mode = one_of(mode, MODES, "mode")
        self.unique = one_of(unique, UNIQUES, "unique")
        self.accept = tuple(accept)
        self.fix_views = fix_views

    @classmethod
    def unguard_table(
        cls,
        operations: Operations,
        name: str,
        *,
        schema: str | None = None,
        purge: bool = False,
        restore: bool = False,
    ) -> Any:
        """Lift the guard off the table *name*; *purge* or *restore* decide about its deleted rows."""
        return operations.invoke(cls([name], schema=schema, purge=purge, restore=restore))

    @classmethod
    def unguard_tables(
        cls,
        operations: Operations,
        names: Sequence[str],
        *,
        schema: str | None = None,
        purge: bool = False,
        restore: bool = False,
    ) -> Any:
        """Lift the guard off several tables; without *schema*, a name may be `schema.table`."""
        return operations.invoke(cls(names, schema=schema, purge=purge, restore=restore))

    @classmethod
    def drop_soft_delete(
        cls,
        operations: Operations,
        name: str,
        *,
        schema: str | None = None,
        purge: bool = False,
        restore: bool = False,
    ) -> Any:
        """Lift the guard off the table *name*: the reverse of `add_soft_delete`."""
        return operations.invoke(cls([name], schema=schema, purge=purge, restore=restore, mode="soft"))

    def reverse(self) -> MigrateOperation:
        return GuardOp(
            self.tables,
            schema=self.schema,
            mode=self.mode,
            unique=self.unique,
            accept=self.accept,
            fix_views=self.fix_views,
        )

    def to_diff_tuple(self) -> tuple[Any, ...]:
        return ("unguard_tables", self.schema, self.tables)


@Operations.register_operation("loosen_guard")
@Operations.register_operation("loosen_guards")
class LoosenOp(MigrateOperation):
    """
    Make way for a change of columns or keys of guarded *tables*; a GuardOp must follow the change.

    PostgreSQL refuses to drop or retype a column that a trigger's condition names, and the walls name all. So
    those triggers go, and agents' writes to the tables are frozen, with the commit of the migration's own
    transaction; guarding again puts the triggers back and thaws. *mode* is the mode until now, *next_mode* the
    one that follows.
    """

    def __init__(  # noqa: PLR0913 (an option each)
        self,
        tables: Sequence[str],
        *,
        schema: str | None = None,
        mode: Mode = "auto",
        next_mode: Mode = "auto",
        unique: UniqueChoice = "partial",
        accept: Sequence[str] = (),
        fix_views: bool = False,
    ) -> None:
        self.tables = tuple(tables)
        self.schema = schema
        self.mode = mode
        self.next_mode = next_mode
        self.unique = unique
        self.accept = tuple(accept)
        self.fix_views = fix_views

    @classmethod
    def loosen_guard(cls, operations: Operations, name: str, *, schema: str | None = None) -> Any:
        """Make way for a change of the guarded table *name*; `op.guard_table` must follow the change."""
        return operations.invoke(cls([name], schema=schema))

    @classmethod
    def loosen_guards(cls, operations: Operations, names: Sequence[str], *, schema: str | None = None) -> Any:
        """Make way for a change of several guarded tables; `op.guard_tables` must follow the change."""
        return operations.invoke(cls(names, schema=schema))

    def reverse(self) -> MigrateOperation:
        back = GuardOp(
            self.tables,
            schema=self.schema,
            mode=self.mode,
            unique=self.unique,
            accept=self.accept,
            fix_views=self.fix_views,
            existing_mode=self.next_mode,
        )
        back.loosened = True
        return back

    def to_diff_tuple(self) -> tuple[Any, ...]:
        return ("loosen_guards", self.schema, self.tables)


def one_of(value: Any, choices: Sequence[str], name: str) -> Any:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
    return value
