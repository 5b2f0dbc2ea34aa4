"""Other databases' texts: carried over whole, or not understood; nothing in between."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sqlguard.cli.judging import decided_elsewhere
from sqlguard.errors import NotConfigured, NotUnderstood
from sqlguard.policy import parse_policy
from sqlguard.statement import dialects

POLICY = parse_policy(
    """
name = "all"
[tables."public.*"]
select = true
insert = true
update = true
delete = "soft"
""",
    "all.toml",
)

CARRIED = [
    ("mysql", "SELECT `a` FROM `t` WHERE x <=> 1 LIMIT 5, 10", "allow"),
    ("mysql", "SELECT IFNULL(a, 0) FROM t", "allow"),
    ("mysql", 'SELECT * FROM t WHERE name = "bob"', "allow"),
    ("bigquery", "SELECT * FROM `project.public.t` WHERE SAFE_CAST(x AS INT64) > 3", "allow"),
    ("tsql", "SELECT TOP 5 * FROM [t]", "allow"),
    ("sqlite", "SELECT a FROM t WHERE b GLOB 'x*'", "refuse"),
    ("mysql", "UPDATE t SET x = 1", "refuse"),
    ("mysql", "UPDATE t SET x = 1 WHERE 1", "refuse"),
    ("mysql", "UPDATE t SET x = 1 WHERE id = 3", "allow"),
    ("mysql", "DELETE FROM t WHERE TRUE OR id = 3", "refuse"),
    ("mysql", "DELETE FROM t WHERE id = 3", "allow"),
    ("mysql", "DROP TABLE t", "refuse"),
    ("mysql", "TRUNCATE t", "refuse"),
    ("mysql", "SELECT SLEEP(5)", "refuse"),
    ("mysql", "REPLACE INTO t VALUES (1)", "refuse"),
    ("mysql", "CALL p()", "refuse"),
    ("mysql", "DELETE FROM t /*!WHERE id = 3*/", "refuse"),
    ("mysql", "SELECT 1 /*M!50000 ; DROP TABLE t */", "refuse"),
    ("mysql", "SELECT * INTO OUTFILE '/x' FROM t", "refuse"),
    ("mysql", "LOAD DATA INFILE 'x' INTO TABLE t", "refuse"),
    ("sqlite", "PRAGMA writable_schema = 1", "refuse"),
    ("sqlite", "ATTACH 'x' AS y", "refuse"),
    ("duckdb", "COPY t TO 'x.parquet'", "refuse"),
    ("hive", "INSERT OVERWRITE TABLE t SELECT * FROM s", "refuse"),
    ("bigquery", "EXPORT DATA OPTIONS(uri='gs://x') AS SELECT 1", "refuse"),
    ("clickhouse", "ALTER TABLE t DELETE WHERE id = 1", "refuse"),
    ("snowflake", "MERGE INTO t USING s ON true WHEN MATCHED THEN DELETE", "refuse"),
]


@pytest.mark.parametrize(("dialect", "text", "expected"), CARRIED)
def test_what_is_said_of_other_dialects(dialect: str, text: str, expected: str) -> None:
    (decision,) = decided_elsewhere(text, dialect, POLICY)
    assert str(decision.verdict.effect).replace("rewrite", "allow") == expected


def test_each_statement_is_judged() -> None:
    found = decided_elsewhere("SELECT 1; -- harmless\nDROP TABLE t;", "mysql", POLICY)
    assert [d.allowed for d in found] == [True, False]


def test_a_dialect_that_is_not_known() -> None:
    with pytest.raises(NotConfigured, match="no dialect"):
        list(dialects.carry_over("SELECT 1", "klingon"))


@pytest.mark.parametrize(
    "text", ["(" * 5000, "SELECT " + "(" * 500 + "1" + ")" * 500, "x" * 200_000, "SELECT 'a"]
)
def test_hostile_texts_are_not_understood(text: str) -> None:
    ((_, fault),) = dialects.carry_over(text, "mysql")
    assert isinstance(fault, NotUnderstood)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["mysql", "sqlite", "bigquery", "snowflake", "tsql"]),
    st.lists(
        st.sampled_from(
            ["SELECT", "DELETE", "FROM", "t", "WHERE", "(", ")", "*", "1", "'", "/*!", ";", "SET", "--"]
        )
    ).map(" ".join),
)
def test_any_text_is_answered(dialect: str, text: str) -> None:
    for decision in decided_elsewhere(text, dialect, POLICY):
        assert str(decision.verdict.effect) in {"allow", "rewrite", "refuse"}
