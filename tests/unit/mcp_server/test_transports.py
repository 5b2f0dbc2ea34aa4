"""Who may reach the HTTP server at all."""

import pytest

from sqlguard.errors import NotConfigured
from sqlguard.mcp_server.server import Guard
from sqlguard.mcp_server.sessions import Door
from sqlguard.mcp_server.transports import http_app

DOOR = Door("postgresql://nowhere", policy="support")
TOKEN = "long enough to be a token"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org", ""])  # noqa: S104
def test_it_listens_on_loopback_only(host: str) -> None:
    with pytest.raises(NotConfigured) as caught:
        http_app(Guard(DOOR, shared=False), host=host, token=TOKEN)
    assert "--allow-host" in (caught.value.hint or "")


@pytest.mark.parametrize("token", ["", "short"])
def test_a_token_that_can_be_guessed_is_none(token: str) -> None:
    with pytest.raises(NotConfigured):
        http_app(Guard(DOOR, shared=False), host="127.0.0.1", token=token)


def test_a_door_shows_no_password() -> None:
    assert "secret" not in repr(Door("postgresql://owner:secret@db/shop"))
