"""Random statements on the tables of the rewriter's fixtures, with blanks and comments of every kind between words."""

from hypothesis import strategies as st

BLANKS = st.sampled_from(
    [" ", "\n", "\t ", " /* FROM orders WHERE */ ", " -- RETURNING * ;\n", "/* a /* b */ */"]
)
#: Table -> columns; `log` and `plain` are not guarded.
TABLES = {
    "customers": ("id", "name", "region"),
    "orders": ("id", "customer_id", "status", "total", '"Placed At"'),
    "items": ("order_id", "pos", "sku"),
    "tags": ("tag", "note"),
    "plain": ("id", "customer_id", "name"),
    "log": ("id", "at", "deleted_at", "what"),
}
SOFT = ("customers", "orders", "items", "tags")
NUMBERS = {"customers": "id", "orders": "id", "items": "order_id", "plain": "id", "log": "id"}
ALIASES = ("a", "b", '"T 1"', "ü", "deleted", '"WHERE"', "row_", "status")


@st.composite
def predicates(draw: st.DrawFn, names: tuple[tuple[str, str], ...]) -> list[str]:
    """Return a predicate over FROM items, given as (table, name)."""
    atoms = []
    for table, name in names:
        if table in NUMBERS:
            atoms.append(
                [f"{name}.{NUMBERS[table]}", draw(st.sampled_from("<>=")), str(draw(st.integers(0, 9)))]
            )
            inner = draw(st.sampled_from(["orders", "plain", "customers"]))
            atoms.append([f"{name}.{NUMBERS[table]}", "IN", "(", "SELECT", "id", "FROM", inner, ")"])
            atoms.append([*atoms[-1][:-1], "ORDER", "BY", "id", "LIMIT", "2", ")"])
            atoms.append(["EXISTS", "(", "SELECT", "*", "FROM", "items", "i_", "WHERE"])
            atoms[-1] += ["i_.order_id", "=", f"{name}.{NUMBERS[table]}", ")"]
        atoms.append([f"{name}.{TABLES[table][-1]}", "IS", "NOT", "NULL"])
        atoms.append(["(", name, ")", "IS", "NOT", "NULL"])
        atoms.append([name, "::", "text", "LIKE", "'%a%'"])
    numbered = [f"{name}.{NUMBERS[table]}" for table, name in names if table in NUMBERS]
    if len(numbered) > 1:
        atoms.append([numbered[0], "=", numbered[1]])
    words = list(draw(st.sampled_from(atoms)))
    for _ in range(draw(st.integers(0, 3))):
        other = draw(st.sampled_from(atoms))
        operator = draw(st.sampled_from(["AND", "OR", "AND NOT", "OR NOT"]))
        words = [*words, operator, *other] if draw(st.booleans()) else ["(", *words, ")", operator, *other]
    return words


@st.composite
def shown(draw: st.DrawFn, names: tuple[tuple[str, str], ...], *, star: bool = True) -> list[str]:
    """Return a list of columns to select or return."""
    entries = [["*"]] if star else []
    for table, name in names:
        entries += [
            [f"{name}.*"],
            [f"{name}.{draw(st.sampled_from(TABLES[table]))}"],
            ["row_to_json", "(", name, ")", "::", "text"],
            ["(", name, ")", ".", "*"],
            [name, "::", "text", "AS", '"Label"'],
            ["1", "AS", "deleted_at"],
        ]
    chosen = draw(st.lists(st.sampled_from(entries), min_size=1, max_size=3))
    return [word for i, entry in enumerate(chosen) for word in ([","] if i else []) + entry]


@st.composite
def items(
    draw: st.DrawFn, tables: tuple[str, ...], taken: tuple[str, ...] = ()
) -> tuple[list[str], tuple[str, str]]:
    """Return the words of a FROM item, and its table and name."""
    table = draw(st.sampled_from(tables))
    free = [a for a in ALIASES if a not in taken]
    alias = draw(st.sampled_from([None, *free] if table not in taken else free))
    words = [draw(st.sampled_from([table, table.upper(), f'"{table}"']))]
    if alias is None:
        return words, (table, table)
    return [*words, *draw(st.sampled_from([["AS"], []])), alias], (table, alias)


@st.composite
def deletes(draw: st.DrawFn) -> list[str]:
    target, own = draw(items(SOFT))
    words = ["DELETE", "FROM", *draw(st.sampled_from([[], ["ONLY"]])), *target]
    names: tuple[tuple[str, str], ...] = (own,)
    if draw(st.booleans()):
        using, other = draw(items(tuple(TABLES), (own[1], own[0])))
        words += ["USING", *using]
        names = (own, other)
    if draw(st.integers(0, 9)):
        words += ["WHERE", *draw(predicates(names))]
    if draw(st.booleans()):
        # Which of several joined rows is returned is not said; so only the target's columns are.
        words += ["RETURNING", *draw(shown((own,), star=len(names) == 1))]
    return words


@st.composite
def selects(draw: st.DrawFn) -> list[str]:
    first, own = draw(items(SOFT))
    second, other = draw(items(tuple(TABLES), (own[1], own[0])))
    join = draw(
        st.sampled_from(["CROSS JOIN", "NATURAL JOIN", "NATURAL LEFT JOIN", "NATURAL FULL JOIN", ","])
    )
    if own[0] in NUMBERS and other[0] in NUMBERS and draw(st.booleans()):
        on = ["ON", f"{own[1]}.{NUMBERS[own[0]]}", "=", f"{other[1]}.{NUMBERS[other[0]]}"]
        return [
            *("SELECT", *draw(shown((own, other))), "FROM", *first),
            *(draw(st.sampled_from(["LEFT", "RIGHT", "FULL", "INNER"])), "JOIN", *second, *on),
            *("WHERE", *draw(predicates((own, other)))),
        ]
    words = ["SELECT", *draw(shown((own, other))), "FROM", *first, *join.split(), *second]
    return [*words, "WHERE", *draw(predicates((own, other)))] if draw(st.booleans()) else words


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Return a statement's text."""
    words = draw(st.one_of(deletes(), selects()))
    wrapped = draw(st.integers(0, 5))
    if wrapped == 0 and words[0] == "DELETE" and "RETURNING" in words:
        words = ["WITH", "gone", "AS", "(", *words, ")", "SELECT", "count(*)", "FROM", "gone"]
    if wrapped == 1 and words[0] == "SELECT":
        words = ["SELECT", "count(*)", "FROM", "(", *words, ")", "x"]
    return "".join(draw(BLANKS) + word for word in words) + draw(BLANKS)
