"""A load balancer in front of the proxy says who the client is."""

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from end_to_end.balancer import CLIENT, LOCAL, V1, V2, balancer
from end_to_end.certificates import issued
from end_to_end.inprocess import Proxy, proxy
from end_to_end.raw import Raw
from end_to_end.wired import Agent, Wired
from psycopg import sql
from structlog.typing import EventDict

from sqlguard.app import check
from sqlguard.errors import NotConfigured
from sqlguard.settings import Settings
from sqlguard.wire.messages import SSLRequest


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return issued(tmp_path_factory.mktemp("papers"))


@pytest.fixture(scope="module")
def behind(wired_world: Wired, papers: dict[str, Any]) -> Iterator[Proxy]:
    """A proxy that takes headers from this machine only."""
    with proxy(
        wired_world.database.owner_dsn,
        proxy_protocol="required",
        proxy_protocol_from=("127.0.0.0/8",),
        **papers,
    ) as running:
        yield running


def until(is_so: Callable[[], bool]) -> bool:
    for _ in range(100):
        if is_so():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("header", [V1, V2], ids=["v1", "v2"])
@pytest.mark.parametrize("pieces", [0, 1])
@pytest.mark.parametrize("tls", ["disable", "require", "direct"])
def test_a_client_behind_a_load_balancer(  # noqa: PLR0917 (fixtures and cases)
    wired_world: Wired, agent: Agent, behind: Proxy, header: bytes, pieces: int, tls: str
) -> None:
    options: dict[str, Any] = {"sslmode": tls}
    if tls == "direct":
        if psycopg.pq.version() < 170000:
            pytest.skip("libpq has sslnegotiation since 17")
        options = {"sslmode": "require", "sslnegotiation": "direct"}
    with balancer(behind.port, header, pieces) as port, replace(agent, port=port).connect(**options) as conn:
        assert conn.pgconn.ssl_in_use is (tls != "disable")
        assert conn.execute("SELECT length(repeat('x', 100000))").fetchone() == (100_000,)
        assert conn.execute("INSERT INTO plain (id) VALUES (700001)").statusmessage == "INSERT 0 1"
        with pytest.raises(psycopg.Error) as refused:
            conn.execute("DROP TABLE plain")
        assert refused.value.sqlstate == "SG002"
    found = wired_world.actions(agent)
    assert {a["client_addr"] for a in found} == {CLIENT}
    assert found[0]["kind"] == "insert"


def test_the_address_is_part_of_the_chain(wired_world: Wired, agent: Agent, behind: Proxy) -> None:
    with balancer(behind.port, V2) as port, replace(agent, port=port).connect() as conn:
        conn.execute("INSERT INTO plain (id) VALUES (700002)")
    task = agent.task.task.id
    assert until(lambda: bool(wired_world.actions(agent)))
    owner = wired_world.database
    verify = sql.SQL(
        "SELECT a.hash = sqlguard.chained(a.prev_hash, sqlguard.action_values(a))"
        " FROM sqlguard.action a WHERE a.task_id = {}"
    ).format(task)
    assert owner.execute(verify.as_string()) == [(True,)]
    forged = sql.SQL(
        "SELECT b.hash = sqlguard.chained(b.prev_hash, sqlguard.action_values(b))"
        ' FROM (SELECT jsonb_populate_record(a, \'{{"client_addr": "192.0.2.7"}}\') AS b'
        " FROM sqlguard.action a WHERE a.task_id = {}) x, LATERAL (SELECT (x.b).*) b"
    ).format(task)
    assert owner.execute(forged.as_string()) == [(False,)]


def test_a_balancer_that_speaks_for_itself(wired_world: Wired, agent: Agent, behind: Proxy) -> None:
    for header in (LOCAL, b"PROXY UNKNOWN\r\n"):
        with balancer(behind.port, header) as port, replace(agent, port=port).connect() as conn:
            conn.execute("DELETE FROM plain WHERE id = 700003")
    assert {a["client_addr"] for a in wired_world.actions(agent)} == {"127.0.0.1"}


def test_a_cancel_request_has_a_header_too(agent: Agent, behind: Proxy) -> None:
    with balancer(behind.port, V2) as port, replace(agent, port=port).connect() as conn:
        timer = threading.Timer(0.5, conn.cancel_safe)
        timer.start()
        with pytest.raises(psycopg.errors.QueryCanceled):
            conn.execute(
                "SELECT count(*) FROM generate_series(1, 3000) a, generate_series(1, 3000) b, generate_series(1, 3000) c"
            )
        timer.join()


@pytest.mark.parametrize(
    "header",
    [b"PROXY TCP4 203.0.113.9\r\n", b"PROXY UDP4 1.2.3.4 1.2.3.4 1 2\r\n", SSLRequest().encode()],
    ids=["half", "UDP", "none"],
)
def test_a_malformed_header_is_logged(
    agent: Agent, behind: Proxy, logged: list[EventDict], header: bytes
) -> None:
    with balancer(behind.port, header) as port, pytest.raises(psycopg.OperationalError):
        replace(agent, port=port).connect(sslmode="disable")
    assert until(lambda: any(e["event"] == "client refused" for e in logged))
    (entry,) = [e for e in logged if e["event"] == "client refused"]
    assert "no valid PROXY protocol header" in entry["error"]
    assert entry["client_addr"] == "127.0.0.1"


def test_a_client_without_a_header_is_refused(agent: Agent, behind: Proxy, logged: list[EventDict]) -> None:
    for mode in ("disable", "require"):
        with pytest.raises(psycopg.OperationalError):
            replace(agent, port=behind.port).connect(sslmode=mode)
    assert until(lambda: len([e for e in logged if "there is none" in str(e.get("error"))]) == 2)
    with (
        pytest.raises(ssl.SSLError),
        ssl.create_default_context().wrap_socket(
            Raw("127.0.0.1", behind.port).socket, server_hostname="127.0.0.1"
        ),
    ):
        pass


def test_a_header_that_does_not_come(wired_world: Wired, logged: list[EventDict]) -> None:
    with proxy(
        wired_world.database.owner_dsn,
        proxy_protocol="required",
        proxy_protocol_from=("127.0.0.1",),
        startup_timeout=1.0,
    ) as running:
        for sent in (b"", V1[:-1], V2[:-1]):
            client = Raw("127.0.0.1", running.port)
            client.send(sent)
            client.rest()
            client.close()
    assert len([e for e in logged if "did not come in time" in str(e.get("error"))]) == 3


def test_an_address_that_is_not_on_the_list_is_not_believed(
    wired_world: Wired, agent: Agent, logged: list[EventDict]
) -> None:
    with (
        proxy(
            wired_world.database.owner_dsn,
            proxy_protocol="required",
            proxy_protocol_from=("192.0.2.0/24", "2001:db8::/32"),
        ) as running,
        balancer(running.port, V1) as port,
    ):
        for where in (port, running.port):
            with pytest.raises(psycopg.OperationalError):
                replace(agent, port=where).connect(sslmode="disable")
    found = [e for e in logged if "no PROXY protocol header is taken" in str(e.get("error"))]
    assert [e["client_addr"] for e in found] == ["127.0.0.1"] * 2


def test_headers_are_no_ones_where_they_are_off(wired_world: Wired, agent: Agent) -> None:
    with balancer(wired_world.proxy.port, V1) as port, pytest.raises(psycopg.OperationalError):
        replace(agent, port=port).connect(sslmode="disable")
    with agent.connect() as conn:
        conn.execute("DELETE FROM plain WHERE id = 700004")
    assert {a["client_addr"] for a in wired_world.actions(agent)} == {"127.0.0.1"}


def test_clients_are_limited_by_their_own_address(wired_world: Wired, agent: Agent) -> None:
    other = V1.replace(CLIENT.encode(), b"203.0.113.8")
    with (
        proxy(
            wired_world.database.owner_dsn,
            proxy_protocol="required",
            proxy_protocol_from=("127.0.0.1",),
            max_clients_per_address=2,
            startup_timeout=120.0,
        ) as running,
        balancer(running.port, V1) as here,
        balancer(running.port, other) as there,
        ExitStack() as stack,
    ):
        for _ in range(2):
            stack.enter_context(replace(agent, port=here).connect())
        with pytest.raises(psycopg.OperationalError, match=f"as many clients from {CLIENT}"):
            replace(agent, port=here).connect()
        stack.enter_context(replace(agent, port=there).connect())
        # Those that never say who they are do not fill the proxy either.
        silent = [Raw("127.0.0.1", here) for _ in range(6)]
        for client in silent:
            stack.callback(client.close)
        assert until(lambda: sum(map(_is_closed, silent)) >= 4)
        stack.close()
        assert until(lambda: _connects(replace(agent, port=here)))


def _is_closed(client: Raw) -> bool:
    client.socket.settimeout(0.05)
    try:
        return client.socket.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


def _connects(agent: Agent) -> bool:
    try:
        agent.connect().close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"proxy_protocol": "required"}, "not said from whom"),
        ({"proxy_protocol": "required", "proxy_protocol_from": ("10.0.0.1/8",)}, "host bits"),
        ({"proxy_protocol_from": ("balancer",)}, "can't be used"),
    ],
)
def test_a_list_that_can_not_be_used_is_told_at_the_start(
    wired_world: Wired, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(NotConfigured, match=said):
        check(Settings(dsn=wired_world.database.owner_dsn, **given))
