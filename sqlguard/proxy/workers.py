"""
Several worker processes behind one address.

The parent holds nothing but the janitor: it starts workers, starts one again that has died, passes signals on and
waits for their ends. The kernel shares clients out among them (SO_REUSEPORT). A worker whose parent has gone
ends too: its end of a pipe closes.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol

import structlog

log = structlog.get_logger()
#: A worker that dies at once, again and again, is not started more often than this many seconds apart.
_PAUSE = 1.0
_FAILED = 1
Work = Callable[[int], None]


class Sweeper(Protocol):
    """What `Janitor` is for the parent: a thread."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


def run(count: int, work: Work, janitor: Sweeper) -> None:
    """Run *work* in so many processes until SIGINT or SIGTERM. Must be called without threads."""
    Parent(count, work).run(janitor)


class Parent:
    def __init__(self, count: int, work: Work) -> None:
        self._work = work
        self._pids: dict[int, int] = {}
        self._count = count
        self._is_stopping = False
        self._alive, self._mine = os.pipe()

    def run(self, janitor: Sweeper) -> None:
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(name, self._pass_on)
        for number in range(self._count):
            self._start(number)
        # A thread, so after the forks; workers that are started again come from here all the same, and
        # touch nothing of the janitor's.
        janitor.start()
        try:
            while self._pids:
                self._wait()
        finally:
            janitor.stop()

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self._is_stopping = self._is_stopping or number != signal.SIGHUP
        for pid in list(self._pids):
            os.kill(pid, number)

    def _wait(self) -> None:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            self._pids.clear()
            return
        number = self._pids.pop(pid, None)
        if number is None or self._is_stopping:
            return
        log.error("worker ended", worker=number, status=os.waitstatus_to_exitcode(status))
        time.sleep(_PAUSE)
        if not self._is_stopping:
            self._start(number)

    def _start(self, number: int) -> None:
        pid = os.fork()
        if pid:
            self._pids[pid] = number
            return
        status = _FAILED
        try:
            os.close(self._mine)
            for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(name, signal.SIG_DFL)
            _end_with_parent(self._alive)
            self._work(number)
            status = 0
        except KeyboardInterrupt:
            status = 0
        except Exception:
            log.exception("worker failed", worker=number)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def _end_with_parent(pipe: int) -> None:
    """Send this process SIGTERM when the parent's end of the pipe is closed."""

    def watch() -> None:
        os.read(pipe, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="sqlguard-parent", daemon=True).start()
