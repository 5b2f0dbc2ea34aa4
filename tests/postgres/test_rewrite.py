"""What the rewriter makes of a statement gives on a real server what the real DELETE gives."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from servers import Database
from soft_world import Worlds, ask

from sqlguard.errors import SqlguardError

GROUPS = frozenset(
    "delete returning join_dml subquery inheritance partition no_pk cte parser read view cursor insert update"
    " unique columns".split()
)
#: Cases whose outcome is another module's work, with the reason.
ELSEWHERE = {
    "SD-A08": "a table with a trigger that changes the row is refused with RETURNING",
    "SD-B10": "the policy refuses EXPLAIN ANALYZE of DML",
    "SD-D09": "PostgreSQL has no COPY FROM with row-level security",
    "SD-U12": "a unique value that a foreign key points to stays taken; 23505 at run time",
}


def cases() -> list[Any]:
    path = Path(__file__).resolve().parents[3] / "shared" / "corpus" / "soft_delete_cases.yaml"
    if not path.is_file():
        return [pytest.param(None, marks=pytest.mark.skip(reason="the soft delete cases are not there"))]
    found = yaml.safe_load(path.read_text(encoding="utf-8"))["cases"]
    return [
        pytest.param(case, id=case["id"])
        for case in found
        if case["group"] in GROUPS and case["id"] not in ELSEWHERE
    ]


@pytest.fixture
def worlds(database: Database) -> Worlds:
    return Worlds(database)


@pytest.mark.parametrize("case", cases())
def test_case(worlds: Worlds, case: dict[str, Any]) -> None:
    worlds.build(case["setup"], case["soft_tables"], case.get("enable_extra", ""))
    for text in case.get("earlier_agent_statements", ()):
        assert worlds.ask_hard(text) == worlds.ask_soft(text)
    if case["expect"]["outcome"] == "refuse":
        with pytest.raises(SqlguardError) as caught:
            for text in case["agent"]:
                worlds.ask_soft(text)
        assert caught.value.rules == (case["expect"]["reason"],)
        return
    for text in case["agent"]:
        for part in text.split("; ") if text.startswith("CREATE TEMP") else [text]:
            assert worlds.ask_soft(part) == worlds.ask_hard(part), worlds.rewritten(part)
    for table in case["expect"].get("visible", ()):
        hard, soft = worlds.visible(table)
        assert soft == hard
