"""What is put around a write, and what is told of a dry run."""

import json

from sqlguard.errors import NotUnderstood
from sqlguard.gate import refusal
from sqlguard.proxy.report import affected, behind, changes, claim, dry_run_notice, sqlstate
from sqlguard.wire.messages import DataRow, NoticeResponse
from sqlguard.wire.reports import error_response


def row(**change: object) -> bytes:
    return DataRow((json.dumps(change).encode(),)).encode()


def test_a_dry_run_is_told_to_people_and_programs() -> None:
    rows = [
        row(table="public.customers", op="soft_delete", rows=1),
        row(table="public.größe", op="update", rows=12),
    ]
    notice = NoticeResponse.decode(dry_run_notice(rows, 7, "utf-8")[5:])
    said = "dry run, rolled back: 1 soft_delete in public.customers, 12 update in public.größe"
    assert (notice.get(b"M") or b"").decode() == said
    document = json.loads(notice.get(b"D") or b"")
    assert (document["action"], document["affected_rows"]) == (7, 13)
    assert document["affected"] == affected(rows, "utf-8")
    nothing = NoticeResponse.decode(dry_run_notice([], None, "utf-8")[5:])
    assert nothing.get(b"M") == b"dry run, rolled back: no rows"


def test_positions_are_counted_in_the_clients_text() -> None:
    decision = refusal("SELECT x", NotUnderstood("x"))
    before = [claim(5)]
    where = behind(before, decision)
    sent = "; ".join([*before, decision.text])
    assert where(sent.index("SELECT") + 1) == 1
    assert where(sent.index("x", sent.index("SELECT")) + 1) == 8
    assert where(3) is None


def test_only_numbers_get_into_our_sql() -> None:
    assert "= 12" in changes(12)
    assert "WHERE true" in changes()
    assert claim(12) == "SET LOCAL sqlguard.action = '12'"


def test_the_code_of_an_error() -> None:
    assert sqlstate(error_response("ERROR", "22012", "division by zero")) == "22012"
    assert sqlstate(b"") == ""
