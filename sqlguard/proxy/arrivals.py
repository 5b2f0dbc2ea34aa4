"""
Where clients come from: read from the PROXY header where a load balancer sends one, and counted by address.

The address that is found here is the one that logs, limits and the journal know (`Side.address`). Limits hold over
all workers (`census`). A header is
believed only from the networks that the operator has named; with `proxy_protocol = "required"` nobody else gets in
by TCP, with a header or without. Unix sockets have neither addresses nor headers.
"""

import asyncio
from collections.abc import Set as AbstractSet
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from sqlguard.errors import NotConfigured, ProtocolViolation, SqlguardError
from sqlguard.proxy.census import Part
from sqlguard.proxy.sockets import Closed, Side
from sqlguard.settings import Settings
from sqlguard.wire.proxy_protocol import Preface, address_of

_TOO_MANY = "the proxy has as many clients as it takes"


class TooManyClients(SqlguardError):
    sqlstate = "53300"
    default_hint = "try again later, or raise max_clients"


class Arrivals:
    """One per server; *present* are the clients' connections that there are, *part* is this worker's of the census."""

    def __init__(self, settings: Settings, present: AbstractSet[Side], part: Part) -> None:
        """Raises NotConfigured."""
        self._present = present
        self._part = part
        self._rows: dict[Side, int] = {}
        self._staying: set[Side] = set()
        self._most = settings.max_clients
        self._most_from_one = settings.max_clients_per_address
        self._patience = settings.startup_timeout
        self._trusted = trusted_networks(settings)
        self._is_announced = settings.proxy_protocol == "required"

    async def meet(self, side: Side) -> None:
        """Learn who is on the other side of a new connection. Raises ProtocolViolation, Closed."""
        side.address = _peer(side)
        if self._is_announced and side.address is not None:
            side.address = await self._announced(side, side.address)
        if not self._most_from_one or side.address is None:
            return
        self._require(side)
        row = self._part.enter(side.address)
        if row is not None:
            self._rows[side] = row
        if row is None or self._is_crowded(side.address, times=2):
            raise Closed  # a client is told only when it has said who it is; one that never does must go as well

    def admit(self, side: Side) -> None:
        """Raises TooManyClients when one more can't stay: told before it has to prove who it is."""
        if self._part.everyone.sessions() >= self._most:
            raise TooManyClients(_TOO_MANY)
        if side.address is not None and self._is_crowded(side.address):
            raise TooManyClients(
                f"there are as many clients from {side.address} as the proxy takes",
                hint="close some of them, or raise max_clients_per_address",
            )

    def stay(self, side: Side) -> None:
        """Count one that has proved who it is until it goes. Raises TooManyClients when others were faster, Closed."""
        self._require(side)
        self._part.session(1)
        self._staying.add(side)
        if self._part.everyone.sessions() > self._most:
            self.gone(side)
            raise TooManyClients(_TOO_MANY)

    def gone(self, side: Side) -> None:
        """Count one no more. Safe to repeat."""
        row = self._rows.pop(side, None)
        if row is not None:
            self._part.leave(row)
        if side in self._staying:
            self._staying.discard(side)
            self._part.session(-1)

    async def _announced(self, side: Side, sender: str) -> str:
        """Return the address that *sender* has written in front of the client's bytes."""
        if not any(ip_address(sender) in network for network in self._trusted):
            raise ProtocolViolation(
                "no PROXY protocol header is taken from there",
                hint="name the load balancer in `proxy_protocol_from`, and connect through it",
            )
        preface = Preface()
        try:
            async with asyncio.timeout(self._patience):
                while (origin := preface.receive(await side.some())) is None:
                    pass
        except TimeoutError:
            raise ProtocolViolation("the PROXY protocol header did not come in time") from None
        side.give_back(preface.rest)
        return origin.address or sender

    def _require(self, side: Side) -> None:
        if side not in self._present:
            raise Closed  # it would be counted for ever: that it has gone was told already

    def _is_crowded(self, address: str, times: int = 1) -> bool:
        """Say whether there are more clients from *address* than it may have, times *times*."""
        most = times * self._most_from_one
        return bool(most) and self._part.everyone.clients(address) > most


def rows(settings: Settings) -> int:
    """Return how many clients one worker may have at once, those included that have not said who they are."""
    return 2 * settings.max_clients + 1


def trusted_networks(settings: Settings) -> tuple[IPv4Network | IPv6Network, ...]:
    """Return the networks that PROXY headers are taken from. Raises NotConfigured."""
    try:
        found = tuple(ip_network(text) for text in settings.proxy_protocol_from)
    except ValueError as fault:
        raise NotConfigured(
            f"`proxy_protocol_from` can't be used: {fault}", hint='write `["10.0.0.0/24", "10.0.1.7"]`'
        ) from None
    if settings.proxy_protocol == "required" and not found:
        raise NotConfigured(
            "the PROXY protocol is required, but it is not said from whom it is taken",
            hint="name the load balancer's network with `proxy_protocol_from`",
        )
    return found


def _peer(side: Side) -> str | None:
    """Return the address at the other end of the socket, None for a Unix socket."""
    name = side.peer
    # Link-local addresses have a zone behind a `%` that is no part of them.
    return address_of(str(name[0]).partition("%")[0]) if isinstance(name, tuple) else None
