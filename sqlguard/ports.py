"""Free TCP ports on loopback, for servers that the demo and the tests start."""

import socket


def free_port() -> int:
    """Return a port that was free a moment ago; whoever binds it must be ready to try another."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
