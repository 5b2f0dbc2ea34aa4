"""
The start of a client connection: leads `wire.startup` through TLS and SCRAM on a real socket, and asks the
control plane who the user is. Afterwards it is known which task's login the client is, and the keys with which
the proxy logs in to PostgreSQL.
"""

import secrets
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from sqlguard.errors import ProtocolViolation, Refused, SqlguardError, TaskEnded
from sqlguard.postgres.control import Login
from sqlguard.proxy.encoding import codec
from sqlguard.proxy.operator import Operator
from sqlguard.proxy.sockets import Closed, Side
from sqlguard.wire import startup as wire
from sqlguard.wire.messages import PROTOCOL_3_0, PROTOCOL_3_2, CancelRequest
from sqlguard.wire.parameters import Request
from sqlguard.wire.scram import Keys, Verifier

#: PostgreSQL learned protocol 3.2 with 18; what the client speaks, the proxy speaks with PostgreSQL.
_KNOWS_3_2 = 180000
#: Annotations and dry runs may be set from the first statement on.
_OWN_SETTINGS = frozenset(
    {
        b"sqlguard.dry_run",
        b"sqlguard.reason",
        b"sqlguard.confidence",
        b"sqlguard.step",
        b"sqlguard.idempotency_key",
    }
)
_NONCE_BYTES = 18
#: How TLS calls PostgreSQL's protocol.
ALPN = "postgresql"


class Cancel(Exception):
    """The connection was a CancelRequest, to be passed on."""

    def __init__(self, request: CancelRequest) -> None:
        super().__init__()
        self.request = request


class InvalidPassword(SqlguardError):
    sqlstate = "28P01"
    default_hint = "use the dsn that `sqlguard task open` printed"


@dataclass(frozen=True, slots=True)
class Welcome:
    """Who the client is and how it wants to be served; `answer` is still to be sent, when all is well."""

    login: Login
    request: Request
    protocol: int
    keys: Keys
    answer: bytes
    #: What the client has sent behind its proof.
    first: bytes


@dataclass(frozen=True)
class Door:
    """What every client is welcomed with. `mock` makes the verifiers of users that don't exist."""

    operator: Operator
    database: str
    mock: bytes
    tls: ssl.SSLContext | None = None
    tls_required: bool = False
    #: tls-server-end-point hash of the proxy's certificate.
    binding: bytes | None = None
    #: Raises TooManyClients when the client can't stay.
    admit: Callable[[Side], None] = lambda _: None

    async def welcome(self, side: Side) -> Welcome:
        """Lead a client to the point where PostgreSQL can be asked. Raises Cancel, SqlguardError, Closed."""
        newest = PROTOCOL_3_2 if self.operator.catalog.server_version >= _KNOWS_3_2 else PROTOCOL_3_0
        await direct_tls(side, self.tls)
        startup = wire.Startup(can_tls=self.tls is not None, newest=newest, is_encrypted=side.secure)
        asked: wire.StartupAsked | None = None
        login: Login | None = None
        while True:
            for event in startup.receive(await side.some()):
                match event:
                    case wire.Answer(data):
                        side.write(data)
                    case wire.TlsBegins(data):
                        await self._start_tls(side, data)
                        startup.tls_started()
                    case wire.CancelAsked(pid, key):
                        raise Cancel(CancelRequest(pid, key))
                    case wire.StartupAsked():
                        asked = event
                        self._check(side, event.request)
                        login = await self.operator.login(event.request.user.decode("utf-8", "replace"))
                        nonce = secrets.token_urlsafe(_NONCE_BYTES)
                        side.write(startup.challenge(self._verifier(login, asked), nonce, self.binding))
                    case wire.ProofAccepted(keys, data):
                        assert asked is not None  # noqa: S101 (the table has no other way here)
                        found = replace(_living(login), client_addr=side.address)
                        return Welcome(found, asked.request, asked.protocol, keys, data, startup.rest)
                    case wire.ProofRefused(user):
                        if login is not None:
                            # Whoever knows such a name was given it; the verifier goes with the task.
                            _living(login)
                        name = user.decode("utf-8", "replace")
                        raise InvalidPassword(f'password authentication failed for user "{name}"')

    def _check(self, side: Side, request: Request) -> None:
        """Refuse what a task may not bring along. Raises Refused, NotUnderstood, TooManyClients."""
        self.admit(side)
        if self.tls_required and not side.secure:
            raise Refused("this proxy accepts TLS only", hint="connect with sslmode=require")
        if request.database.decode("utf-8", "replace") != self.database:
            raise Refused(
                f"this proxy serves the database `{self.database}`",
                hint="use the dsn that `sqlguard task open` printed",
            )
        for setting in request.settings:
            if setting.name == b"client_encoding":
                codec(setting.value.decode("ascii", "replace"))  # one that can't be judged is refused
        for setting in request.doubtful:
            if setting.name not in _OWN_SETTINGS:
                name = setting.name.decode("utf-8", "replace")
                raise Refused(f"the setting `{name}` can't be brought along", hint="leave it out")

    def _verifier(self, login: Login | None, asked: wire.StartupAsked) -> Verifier:
        if login is not None and login.verifier is not None:
            return Verifier.parse(login.verifier)
        return Verifier.mock(self.mock, asked.request.user)

    async def _start_tls(self, side: Side, answer: bytes) -> None:
        if self.tls is None:
            raise ProtocolViolation("TLS is not offered here")
        await side.start_tls(self.tls, answer)


async def direct_tls(side: Side, tls: ssl.SSLContext | None) -> None:
    """
    Do the handshake with a client that begins with it (sslnegotiation=direct). Raises Closed.

    As with PostgreSQL it has to say what it is about to speak: then no other protocol's client can be led here.
    """
    if tls is None or not await side.begins_with_tls():
        return
    await side.start_tls(tls, b"")
    if side.alpn != ALPN:
        raise Closed


def _living(login: Login | None) -> Login:
    """
    Raises TaskEnded. Called before the proof is answered: an ended credential tells nothing, and PostgreSQL's
    own VALID UNTIL is no help if the verifier is checked elsewhere (PgBouncer's CVE-2025-2291).
    """
    now = datetime.now(UTC)
    if (
        login is None
        or not login.task.alive(now)
        or login.lease_state != "live"
        or now >= login.lease_expires_at
    ):
        raise TaskEnded("the task of this login has ended")
    return login
