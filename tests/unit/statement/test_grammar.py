"""Which nodes of the grammar are known: a new libpg_query that has more shows up here."""

from postgast import pg_query_pb2

from sqlguard.statement import kinds, query
from sqlguard.statement.grammar import NEVER_WALKED, PARTS, QUERIES, STATEMENTS, TYPED
from sqlguard.statement.walk import HANDLERS

LISTS = (PARTS, QUERIES, STATEMENTS, NEVER_WALKED)


def test_every_node_type_is_in_exactly_one_list() -> None:
    nodes = {field.message_type.name for field in pg_query_pb2.Node.DESCRIPTOR.fields}
    assert nodes == frozenset().union(*LISTS)
    assert sum(map(len, LISTS)) == len(nodes)


def test_what_the_walk_knows_is_what_the_lists_say() -> None:
    assert set(HANDLERS) - {"WithClause"} == (PARTS | QUERIES) - {"WithClause"}
    assert query
    assert kinds


def test_no_node_that_is_not_walked_stands_in_a_typed_field_of_one_that_is() -> None:
    for name in PARTS | QUERIES:
        for field, kind in TYPED.get(name, {}).items():
            assert kind in PARTS | QUERIES or (name, field) == ("SelectStmt", "intoClause"), (name, field)
