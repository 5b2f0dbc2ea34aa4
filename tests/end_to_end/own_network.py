"""Tests that run in a network of their own, where nobody else notices what becomes of it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest


def run_inside(mark: str, setting_up: Sequence[str], *chosen: str) -> str:
    """
    Run pytest with the words *chosen* behind the shell's words *setting_up* in a network of its own; return what it said.

    The environment variable *mark* tells them that they are there. Skips where the system has or allows no such thing.
    """
    unshare, ip = shutil.which("unshare"), shutil.which("ip")
    if unshare is None or ip is None or mark in os.environ:
        pytest.skip("there is no unshare and ip to make a network with")
    start = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *chosen]
    words = ["ip link set lo up", *setting_up, f"exec {' '.join(start)}"]
    done = subprocess.run(
        [unshare, "-n", "sh", "-c", " && ".join(words)],
        env={**os.environ, mark: "yes"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if "Operation not permitted" in done.stderr:
        pytest.skip("a network of its own is not allowed here")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout
