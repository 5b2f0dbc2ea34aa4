"""Commands on a terminal, as a person has them: questions, colours and progress bars depend on it."""

import os
import pty
import select
import subprocess
import sys


def on_terminal(*words: str, dsn: str, answer: str = "") -> tuple[int, str]:
    """Run `sqlguard` with *words* on a pseudo-terminal and type *answer*; return its status and all it showed."""
    main, side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "sqlguard", *words],
        env={**os.environ, "SQLGUARD_DSN": dsn, "TERM": "xterm"},
        stdin=side,
        stdout=side,
        stderr=side,
        close_fds=True,
    )
    os.close(side)
    os.write(main, answer.encode())
    said = b""
    while process.poll() is None or select.select([main], [], [], 0.1)[0]:
        try:
            if select.select([main], [], [], 0.2)[0]:
                said += os.read(main, 65536)
        except OSError:
            break
    process.wait(timeout=60)
    os.close(main)
    return process.returncode, said.decode(errors="replace")
