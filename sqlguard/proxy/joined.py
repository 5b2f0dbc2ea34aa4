"""A client that has been let in: what it is greeted with, and what ends its session with its task."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime

from sqlguard.errors import SqlguardError, TaskEnded
from sqlguard.proxy.backend import Backend
from sqlguard.proxy.operator import Operator
from sqlguard.proxy.session import AgentSession
from sqlguard.proxy.startup import Welcome
from sqlguard.wire.messages import AuthenticationOk, ParameterStatus, ReadyForQuery

#: Tells the Python door that this connection is guarded already.
MARK = ParameterStatus(b"sqlguard_proxy", b"on").encode()
_READ_ONLY = b"default_transaction_read_only"


def greeting(welcome: Welcome, backend: Backend, session: AgentSession) -> bytes:
    """Return what a client gets between its proof and its first statement."""
    return (
        welcome.answer
        + AuthenticationOk().encode()
        + _statuses(session, backend.statuses)
        + MARK
        + b"".join(backend.notices)
        + backend.key_data
        + ReadyForQuery(b"I").encode()
    )


def _statuses(session: AgentSession, statuses: list[bytes]) -> bytes:
    """
    Take the parameters that the server reported at the login; return them as the client gets them.

    `default_transaction_read_only` is how the proxy works, not what the client may do: drivers that look
    for a writable server must not turn away.
    """
    for status in statuses:
        session.books.feed(status)
    ours, theirs = (ParameterStatus(_READ_ONLY, value).encode() for value in (b"on", b"off"))
    return b"".join([theirs if status == ours else status for status in statuses])


class Timer:
    """Ends a session with its task: PostgreSQL looks at VALID UNTIL only at the login."""

    def __init__(self, session: AgentSession, operator: Operator) -> None:
        self._session = session
        self._operator = operator
        self._task = asyncio.get_running_loop().create_task(self._run())

    def cancel(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        until = self._session.login.lease_expires_at
        while True:
            await asyncio.sleep(max((until - datetime.now(UTC)).total_seconds(), 0.05))
            try:
                login = await self._operator.login(self._session.login.role)
            except SqlguardError:
                login = None
            if login is None or not login.task.alive(datetime.now(UTC)):
                self._session.fatal(TaskEnded("the task has ended"))
                return
            until = login.lease_expires_at  # it was renewed
            self._session.login = replace(login, client_addr=self._session.login.client_addr)
