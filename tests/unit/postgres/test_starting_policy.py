"""The starting policy is a policy, whatever the tables are called; and so is what its comments propose."""

from hypothesis import given
from hypothesis import strategies as st

from sqlguard.policy import parse_policy
from sqlguard.postgres.starting_policy import Proposal, render


def proposal(table: str, columns: tuple[str, ...] = ("id", "note"), **options: object) -> Proposal:
    given_: dict[str, object] = {
        "mode": "soft",
        "guarded": False,
        "notes": (),
        "writable": columns[1:],
        "secrets": (),
        "classes": (),
        "rows": 10,
    }
    return Proposal(table=table, columns=columns, **{**given_, **options})  # type: ignore[arg-type]


def uncommented(text: str) -> str:
    """The policy with all that it proposes."""
    proposed = ("# insert =", "# update =", "# delete =", "# class =", "# [[gates]]", "# when =", "# then =")
    return "\n".join(line[2:] if line.startswith(proposed) else line for line in text.split("\n"))


@given(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20),
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1), unique=True
    ),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20),
)
def test_any_names_make_a_policy(table: str, columns: list[str], database: str) -> None:
    one = proposal(
        f"public.{table}", tuple(columns), notes=(f"a note on\n{table}",), secrets=tuple(columns[:1])
    )
    text = render("agent", database, [one])
    for policy in (parse_policy(text, "x"), parse_policy(uncommented(text), "x")):
        rule = policy.tables.get(one.table)
        assert (rule is None) == bool({"*", "?", "["} & set(one.table))
        if rule is not None and columns:
            assert rule.select == tuple(columns[1:])


def test_it_grants_reading_only_until_somebody_says_so() -> None:
    text = render(
        "agent", "shop", [proposal("public.orders", classes=("financial",)), proposal("public.x", mode=None)]
    )
    asis = parse_policy(text, "x").tables
    assert [(r.select, r.insert, r.update, r.delete) for r in asis.values()] == [
        (True, False, False, "refuse")
    ] * 2
    orders, x = parse_policy(uncommented(text), "x").tables.values()
    assert (orders.insert, orders.update, orders.delete, orders.class_) == (
        True,
        ("note",),
        "soft",
        ("financial",),
    )
    assert (x.insert, x.delete) == (False, "refuse")
    assert len(parse_policy(uncommented(text), "x").gates) == 2


def test_secrets_are_not_read() -> None:
    (rule,) = parse_policy(
        render(
            "agent", "shop", [proposal("public.users", ("id", "name", "password"), secrets=("password",))]
        ),
        "x",
    ).tables.values()
    assert rule.select == ("id", "name")
