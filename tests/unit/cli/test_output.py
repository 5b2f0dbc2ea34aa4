"""What a person decides by is on the screen as it is: no text of an agent's moves the cursor or hides a word."""

import json

import pytest

from sqlguard.cli import output


@pytest.mark.parametrize(
    "character", ["\x1b", "\x9b", "\x08", "\x00", "\x7f", "\r", "\u202e", "\u2066", "\u061c"]
)
def test_what_a_terminal_would_obey_is_shown(character: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"UPDATE a{character}[8m SET b = 1"
    output.out.print(text, markup=False)
    output.print_pairs({"statement": text})
    output.print_rows(("statement",), [(text,)])
    shown = capsys.readouterr().out
    assert character not in shown
    assert shown.count("[8m SET b = 1") == 3


def test_what_people_write_stays(capsys: pytest.CaptureFixture[str]) -> None:
    output.out.print("Größe 漢字 👩‍👩‍👧 …\r\n\tSELECT 1", markup=False)
    assert capsys.readouterr().out == "Größe 漢字 👩‍👩‍👧 …\n        SELECT 1\n"


def test_json_on_a_terminal_shows_every_character_as_itself(capsys: pytest.CaptureFixture[str]) -> None:
    told = "a\x1b[2J\x7f\x9b2J\u202eb é"
    output.print_json({"statement": told})
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"statement": told}
    assert not set(printed) & set("\x1b\x7f\x9b\u202e")
    assert "é" in printed


@pytest.mark.parametrize("character", ["\u200b", "\ufeff", "\u2028", "\u00ad", "\u3164", "\U000e0041"])
def test_what_nobody_sees_is_shown(character: str, capsys: pytest.CaptureFixture[str]) -> None:
    output.out.print(f"a{character}b", markup=False)
    output.print_json_line({"text": f"a{character}b"})
    shown, line = capsys.readouterr().out.splitlines()
    assert character not in shown + line
    assert json.loads(line) == {"text": f"a{character}b"}


def test_json_lines_on_a_terminal_show_every_character_as_itself(capsys: pytest.CaptureFixture[str]) -> None:
    told = "a\x1b[2J\x7f\x9b2J\u202eb\né"
    output.print_json_line({"statement": told})
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"statement": told}
    assert printed.count("\n") == 1
    assert not set(printed) & set("\x1b\x7f\x9b\u202e")


def test_lines_of_an_agent_s_words_are_not_like_ours(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_pairs({"purpose": "x\napprovals  2 of 2", "tier": "costly"})
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("approvals")] == []
    assert output.inset("SELECT 1\r\n\n3 rows") == "  SELECT 1\n  \n  3 rows"
