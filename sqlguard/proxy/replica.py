"""
The replica as a proxy process sees it: whether a task's read may go there now, and who has a connection to it.

Three things have to hold. It answers. It has all that the primary had committed `replica_max_lag` seconds ago. And it
has what the task itself has written through this process: everything that was acknowledged up to the moment when the
last answer to something else than a plain read came in.
"""

import asyncio
from collections import Counter
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from sqlguard.errors import SqlguardError
from sqlguard.postgres.control import Login
from sqlguard.postgres.replica import Follower
from sqlguard.proxy.backend import Address, cancel
from sqlguard.proxy.harbour import places
from sqlguard.proxy.metrics import Metrics
from sqlguard.settings import Settings
from sqlguard.wire.messages import CancelRequest

if TYPE_CHECKING:
    from sqlguard.proxy.detour import Detour

#: Tasks of which it is known when they wrote; of more, those go that the replica has caught up with.
_TASKS = 10_000
_NEVER = float("-inf")
#: Texts that failed at the replica, and for how many seconds they are not tried there again.
_TEXTS, _AVOIDED = 1024, 60.0
#: Seconds between looks at idle connections, and at a replica that says nothing.
_TICK = 0.25
#: Seconds without an answer after which what is under way is taken back to the primary, at least.
_SILENCE = 3.0


class Replica:
    """One per process."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        assert settings.replica is not None  # noqa: S101 (`replica_of` has looked)
        assert settings.dsn is not None  # noqa: S101 (the composition root has looked)
        ca = str(settings.backend_tls_ca) if settings.backend_tls_ca else None
        self.address = Address.of(settings.replica, settings.backend_tls, ca)
        self.follower = Follower(settings.dsn, settings.replica, settings.replica_max_lag)
        self.max_message_bytes = settings.max_message_bytes
        self._max_lag = settings.replica_max_lag
        self._places, self._delay = places(settings), settings.idle_release
        #: Those that have a connection, or are getting one.
        self.detours: set[Detour] = set()
        self._wrote: dict[str, float] = {}
        self._avoided: dict[str, float] = {}
        self._cancels: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        #: Reads of policies that allow a replica, by where they went and why.
        self.reads: Counter[str] = Counter()
        metrics.counters["replica_reads"] = (
            "messages of tasks that may read at the replica, by where they went or why not there",
            "way",
            lambda: self.reads,
        )
        metrics.gauges["replica_backends"] = (
            "connections to the replica for clients",
            None,
            lambda: {"": len(self.address.open_sides)},
        )
        metrics.gauges["replica_lag_seconds"] = (
            "how far the replica is behind at most",
            None,
            lambda: {"": monotonic() - self.follower.settled.as_of},
        )

    def start(self) -> None:
        self.follower.start()
        self._watch = asyncio.get_running_loop().create_task(self._look_around())

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.gather(*self._cancels, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(None, self.follower.stop)

    # --- whether to go there

    def objection(self, login: Login) -> str | None:
        """Return why a read of *login* can't go there now, None if it can."""
        follower, now = self.follower, monotonic()
        follower.wanted_at = now
        if not follower.is_there:
            return "gone"
        if now - follower.settled.as_of > self._max_lag:
            return "lagging"
        if follower.acknowledged.as_of <= max(
            self._wrote.get(w, _NEVER) for w in (login.task.id, login.role)
        ):
            return "own writes"
        return None

    def wrote(self, who: str) -> None:
        """What *who*, a task or a role, reads from now on must have all that is committed by now."""
        if len(self._wrote) >= _TASKS:
            there = self.follower.acknowledged.as_of
            self._wrote = {name: at for name, at in self._wrote.items() if at >= there}
        self._wrote[who] = monotonic()

    def joined(self, role: str) -> None:
        """*role* and its lease must be there before it can log in."""
        if role not in self._wrote:
            self.wrote(role)

    def avoid(self, text: str) -> None:
        """Have *text*, which has failed there, run at the primary for a while."""
        if len(self._avoided) >= _TEXTS:
            self._avoided.clear()
        self._avoided[text] = monotonic() + _AVOIDED

    def avoids(self, text: str) -> bool:
        return bool(self._avoided) and self._avoided.get(text, 0.0) > monotonic()

    # --- connections

    def has_room(self) -> bool:
        """Say whether one more connection may be opened; if not, one that is idle is closed for the next who asks."""
        if not self._places or max(len(self.detours), len(self.address.open_sides)) < self._places:
            return True
        longest = min((d for d in self.detours if d.may_leave), key=lambda d: d.used_at, default=None)
        if longest is not None:
            longest.leave()
        return False

    def cancel(self, key: CancelRequest) -> None:
        """Have what runs there for *key* stopped; nobody waits for it."""
        made = asyncio.get_running_loop().create_task(self.pass_on(key))
        self._cancels.add(made)
        made.add_done_callback(self._cancels.discard)

    async def pass_on(self, key: CancelRequest) -> None:
        with suppress(SqlguardError):
            await cancel(self.address, key)

    async def _look_around(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            now = monotonic()
            is_silent = now - self.follower.answered_at > max(self._max_lag, _SILENCE)
            for detour in list(self.detours):
                if is_silent:
                    detour.is_silent()
                is_idle = self._delay and now - detour.used_at >= self._delay
                if detour.may_leave and (is_idle or not self.follower.is_there):
                    detour.leave()


def replica_of(settings: Settings, metrics: Metrics) -> Replica | None:
    """Return the replica that *settings* name. Raises NotConfigured, BadAddress."""
    return None if settings.replica is None or settings.observe else Replica(settings, metrics)
