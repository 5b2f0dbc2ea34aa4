"""Receivers of `journal follow --webhook` that are hostile, broken or particular."""

import base64
import hashlib
import hmac
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from sqlguard.cli import feed
from sqlguard.errors import NotConfigured

EVENTS = [{"id": "action-1", "time": "2026-01-01T00:00:00+00:00", "data": {"statement": "SELECT 'é'"}}]
Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def receiver(*answers: Answer) -> Iterator[Any]:
    """Answer one request after the other as *answers* say, then 204; what came is in `seen`."""

    class Handler(BaseHTTPRequestHandler):
        def _any(self) -> None:
            server: Any = self.server
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            server.seen.append((self.command, self.path, dict(self.headers.items()), body))
            if left:
                left.pop(0)(self)
            else:
                self.send_response(204)
                self.end_headers()

        do_GET = do_POST = _any  # noqa: N815 (names of http.server's)

        def log_message(self, *_: object) -> None:
            pass

    left = list(answers)
    server: Any = HTTPServer(("127.0.0.1", 0), Handler)
    server.seen = []
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "_FIRST", 0.01)


def redirect(to: str, code: int) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        handler.send_header("Location", to)
        handler.end_headers()

    return answer


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_receiver_sends_us_nowhere_else(code: int) -> None:
    """A GET without the events, which was taken for their delivery, went to any address of the receiver's choice."""
    with receiver() as inner, receiver(redirect(f"{inner.url}/latest/meta-data", code)) as outer:
        feed._poster(outer.url)(EVENTS)
    assert inner.seen == []
    assert [command for command, *_ in outer.seen] == ["POST", "POST"]


def test_an_answer_that_is_no_http_is_one_more_try() -> None:
    with receiver(lambda handler: handler.wfile.write(b"SSH-2.0-nonsense\r\n\r\n") and None) as server:
        feed._poster(server.url)(EVENTS)
    assert len(server.seen) == 2


def test_no_secret_of_an_address_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with receiver(lambda handler: handler.send_error(503)) as server:
        feed._poster(f"{server.url}/services/T0/swordfish?token=swordfish")(EVENTS)
    told = capsys.readouterr().err
    assert "not delivered" in told
    assert "swordfish" not in told


@pytest.mark.parametrize("secret", ["plain words", "whsec_" + base64.b64encode(b"some key").decode()])
def test_a_receiver_can_tell_our_posts_from_an_agent_s(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(feed.SECRET_VARIABLE, secret)
    with receiver(lambda handler: handler.send_error(503)) as server:
        feed._poster(server.url)(EVENTS)
    key = b"some key" if secret.startswith("whsec_") else secret.encode()
    seen = [({name.lower(): value for name, value in h.items()}, body) for _, _, h, body in server.seen]
    assert len({lower["webhook-id"] for lower, _ in seen}) == 1
    for lower, body in seen:
        message = f"{lower['webhook-id']}.{lower['webhook-timestamp']}.".encode() + body
        mark = base64.b64encode(hmac.new(key, message, hashlib.sha256).digest()).decode()
        assert lower["webhook-signature"] == f"v1,{mark}"
        assert secret not in str(lower)


def test_a_secret_that_can_t_be_read_is_said_before_anything_is_posted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(feed.SECRET_VARIABLE, "whsec_!")
    with pytest.raises(NotConfigured, match="SQLGUARD_WEBHOOK_SECRET"):
        feed._poster("http://127.0.0.1:1/")
