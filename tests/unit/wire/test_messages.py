"""Every message survives a round trip; no body, however broken, raises anything but ProtocolViolation."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlguard.errors import ProtocolViolation
from sqlguard.wire import backend, frontend
from sqlguard.wire import messages as m

TEXT = st.binary(max_size=30).map(lambda b: b.replace(b"\0", b""))
NAME = st.binary(min_size=1, max_size=20).map(lambda b: b.replace(b"\0", b"x"))
U16, U32 = st.integers(0, 0xFFFF), st.integers(0, 0xFFFFFFFF)
I16, I32 = st.integers(-(2**15), 2**15 - 1), st.integers(-(2**31), 2**31 - 1)
CODE = st.integers(0, 1)
VALUE = st.none() | st.binary(max_size=30)
KEY = st.binary(min_size=4, max_size=256)


def many(one: st.SearchStrategy[Any], size: int = 5) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(one, max_size=size).map(tuple)


FIELDS = many(st.tuples(st.sampled_from([bytes([c]) for c in b"SVCMDHPpqWsStcdnFLR"]), TEXT))
BINDS = many(VALUE).flatmap(
    lambda values: st.builds(
        m.Bind,
        TEXT,
        TEXT,
        st.sampled_from([0, 1, len(values)]).flatmap(
            lambda n: st.lists(CODE, min_size=n, max_size=n).map(tuple)
        ),
        st.just(values),
        many(CODE),
    )
)
COLUMNS = st.builds(m.Column, TEXT, U32, I16, U32, I16, I32, CODE)

FRONTEND: dict[type[Any], st.SearchStrategy[Any]] = {
    m.Query: st.builds(m.Query, TEXT),
    m.Parse: st.builds(m.Parse, TEXT, TEXT, many(U32)),
    m.Bind: BINDS,
    m.Describe: st.builds(m.Describe, st.booleans(), TEXT),
    m.Close: st.builds(m.Close, st.booleans(), TEXT),
    m.Execute: st.builds(m.Execute, TEXT, I32),
    m.FunctionCall: st.builds(m.FunctionCall, U32, many(CODE), many(VALUE), U16),
    m.CopyData: st.builds(m.CopyData, st.binary(max_size=50)),
    m.CopyFail: st.builds(m.CopyFail, TEXT),
    m.CopyDone: st.just(m.CopyDone()),
    m.Flush: st.just(m.Flush()),
    m.Sync: st.just(m.Sync()),
    m.Terminate: st.just(m.Terminate()),
}
BACKEND: dict[type[Any], st.SearchStrategy[Any]] = {
    m.AuthenticationOk: st.just(m.AuthenticationOk()),
    m.AuthenticationCleartextPassword: st.just(m.AuthenticationCleartextPassword()),
    m.AuthenticationMD5Password: st.builds(m.AuthenticationMD5Password, st.binary(min_size=4, max_size=4)),
    m.AuthenticationSASL: st.builds(m.AuthenticationSASL, many(NAME)),
    m.AuthenticationSASLContinue: st.builds(m.AuthenticationSASLContinue, st.binary(max_size=30)),
    m.AuthenticationSASLFinal: st.builds(m.AuthenticationSASLFinal, st.binary(max_size=30)),
    m.AuthenticationOther: st.builds(
        m.AuthenticationOther, st.sampled_from([2, 6, 7, 8, 9]), st.binary(max_size=9)
    ),
    m.BackendKeyData: st.builds(m.BackendKeyData, U32, KEY),
    m.ParameterStatus: st.builds(m.ParameterStatus, TEXT, TEXT),
    m.NegotiateProtocolVersion: st.builds(m.NegotiateProtocolVersion, U32, many(NAME)),
    m.ReadyForQuery: st.builds(m.ReadyForQuery, st.sampled_from([b"I", b"T", b"E"])),
    m.ErrorResponse: st.builds(m.ErrorResponse, FIELDS),
    m.NoticeResponse: st.builds(m.NoticeResponse, FIELDS),
    m.NotificationResponse: st.builds(m.NotificationResponse, U32, TEXT, TEXT),
    m.CommandComplete: st.builds(m.CommandComplete, TEXT),
    m.RowDescription: st.builds(m.RowDescription, many(COLUMNS)),
    m.DataRow: st.builds(m.DataRow, many(VALUE)),
    m.ParameterDescription: st.builds(m.ParameterDescription, many(U32)),
    m.FunctionCallResponse: st.builds(m.FunctionCallResponse, VALUE),
    m.CopyInResponse: st.builds(m.CopyInResponse, CODE, many(CODE)),
    m.CopyOutResponse: st.builds(m.CopyOutResponse, CODE, many(CODE)),
    m.CopyBothResponse: st.builds(m.CopyBothResponse, CODE, many(CODE)),
    m.CopyData: st.builds(m.CopyData, st.binary(max_size=50)),
    m.CopyDone: st.just(m.CopyDone()),
    m.ParseComplete: st.just(m.ParseComplete()),
    m.BindComplete: st.just(m.BindComplete()),
    m.CloseComplete: st.just(m.CloseComplete()),
    m.NoData: st.just(m.NoData()),
    m.EmptyQueryResponse: st.just(m.EmptyQueryResponse()),
    m.PortalSuspended: st.just(m.PortalSuspended()),
}
LOGIN: dict[type[Any], st.SearchStrategy[Any]] = {
    m.PasswordMessage: st.builds(m.PasswordMessage, TEXT),
    m.SASLInitialResponse: st.builds(m.SASLInitialResponse, TEXT, VALUE),
    m.SASLResponse: st.builds(m.SASLResponse, st.binary(max_size=50)),
}
STARTUP: dict[type[Any], st.SearchStrategy[Any]] = {
    m.StartupMessage: st.builds(
        m.StartupMessage,
        st.sampled_from([3 << 16, 3 << 16 | 1, 3 << 16 | 2, 3 << 16 | 9999]),
        many(st.tuples(NAME, TEXT)),
    ),
    m.SSLRequest: st.just(m.SSLRequest()),
    m.GSSENCRequest: st.just(m.GSSENCRequest()),
    m.CancelRequest: st.builds(m.CancelRequest, U32, KEY),
}


def any_of(kinds: dict[type[Any], st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    return st.one_of(*kinds.values())


def split(raw: bytes) -> tuple[int, bytes]:
    assert int.from_bytes(raw[1:5], "big") == len(raw) - 1
    return raw[0], raw[5:]


def test_every_message_has_its_strategy() -> None:
    for module, known in ((frontend, FRONTEND | STARTUP), (backend, BACKEND)):
        made = {
            one
            for one in vars(module).values()
            if inspect.isclass(one) and hasattr(one, "encode") and not one.__name__.startswith("_")
        }
        assert made - {m.CopyData, m.CopyDone, module.Bare} <= set(known)


@given(any_of(FRONTEND))
def test_frontend_round_trip(sent: m.FrontendMessage) -> None:
    assert m.decode_frontend(*split(sent.encode())) == sent


@given(any_of(BACKEND))
def test_backend_round_trip(sent: m.BackendMessage) -> None:
    assert m.decode_backend(*split(sent.encode())) == sent


@given(any_of(LOGIN))
def test_login_round_trip(sent: Any) -> None:
    kind, body = split(sent.encode())
    assert kind == ord("p")
    assert type(sent).decode(body) == sent


@given(any_of(STARTUP))
def test_startup_round_trip(sent: m.StartupPacket) -> None:
    raw = sent.encode()
    assert int.from_bytes(raw[:4], "big") == len(raw)
    assert m.decode_startup(raw[4:]) == sent


@st.composite
def damaged(draw: st.DrawFn, kinds: dict[type[Any], st.SearchStrategy[Any]]) -> bytes:
    raw = bytearray(draw(any_of(kinds)).encode())
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(raw)))
        match draw(st.integers(0, 2)):
            case 0:
                raw[at : at + 1] = draw(st.binary(max_size=2))
            case 1:
                del raw[at:]
            case 2:
                raw[at : at + 4] = draw(
                    st.sampled_from([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0"])
                )
    return bytes(raw)


def only_violations(decode: Callable[[], Any]) -> None:
    try:
        decode()
    except ProtocolViolation as fault:
        assert fault.sqlstate == "08P01"


@given(damaged(FRONTEND | LOGIN))
def test_damaged_frontend_messages(raw: bytes) -> None:
    kind = raw[0] if raw else 0
    only_violations(lambda: m.decode_frontend(kind, raw[5:]))
    for login in LOGIN:
        only_violations(lambda login=login: login.decode(raw[5:]))  # type: ignore[misc]


@given(damaged(BACKEND))
def test_damaged_backend_messages(raw: bytes) -> None:
    only_violations(lambda: m.decode_backend(raw[0] if raw else 0, raw[5:]))


@given(damaged(STARTUP) | st.binary(max_size=60))
def test_damaged_startup_packets(raw: bytes) -> None:
    only_violations(lambda: m.decode_startup(raw[4:]))


@given(st.integers(0, 255), st.binary(max_size=60))
def test_any_bytes(kind: int, body: bytes) -> None:
    only_violations(lambda: m.decode_frontend(kind, body))
    only_violations(lambda: m.decode_backend(kind, body))


@given(any_of(FRONTEND), st.binary(min_size=1, max_size=4))
def test_bytes_too_many_are_refused(sent: m.FrontendMessage, more: bytes) -> None:
    kind, body = split(sent.encode())
    if not isinstance(sent, m.CopyData):
        with pytest.raises(ProtocolViolation):
            m.decode_frontend(kind, body + more)


def test_bind_has_its_portal_first() -> None:
    raw = m.Bind(b"portal", b"statement", (1,), (b"\x01", None), (0,)).encode()
    assert raw[5:].startswith(b"portal\0statement\0\0\x01\0\x01\0\x02\0\0\0\x01\x01\xff\xff\xff\xff")


@pytest.mark.parametrize(
    "broken",
    [
        b"\0\0" + b"\0\x02\0\0\0\0" + b"\0\x03" + b"\xff\xff\xff\xff" * 3 + b"\0\0",
        b"\0\0" + b"\0\x01\0\x02" + b"\0\0\0\0",
        b"\0\0\0\0\xff\xff",
        b"\0\0\0\0\0\x01\xff\xff\xff\xfe\0\0",
    ],
    ids=["formats do not match", "unknown format", "values that never come", "length -2"],
)
def test_broken_binds(broken: bytes) -> None:
    with pytest.raises(ProtocolViolation, match="malformed Bind"):
        m.Bind.decode(broken)


def test_text_stays_bytes_whatever_its_encoding() -> None:
    assert m.Query.decode("SELECT 'ä'".encode("latin-1") + b"\0").text == b"SELECT '\xe4'"


def test_a_nul_inside_a_text_is_another_message() -> None:
    with pytest.raises(ProtocolViolation):
        m.Query.decode(b"SELECT 1\0; DROP TABLE t\0")
    with pytest.raises(ValueError, match="NUL"):
        m.Query(b"a\0b").encode()


def test_a_fatal_error_is_known_in_any_language() -> None:
    assert m.ErrorResponse(((b"S", b"FATALE"), (b"V", b"FATAL"))).is_fatal
    assert not m.ErrorResponse(((b"S", b"FEHLER"), (b"V", b"ERROR"))).is_fatal
