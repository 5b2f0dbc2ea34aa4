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
