"""What a proxy process holds of its tasks' rates of statements: one slice per task, for all of its sessions."""

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic

from sqlguard.budget import Grant, Slice
from sqlguard.errors import DatabaseUnavailable

Ask = Callable[[str, int, int], Awaitable[Grant]]
#: Tasks whose slices are held at the same time; of more, those that came first lose theirs and have to ask again.
_TASKS = 10_000
#: After a count that was not to be had, nobody asks for it again for so many seconds: whoever keeps it locked
#: must not keep the operator's threads busy.
_PAUSE = 1.0


class _Account:
    def __init__(self) -> None:
        self.slice = Slice()
        self.asking = asyncio.Lock()
        self.fault: DatabaseUnavailable | None = None
        self.ask_at = 0.0


class Rates:
    """One per process. *ask* asks the database for so many statements of a task, and for so many at most."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._accounts: dict[str, _Account] = {}

    def spend(self, task: str, statements: int) -> bool:
        """Count statements at once; False if `lease` has to. Raises CapExceeded while the rate is spent."""
        return self._account(task).slice.spend(statements, monotonic())

    async def lease(self, task: str, statements: int) -> None:
        """
        Count statements, of a slice that the database gives.

        Raises CapExceeded when the rate is spent; DatabaseUnavailable and TaskEnded: nothing may be sent then either.
        """
        account = self._account(task)
        async with (
            account.asking
        ):  # one question per task at a time, and most often it is the others' answer, too
            held, now = account.slice, monotonic()
            if held.spend(statements, now):
                return
            if account.fault is not None and now < account.ask_at:
                raise account.fault.with_traceback(None)
            try:
                grant = await self._ask(task, statements, held.asks(statements, now))
            except DatabaseUnavailable as fault:
                account.fault, account.ask_at = fault, monotonic() + _PAUSE
                raise
            account.fault = None
            held.take(grant, statements, now)

    def _account(self, task: str) -> _Account:
        found = self._accounts.get(task)
        if found is None:
            if len(self._accounts) >= _TASKS:
                del self._accounts[next(iter(self._accounts))]
            found = self._accounts[task] = _Account()
        return found
