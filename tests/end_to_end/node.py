"""Scripts for Node.js, run where `node_folder` has installed node-postgres."""

import subprocess
from pathlib import Path


def run_node(
    folder: Path, script: str, *arguments: str, given: str | None = None, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run *script* with *given* on its standard input; what it says on standard error is told when it fails."""
    (folder / "script.js").write_text(script, encoding="utf-8")
    done = subprocess.run(
        ["node", "script.js", *arguments],
        input=given,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done
