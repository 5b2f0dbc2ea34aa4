"""What systemd is told (sd_notify), in the few bytes that it takes."""

import os
import socket
from contextlib import suppress


def notify(state: str) -> None:
    """Tell the service manager, if there is one that wants to know."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.connect("\0" + address[1:] if address.startswith("@") else address)
        told.sendall(state.encode())
