"""
Where clients come from: read from the PROXY header where a load balancer sends one, and counted by address.

The address that is found here is the one that logs, limits and the journal know (`Side.address`). A header is
believed only from the networks that the operator has named; with `proxy_protocol = "required"` nobody else gets in
by TCP, with a header or without. Unix sockets have neither addresses nor headers.
"""

import asyncio
from collections.abc import Set as AbstractSet
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from sqlguard.errors import NotConfigured, ProtocolViolation
from sqlguard.proxy.sockets import Closed, Side
from sqlguard.settings import Settings
from sqlguard.wire.proxy_protocol import Preface, address_of


class Arrivals:
    """One per server; *present* are the connections of clients that there are."""

    def __init__(self, settings: Settings, present: AbstractSet[Side]) -> None:
        """Raises NotConfigured."""
        self._present = present
        self._most = settings.max_clients_per_address
        self._patience = settings.startup_timeout
        self._trusted = trusted_networks(settings)
        self._is_announced = settings.proxy_protocol == "required"

    async def meet(self, side: Side) -> None:
        """Learn who is on the other side of a new connection. Raises ProtocolViolation, Closed."""
        side.address = _peer(side)
        if self._is_announced and side.address is not None:
            side.address = await self._announced(side, side.address)
        if self.is_full(side.address, times=2):
            raise Closed  # a client is told only when it has said who it is; one that never does must go as well

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

    def is_full(self, address: str | None, times: int = 1) -> bool:
        """Say whether there are more clients from *address* than it may have, times *times*."""
        if not self._most or address is None:
            return False
        return sum(side.address == address for side in self._present) > times * self._most


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
