"""
The listening side: accepts clients, welcomes them, joins each with a PostgreSQL session of its own.

A client that speaks rubbish, stops half-way or sends a length of 2 GB costs itself its connection and nobody
else anything.
"""

import asyncio
import contextlib
import secrets
import socket
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

import structlog

from sqlguard import lease
from sqlguard import settings as configuration
from sqlguard.errors import DatabaseUnavailable, NotConfigured, SqlguardError, TaskEnded
from sqlguard.proxy import silence
from sqlguard.proxy.arrivals import Arrivals, rows
from sqlguard.proxy.backend import Address, Backend, LoginFailed, cancel, log_in
from sqlguard.proxy.berth import Berth
from sqlguard.proxy.census import Census
from sqlguard.proxy.detour import Detour
from sqlguard.proxy.harbour import Harbour, places
from sqlguard.proxy.joined import Timer, greeting
from sqlguard.proxy.metrics import Gauge
from sqlguard.proxy.operator import Operator
from sqlguard.proxy.relay import Relay
from sqlguard.proxy.replica import replica_of
from sqlguard.proxy.roaming import RoamingSession, detour_of
from sqlguard.proxy.session import AgentSession
from sqlguard.proxy.siblings import Siblings
from sqlguard.proxy.sightings import Sightings
from sqlguard.proxy.sockets import Closed, Side
from sqlguard.proxy.startup import ALPN, Cancel, Door, Welcome
from sqlguard.settings import Settings
from sqlguard.wire.channel_binding import end_point_hash
from sqlguard.wire.frontend import CancelRequest
from sqlguard.wire.reports import from_error

log = structlog.get_logger()
#: How often `stop` looks whether all connections are closed, and after how many times it cuts them off.
_TICK, _PATIENCE = 0.02, 100
_BACKLOG = 512


class Server:
    """One proxy: its socket, its sessions, its way to PostgreSQL."""

    def __init__(
        self,
        settings: Settings,
        operator: Operator,
        sightings: Sightings | None = None,
        siblings: tuple[Siblings, int] | None = None,
    ) -> None:
        """
        With *sightings* it observes: everything is passed on unchanged, and counted there.

        *siblings* are the workers of which this is one, and which.
        """
        assert settings.dsn is not None  # noqa: S101 (the composition root has looked)
        self._settings = settings
        self._operator = operator
        ca = str(settings.backend_tls_ca) if settings.backend_tls_ca else None
        self._address = Address.of(settings.dsn, settings.backend_tls, ca)
        self._clients: set[Side] = set()
        census, number = (
            (Census(1, rows(settings)), 0) if siblings is None else (siblings[0].census, siblings[1])
        )
        self._arrivals = Arrivals(settings, self._clients, census.part(number))
        tls, binding = self.tls_contexts(settings)
        self._door = Door(
            operator,
            operator.database,
            secrets.token_bytes(32),
            tls,
            tls_required=settings.tls_required,
            binding=binding,
            admit=self._arrivals.admit,
        )
        self._relay = None if sightings is None else self._relayed(operator, sightings, tls)
        self._replica = replica_of(settings, operator.metrics)
        self._harbour = Harbour(self._address.open_sides, settings.idle_release, places(settings))
        self._siblings = siblings
        self._live: set[AgentSession] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        self.is_stopping = False
        self._tell(operator.metrics.gauges)

    def _relayed(self, operator: Operator, sightings: Sightings, tls: ssl.SSLContext | None) -> Relay:
        limit, timeout = self._settings.max_message_bytes, self._settings.startup_timeout
        return Relay(self._address, operator, sightings, tls, limit=limit, timeout=timeout)

    def _tell(self, gauges: dict[str, Gauge]) -> None:
        gauges["sessions"] = ("clients with a session", None, lambda: {"": len(self._live)})
        gauges["sessions_away"] = (
            "sessions that have given their connection to PostgreSQL back",
            None,
            lambda: {"": self._harbour.away},
        )
        gauges["clients"] = ("connections of clients", None, lambda: {"": len(self._clients)})
        gauges["backends"] = (
            "connections to PostgreSQL for clients",
            None,
            lambda: {"": len(self._address.open_sides)},
        )

    @property
    def sessions(self) -> int:
        return len(self._live)

    @staticmethod
    def tls_contexts(settings: Settings) -> tuple[ssl.SSLContext | None, bytes | None]:
        """Return the context for clients and the hash that SCRAM binds to. Raises NotConfigured."""
        if settings.tls_cert is None and settings.tls_key is None:
            if settings.tls_required:
                raise NotConfigured(
                    "TLS is required, but there is no certificate", hint="give --tls-cert and --tls-key"
                )
            return None, None
        if settings.tls_cert is None or settings.tls_key is None:
            raise NotConfigured("a certificate needs its key", hint="give --tls-cert and --tls-key")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(settings.tls_cert, settings.tls_key)
            context.set_alpn_protocols([ALPN])
            return context, end_point_hash(Path(settings.tls_cert).read_text(encoding="ascii"))
        except (OSError, ValueError) as fault:
            raise NotConfigured(
                f"the certificate can't be used: {fault}", hint="check --tls-cert and --tls-key"
            ) from None

    async def start(self, unix_socket: socket.socket | None = None) -> None:
        """Listen, on *unix_socket* too. Raises NotConfigured when the address can't be used."""
        host, port = configuration.host_and_port(self._settings.listen)
        loop = asyncio.get_running_loop()
        try:
            # With several workers the kernel shares the clients out among them.
            shared = self._settings.workers > 1
            tcp = await loop.create_server(
                self._accept, host, port, backlog=_BACKLOG, reuse_port=shared or None
            )
            self._servers.append(tcp)
        except OSError as fault:
            raise NotConfigured(
                f"can't listen on {self._settings.listen}: {fault.strerror or fault}",
                hint="is another sqlguard running there? choose another address with --listen",
            ) from None
        if unix_socket is not None:
            self._servers.append(
                await loop.create_unix_server(self._accept, sock=unix_socket, backlog=_BACKLOG)
            )
        self._harbour.start()
        self._spawn(silence.watch(*self._sides()))
        if self._replica is not None:
            self._replica.start()
        if self._siblings is not None:
            everyone, mine = self._siblings
            everyone.listen(mine, lambda asked: self._spawn(self._heard(asked)))
        log.info("listening", address=self._settings.listen, database=self._address.dbname)

    def reload(self) -> None:
        """Read the certificates again, for clients that come from now on; what can't be used changes nothing."""
        try:
            tls, binding = self.tls_contexts(self._settings)
        except NotConfigured as fault:
            log.warning("certificates not read again", error=fault.message)
            return
        self._door = replace(self._door, tls=tls, binding=binding)
        if self._relay is not None:
            self._relay.tls = tls
        self._address.__dict__.pop("context", None)
        log.info("certificates read again")

    async def stop(self, grace: float = 0.0) -> None:
        """
        Take no new clients, tell those that are there, close.

        Sessions that are at work, or in a transaction, get *grace* seconds to come to its end.
        """
        self.is_stopping = True
        self._harbour.stop()
        for server in self._servers:
            server.close()
        going = SqlguardError("the proxy is shutting down", hint="connect again")
        going.sqlstate = "57P01"
        until = asyncio.get_running_loop().time() + grace
        while True:
            is_over = asyncio.get_running_loop().time() >= until
            for session in list(self._live):
                if is_over or session.is_idle:
                    session.fatal(going)
            if is_over or not self._live:
                break
            await asyncio.sleep(_TICK)
        for side in list(self._clients):
            side.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._replica is not None:
            await self._replica.stop()
        await self._all_closed()

    def _sides(self) -> list[set[Side]]:
        """Return the clients' connections, those to PostgreSQL and those to the replica, as they come and go."""
        there = [] if self._replica is None else [self._replica.address.open_sides]
        return [self._clients, self._address.open_sides, *there]

    async def _all_closed(self) -> None:
        """Wait a moment until what is unsent has gone out, then cut off."""
        sides = self._sides()
        for attempt in range(2 * _PATIENCE):
            if not any(sides):
                return
            if attempt == _PATIENCE:
                for side in chain(*map(list, sides)):
                    side.abort()
            await asyncio.sleep(_TICK)

    def _accept(self) -> Side:
        return _ClientSide(self, self._clients, self._arrivals.gone)

    def greet(self, side: Side) -> None:
        """Begin with a client whose connection is there."""
        self._spawn(self._serve(side))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, side: Side) -> None:
        """Welcome a client; whatever is wrong with it ends here."""
        metrics, began = self._operator.metrics, perf_counter()
        try:
            # A client is told only when it has said who it is; those that never do must not fill the proxy.
            if len(self._clients) < rows(self._settings) and not self.is_stopping:
                await self._arrivals.meet(side)
                await self._welcome(side)
                metrics.logins["ok"] += 1
                metrics.login.observe(perf_counter() - began)
                return
        except Cancel as asked:
            if self._siblings is not None:
                self._siblings[0].tell(self._siblings[1], asked.request)
            await self._cancel(asked.request)
        except LoginFailed as fault:
            metrics.logins["refused by PostgreSQL"] += 1
            side.write(fault.response)
        except SqlguardError as fault:
            metrics.logins["refused"] += 1
            log.info("client refused", error=fault.message, sqlstate=fault.sqlstate, client_addr=side.address)
            side.write(from_error(fault, severity="FATAL"))
        except (Closed, OSError):
            pass
        except Exception:
            log.exception("client failed", client_addr=side.address)
        side.close()

    async def _welcome(self, side: Side) -> None:
        """Lead a client into its session. Raises what `_serve` knows."""
        if self._relay is not None:
            await self._relay.serve(side)
            return
        welcome: Welcome | None = None
        try:
            async with asyncio.timeout(self._settings.startup_timeout):
                welcome = await self._door.welcome(side)
                self._arrivals.stay(side)
                backend = await self._log_in(welcome)
        except TimeoutError:
            if welcome is None:
                raise Closed from None  # a client that takes its time is told nothing, as by PostgreSQL
            raise DatabaseUnavailable("PostgreSQL did not answer the login in time") from None
        self._join(side, welcome, backend)

    async def _log_in(self, welcome: Welcome) -> Backend:
        backend = await self._harbour.place(
            lambda: log_in(self._address, _parameters(welcome), welcome.protocol, welcome.keys)
        )
        self._spawn(self._operator.joined(welcome.login.role, backend.pid))
        return backend

    async def _log_in_again(self, welcome: Welcome) -> Backend:
        """Get another server connection for a session. Raises TaskEnded, LoginFailed, DatabaseUnavailable."""
        login = await self._operator.login(welcome.login.role)
        if login is None or not login.task.alive(datetime.now(UTC)):
            raise TaskEnded("the task has ended")
        return await self._log_in(welcome)

    def _join(self, side: Side, welcome: Welcome, backend: Backend) -> None:
        session = self._session(side, welcome, backend)
        side.write(greeting(welcome, backend, session))
        for setting in welcome.request.settings:
            session.memory.start_with(setting.name.decode(), setting.value.decode("utf-8", "replace"))
        self._live.add(session)
        log.debug("client let in", role=welcome.login.role, client_addr=side.address)
        timer = Timer(session, self._operator)
        berths: list[Berth] = []

        def lost() -> None:
            timer.cancel()
            self._live.discard(session)
            for berth in berths:
                self._harbour.remove(berth)
            session.close()

        berth = Berth(
            session, side, backend, log_in=lambda: self._log_in_again(welcome), lost=lost, first=welcome.first
        )
        session.budgets.cancel = lambda: self._stop(berth)
        if not session.is_closed:
            berths.append(berth)
            self._harbour.add(berth)

    def _session(self, side: Side, welcome: Welcome, backend: Backend) -> AgentSession:
        reads, limit = welcome.login.policy.defaults.reads, self._settings.max_message_bytes
        who = side, backend.side, welcome.login, self._operator
        replica = self._replica if reads.replica else None
        if replica is None:
            return AgentSession(*who, server_pid=backend.pid, max_message_bytes=limit)
        session = RoamingSession(*who, server_pid=backend.pid, max_message_bytes=limit)
        at, given = replica.address, _parameters(welcome)
        detour = Detour(
            session,
            replica,
            lambda: log_in(at, (*given, *session.meaning), welcome.protocol, welcome.keys),
        )
        session.roam(replica, detour)
        return session

    async def _cancel(self, request: CancelRequest) -> None:
        """Pass a CancelRequest on to where its session is now."""
        berth = self._harbour.find(request)
        if berth is None:
            await self._pass_on(request)
        else:
            await self._stop(berth)

    async def _heard(self, request: CancelRequest) -> None:
        """Do the same with one that a sibling was asked; it has passed it on as it is, which may be enough."""
        berth = self._harbour.find(request)
        if berth is not None and (berth.key != request or detour_of(berth.session) is not None):
            await self._stop(berth)

    async def _stop(self, berth: Berth) -> None:
        """Cancel what is done for a session; one that is nowhere has nothing to cancel."""
        detour = detour_of(berth.session)
        if detour is not None:
            await detour.cancel()
        elif berth.key is not None:
            await self._pass_on(berth.key)

    async def _pass_on(self, request: CancelRequest) -> None:
        with contextlib.suppress(SqlguardError):
            await cancel(self._address, request)


class _ClientSide(Side):
    def __init__(self, server: Server, open_sides: set[Side], gone: Callable[[Side], None]) -> None:
        super().__init__(open_sides)
        self._server: Server | None = server
        self._tell_gone = gone

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        server, self._server = self._server, None
        if server is not None:  # only the first time: TLS makes it again
            server.greet(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._tell_gone(self)


def _parameters(welcome: Welcome) -> tuple[tuple[bytes, bytes], ...]:
    """Return what a session's server connection starts with."""
    request = welcome.request
    return (
        (b"user", request.user),
        (b"database", request.database),
        *request.parameters,
        # Start-up parameters are also what RESET and DISCARD ALL go back to, whatever the role or the database has set.
        (b"default_transaction_read_only", b"on"),
        *((name.encode(), value.encode()) for name, value in lease.MEANING),
        (b"search_path", lease.path_text(welcome.login.policy.defaults.search_path).encode()),
    )
