"""What fuzzing sends, and how it is spoilt: logins of every kind, mutated anywhere."""

import random
import ssl
import struct
from contextlib import suppress

from end_to_end.certificates import trusting
from end_to_end.raw import Raw
from end_to_end.wired import Agent

from sqlguard.wire.messages import (
    CancelRequest,
    SASLInitialResponse,
    SASLResponse,
    SSLRequest,
    StartupMessage,
)

#: The server has let somebody in.
OPEN = b"R\0\0\0\x08\0\0\0\0"
#: What a client says that it will speak by TLS.
PROTOCOLS = (("postgresql",), ("postgresql",), ("h2",), ())


def startup(agent: Agent) -> bytes:
    pairs = (
        (b"user", agent.task.role.encode()),
        (b"database", agent.database.encode()),
        (b"options", b"-c geqo=off"),
    )
    return StartupMessage(3 << 16, pairs).encode()


def first_proof() -> bytes:
    return SASLInitialResponse(b"SCRAM-SHA-256", b"n,,n=,r=rOprNGfwEbeRWgbNEkqO").encode()


def last_proof() -> bytes:
    return SASLResponse(b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj,p=" + b"A" * 43 + b"=").encode()


def logins(agent: Agent) -> list[bytes]:
    """What a client begins with; none of it gets anybody in."""
    return [
        startup(agent),
        startup(agent) + first_proof(),
        startup(agent) + first_proof() + last_proof(),
        SSLRequest().encode() + startup(agent),
        CancelRequest(1234, b"\1\2\3\4").encode(),
        first_proof(),
    ]


def finish(client: Raw, limit: float = 10) -> bytes:
    """End our half and read all that comes; a proxy that neither answers nor closes fails the test."""
    client.socket.settimeout(limit)
    data = b""
    try:
        client.socket.shutdown(1)
        while chunk := client.socket.recv(65536):
            data += chunk
    except (ConnectionResetError, BrokenPipeError, OSError) as fault:
        if isinstance(fault, TimeoutError):
            raise
    client.close()
    return data


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Change, remove, insert, double or truncate a few bytes; lengths that lie are among it."""
    raw_bytes = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(raw_bytes)) if raw_bytes else 0
        match chance.randrange(6):
            case 0 if raw_bytes:
                raw_bytes[at] = chance.randrange(256)
            case 1:
                del raw_bytes[at : at + chance.randint(1, 8)]
            case 2:
                raw_bytes[at:at] = chance.randbytes(chance.randint(1, 8))
            case 3:
                raw_bytes[at:at] = raw_bytes[at : at + chance.randint(1, 40)]
            case 4:
                del raw_bytes[at:]
            case _:
                raw_bytes[at : at + 4] = struct.pack(
                    ">I", chance.choice([0, 3, 4, 5, 255, 2**31 - 1, 2**31, 2**32 - 1])
                )
    return bytes(raw_bytes)


def tls_login(agent: Agent, chance: random.Random, limit: float, header: bytes = b"") -> bytes:
    """
    Log in by TLS, asked for or from the first byte on, behind *header*; something of it is spoilt: the header, the
    handshake's first or second flight, what is said inside, or its records. Return the answer, as far as it can be read.
    """
    client = Raw(agent.host, agent.port, timeout=limit)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = trusting(*chance.choice(PROTOCOLS)).wrap_bio(incoming, outgoing)
    spoilt = chance.choice(("header", 0, 1, "inside", "records"))
    try:
        if chance.random() < 0.3:
            client.send(header, SSLRequest())
            header = b""
            if client.socket.recv(1) != b"S":
                return finish(client, limit)
        if spoilt == "header":
            header = mutated(header, chance)
        flight, done = 0, False
        while not done:
            with suppress(ssl.SSLWantReadError):
                tls.do_handshake()
                done = True
            sent = outgoing.read()
            if sent and flight == spoilt:
                client.send(header, mutated(sent, chance))
                return finish(client, limit)
            client.send(header, sent)
            header, flight = b"", flight + bool(sent)
            if not done:
                data = client.socket.recv(1 << 16)
                if not data:
                    break
                incoming.write(data)
        inside = chance.choice(logins(agent))
        tls.write(mutated(inside, chance) if spoilt == "inside" else inside)
        sent = outgoing.read()
        client.send(mutated(sent, chance) if spoilt == "records" else sent)
        incoming.write(finish(client, limit))
        return tls.read(1 << 16)
    except (ssl.SSLError, ConnectionResetError, BrokenPipeError):
        return b""  # refused, as it should
    finally:
        client.close()
