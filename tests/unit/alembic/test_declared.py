"""Declarations in `Table.info` and in policies."""

import pytest
from sqlalchemy import Column, Integer, MetaData, Table

from sqlguard.alembic import Declaration, declaration, declare_policies
from sqlguard.errors import GuardError
from sqlguard.policy import parse_policy


def table(info: object, schema: str | None = None) -> Table:
    return Table("t", MetaData(), Column("id", Integer), schema=schema, info=info)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("info", "found"),
    [
        ({}, None),
        ({"else": 1}, None),
        ({"sqlguard": "journal"}, Declaration("journal")),
        ({"sqlguard": {}}, Declaration("auto")),
        ({"sqlguard": True}, Declaration("auto")),
        ({"sqlguard": False}, Declaration(None)),
        ({"sqlguard": {"unique": "keep"}}, Declaration("auto", "keep")),
        ({"sqlguard": {"mode": "soft", "unique": "keep"}}, Declaration("soft", "keep")),
        ({"sqlguard": {"mode": "soft", "accept": ["x"]}}, Declaration("soft", accept=("x",))),
        ({"soft_delete": True}, Declaration("soft")),
        ({"soft_delete": False}, Declaration(None)),
        ({"soft_delete": True, "sqlguard": "journal"}, Declaration("journal")),
    ],
)
def test_declarations(info: object, found: Declaration | None) -> None:
    assert declaration(table(info)) == found


@pytest.mark.parametrize(
    "said", [{"mode": "hard"}, {"modus": "soft"}, {"unique": 1}, {"accept": "x"}, "hard", 7, ["soft"]]
)
def test_what_is_none_is_an_error_that_names_the_table(said: object) -> None:
    with pytest.raises(GuardError, match=r"`s\.t`"):
        declaration(table({"sqlguard": said}, "s"))


SUPPORT = 'name = "support"\n[tables."public.*"]\nselect = true\n[tables."public.t"]\ndelete = "soft"\n'


def test_policies_declare_what_the_table_does_not() -> None:
    metadata = MetaData()
    plain = Table("t", metadata, Column("id", Integer))
    other = Table("u", metadata, Column("id", Integer))
    declare_policies(metadata, [parse_policy(SUPPORT, "p"), parse_policy('name = "readers"', "q")])
    assert declaration(plain) == Declaration("soft")
    assert declaration(other) is None

    own = table({"sqlguard": "journal"})
    declare_policies(own.metadata, [parse_policy(SUPPORT, "p")])
    assert declaration(own) == Declaration("journal")


def test_policies_that_disagree() -> None:
    other = SUPPORT.replace("support", "night").replace("soft", "journal")
    with pytest.raises(GuardError, match="policy `support` says soft, `night` journal"):
        declare_policies(table({}).metadata, [parse_policy(SUPPORT, "p"), parse_policy(other, "q")])
