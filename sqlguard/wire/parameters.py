"""
What a StartupMessage asks for: who, where, and which settings, those inside `options` included.

The one idea: settings that are known to be harmless are listed, every other one is reported, also when it hides
in a command-line switch. PostgreSQL's own reading (ProcessStartupPacket, pg_split_opts,
process_postgres_switches) is followed where it decides what a setting is called.
"""

from dataclasses import dataclass

from sqlguard.errors import ProtocolViolation
from sqlguard.wire.messages import StartupMessage

#: Change how a client sees results, or who it says it is; none reaches data, rights or limits.
HARMLESS = frozenset(
    {
        b"application_name",
        b"bytea_output",
        b"client_encoding",
        b"client_min_messages",
        b"datestyle",
        b"extra_float_digits",
        b"geqo",
        b"intervalstyle",
        b"jit",
        b"timezone",
    }
)
_PROTOCOL_OPTION = b"_pq_."
#: What PostgreSQL reads as a false boolean: any unique beginning of the words too (parse_bool).
_FALSE = frozenset({b"false"[:size] for size in range(1, 6)} | {b"no", b"n", b"off", b"of", b"0"})
_BLANKS, _BACKSLASH = b" \t\n\v\f\r", ord("\\")


@dataclass(frozen=True, slots=True)
class Setting:
    """*name* in lower case; a switch that sets nothing by name has the switch as its name."""

    name: bytes
    value: bytes
    is_option: bool = False

    @property
    def is_harmless(self) -> bool:
        return self.name in HARMLESS


@dataclass(frozen=True, slots=True)
class Request:
    """A StartupMessage, read."""

    #: As asked for; `startup` says which one is spoken.
    protocol: int
    user: bytes
    #: The user's name where none was given, as in PostgreSQL.
    database: bytes
    #: Everything but user, database, replication and protocol options, as it came, in order.
    parameters: tuple[tuple[bytes, bytes], ...]
    settings: tuple[Setting, ...]
    #: Names that begin with `_pq_.`: extensions of the protocol, of which none is known here.
    protocol_options: tuple[bytes, ...]
    is_replication: bool

    @property
    def doubtful(self) -> tuple[Setting, ...]:
        """Return the settings that are not known to be harmless: `role`, `search_path`, and all others."""
        return tuple([setting for setting in self.settings if not setting.is_harmless])


def read_request(startup: StartupMessage) -> Request:
    """Read a StartupMessage. Raises ProtocolViolation if it names no user."""
    named = dict(startup.parameters)  # PostgreSQL takes the last of two with the same name
    user = named.get(b"user", b"")
    if not user:
        raise ProtocolViolation("no PostgreSQL user name specified in startup packet")
    kept = [
        (name, value)
        for name, value in startup.parameters
        if name not in (b"user", b"database", b"replication") and not name.startswith(_PROTOCOL_OPTION)
    ]
    # In PostgreSQL's order (process_startup_options): where both set the same, the last one counts.
    settings = read_options(named.get(b"options", b""))
    settings += [Setting(_lower(name), value) for name, value in kept if name != b"options"]
    return Request(
        protocol=startup.protocol,
        user=user,
        database=named.get(b"database") or user,
        parameters=tuple(kept),
        settings=tuple(settings),
        protocol_options=tuple(dict.fromkeys(name for name, _ in startup.parameters if _is_protocol(name))),
        is_replication=_lower(named.get(b"replication", b"0")) not in _FALSE,
    )


def _is_protocol(name: bytes) -> bool:
    return name.startswith(_PROTOCOL_OPTION)


def read_options(options: bytes) -> list[Setting]:
    """Read the command-line switches of `options`; a switch of another form comes under its own name."""
    settings = []
    words = iter(split_options(options))
    for word in words:
        if word == b"-c":
            settings.append(_assignment(next(words, b"")))
        elif word.startswith((b"-c", b"--")):
            settings.append(_assignment(word[2:]))
        else:
            settings.append(Setting(word, b"", is_option=True))
    return settings


def _assignment(text: bytes) -> Setting:
    name, _, value = text.partition(b"=")
    # PostgreSQL takes a dash for an underscore here (ParseLongOption).
    return Setting(_lower(name.replace(b"-", b"_")), value, is_option=True)


def split_options(options: bytes) -> list[bytes]:
    """Split at blanks; a backslash keeps the byte behind it (pg_split_opts)."""
    words: list[bytes] = []
    word = bytearray()
    is_inside = is_kept = False
    for byte in options:
        if is_kept or (byte not in _BLANKS and byte != _BACKSLASH):
            word.append(byte)
            is_inside, is_kept = True, False
        elif byte == _BACKSLASH:
            is_inside = is_kept = True
        elif is_inside:
            words.append(bytes(word))
            word.clear()
            is_inside = False
    if is_inside:
        words.append(bytes(word))
    return words


def _lower(name: bytes) -> bytes:
    # Setting names are compared without regard to ASCII case; other bytes count as they are.
    return name.lower()
