"""
Install the built wheel into an empty environment and use it from an empty folder.

What it shows: the wheel carries its migrations and data files, its declared dependencies are enough, and
neither the checkout nor the development tools are needed. Run by `make package-test`, not by pytest.
"""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Runs inside the new environment.
USE = """
import subprocess, sys
from pathlib import Path

import psycopg
import sqlguard
from sqlguard.embedded import EmbeddedServer

assert Path(sqlguard.__file__).is_relative_to(sys.prefix), sqlguard.__file__
sqlguard_ = str(Path(sys.executable).with_name("sqlguard"))
with EmbeddedServer.start(settings={"fsync": "off"}) as server:
    for _ in ("first", "again"):
        subprocess.run([sqlguard_, "migrate", "--dsn", server.dsn()], check=True)
    with psycopg.connect(server.dsn()) as conn:
        tables = conn.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'sqlguard'").fetchone()
    assert tables is not None and tables[0] > 1, tables
    print(f"migrated PostgreSQL {server.version}: {tables[0]} tables")
"""


def main() -> int:
    wheels = sorted((ROOT / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        print("no wheel in dist; run `make wheel` first", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="sqlguard-smoke-") as name:
        folder = Path(name)
        # Closed to others on purpose: the server's account under root must get along with it.
        venv.create(folder / "venv", with_pip=True)
        (folder / "empty").mkdir()
        python = str(folder / "venv" / "bin" / "python")
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*pip, "--require-hashes", "-r", str(ROOT / "requirements-runtime.lock")], folder)
        run([*pip, "--no-deps", "--no-index", str(wheels[-1])], folder)
        run([python, "-m", "pip", "check"], folder)
        run([str(folder / "venv" / "bin" / "sqlguard"), "--help"], folder / "empty")
        run([python, "-W", "error", "-c", USE], folder / "empty")
        assert not any((folder / "empty").iterdir()), "files were left in the working folder"
    print(f"{wheels[-1].name}: ok")
    return 0


def run(command: list[str], where: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    subprocess.run(command, cwd=where, env=environment, stdin=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    sys.exit(main())
