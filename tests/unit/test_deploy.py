"""The unit and the container file name what is there."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sqlguard.cli import app
from sqlguard.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "deploy" / "sqlguard.service"
CONTAINER = (ROOT / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")


def words(instruction: str) -> list[list[str]]:
    """The words of all lines with *instruction*."""
    found = re.findall(rf"^{instruction} (.*)$", CONTAINER, re.MULTILINE)
    return [json.loads(line) if line.startswith("[") else line.split() for line in found]


def flags_are_known(command: list[str]) -> None:
    assert command[0] == "serve"
    said = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "300", "NO_COLOR": "1"})
    assert said.exit_code == 0
    for flag in command[1:]:
        assert flag in said.output


def test_systemd_takes_the_unit() -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    done = subprocess.run([program, "verify", str(UNIT)], capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines() if "sqlguard" in line]
    assert ours == []


def test_the_unit_runs_commands_that_exist() -> None:
    text = UNIT.read_text(encoding="utf-8")
    for line in re.findall(r"^ExecStart(?:Pre)?=/usr/bin/env sqlguard (.*)$", text, re.MULTILINE):
        flags_are_known(line.split())
    grace = Settings.model_fields["shutdown_grace"].default
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert int(stop) > grace


def test_the_container_copies_what_is_there() -> None:
    for copied in words("COPY"):
        if not copied[0].startswith("--from"):
            for source in copied[:-1]:
                assert (ROOT / source).exists(), source
    locked = (ROOT / "requirements-runtime.lock").read_text(encoding="utf-8")
    assert "--hash=sha256:" in locked


def test_the_containers_settings_and_command_exist() -> None:
    given = dict(word.split("=", 1) for line in words("ENV") for word in line)
    for name in given:
        if name.startswith("SQLGUARD_"):
            assert name.removeprefix("SQLGUARD_").lower() in Settings.model_fields
    assert words("ENTRYPOINT") == [["sqlguard"]]
    flags_are_known(words("CMD")[-1])
    (port,) = words("EXPOSE")
    assert given["SQLGUARD_LISTEN"].endswith(f":{port[0]}")
    assert f"http://{given['SQLGUARD_METRICS_LISTEN']}/readyz" in CONTAINER
    assert words("USER") == [["65534:65534"]]
