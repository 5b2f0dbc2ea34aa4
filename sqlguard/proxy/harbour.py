"""
The berths of all sessions: who gives its server connection back and when, and who waits for one.

With a bound on server connections a client that comes, or comes back, takes the place of the one that has been idle
the longest; if nobody can leave it waits, in order.
"""

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic

from sqlguard.errors import NotConfigured
from sqlguard.proxy.backend import Backend
from sqlguard.proxy.berth import Berth
from sqlguard.proxy.sockets import Side
from sqlguard.settings import Settings
from sqlguard.wire.messages import CancelRequest

#: Looks per delay: a session leaves after one to one and a quarter of it.
_LOOKS = 4
#: Seconds between looks for a place, and at who is active where nobody leaves because of time.
_TICK, _EVERY = 0.01, 4.0


class Harbour:
    """`open_sides` are all server connections, those that are still logging in too."""

    def __init__(self, open_sides: set[Side], delay: float, places: int) -> None:
        """With a *delay* of 0 nobody leaves because of time; with 0 *places* there is no bound."""
        self._open_sides = open_sides
        self._delay = delay
        self._places = places
        #: By the keys that the clients know.
        self._keys: dict[CancelRequest, Berth] = {}
        self._berths: dict[Berth, CancelRequest | None] = {}
        self._turn = asyncio.Lock()
        #: Logins under way: their connections may not be among the open ones yet.
        self._coming = 0
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._delay or self._places:
            self._watch = asyncio.get_running_loop().create_task(self._look_around())

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def add(self, berth: Berth) -> None:
        self._berths[berth] = berth.key
        if berth.key is not None:
            self._keys[berth.key] = berth

    def remove(self, berth: Berth) -> None:
        key = self._berths.pop(berth, None)
        if key is not None:
            self._keys.pop(key, None)

    @property
    def away(self) -> int:
        """Return how many sessions have no server connection."""
        return sum(not berth.is_moored for berth in self._berths)

    def find(self, request: CancelRequest) -> Berth | None:
        """Return the berth whose client was given the key *request*."""
        return self._keys.get(request)

    async def place(self, log_in: Callable[[], Awaitable[Backend]]) -> Backend:
        """Log in when there is room. Raises what *log_in* does."""
        if not self._places:
            return await log_in()
        async with self._turn:
            while len(self._open_sides) + self._coming >= self._places:
                self._send_one_away()
                await asyncio.sleep(_TICK)
            self._coming += 1
        try:
            return await log_in()
        finally:
            self._coming -= 1

    def _send_one_away(self) -> None:
        """Have the one leave that has been idle the longest, if one can."""
        longest = min((b for b in self._berths if b.may_leave), key=lambda b: b.active_at, default=None)
        if longest is not None:
            longest.leave()

    async def _look_around(self) -> None:
        while True:
            await asyncio.sleep((self._delay or _EVERY) / _LOOKS)
            now = monotonic()
            for berth in list(self._berths):
                if berth.was_active:
                    berth.was_active, berth.active_at = False, now
                elif self._delay and now - berth.active_at >= self._delay and berth.may_leave:
                    berth.leave()


def places(settings: Settings) -> int:
    """
    Return a worker's share of `max_backends`: none can send another's clients away, so none may wait for another.

    Raises NotConfigured.
    """
    if 0 < settings.max_backends < settings.workers:
        raise NotConfigured(
            f"{settings.max_backends} connections to PostgreSQL are too few for {settings.workers} workers",
            hint="raise max_backends, or take fewer workers",
        )
    return settings.max_backends // settings.workers
