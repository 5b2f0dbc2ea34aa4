"""
The parent process of an embedded server: ends the server as soon as whoever wanted it is gone.

The one idea: the pipe on standard input is the life line. When its other end closes, on purpose or because
our starter was killed, the server is shut down. As the server's own parent the keeper can't hit a foreign
process: the id stays reserved until the keeper has collected it.

Run as a script by path, with the standard library only, so that it starts in a few milliseconds.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from typing import Any

#: Fast shutdown, immediate shutdown, kill; and how many seconds each has.
STEPS = ((signal.SIGINT, 15), (signal.SIGQUIT, 5), (signal.SIGKILL, 5))


def main() -> int:
    order = json.loads(sys.argv[1])
    with open(order["log"], "ab") as log:  # noqa: PTH123 - pathlib costs milliseconds at every start
        server = subprocess.Popen(  # noqa: S603 - the server that we are here for
            order["command"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=order["cwd"],
            env=order["env"],
            umask=0o077,
            **order["account"],
        )
    signal.signal(signal.SIGTERM, lambda *_: server.send_signal(signal.SIGINT))
    released = threading.Event()
    threading.Thread(target=_end_when_released, args=(server, released), daemon=True).start()
    status = server.wait()
    # A server that fell by itself leaves its log to whoever is still there to read it.
    if released.is_set() and order["remove"]:
        shutil.rmtree(order["remove"], ignore_errors=True)
    return 0 if status == 0 else 1


def _end_when_released(server: "subprocess.Popen[Any]", released: threading.Event) -> None:
    while os.read(0, 1):  # not sys.stdin: its lock would be held when the main thread leaves
        pass
    released.set()
    for step, patience in STEPS:
        server.send_signal(step)
        try:
            server.wait(patience)
        except subprocess.TimeoutExpired:
            continue
        return


if __name__ == "__main__":
    sys.exit(main())
