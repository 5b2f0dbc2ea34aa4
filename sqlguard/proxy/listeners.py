"""Unix sockets to listen on, where libpq looks for them."""

import socket
from contextlib import suppress
from pathlib import Path

from sqlguard.errors import NotConfigured

#: As PostgreSQL's own: whoever may enter the folder may connect, and has to log in.
_MODE = 0o777


def unix_socket(folder: Path, port: int) -> socket.socket:
    """Return a socket bound to `folder/.s.PGSQL.port`. Raises NotConfigured."""
    path = _path(folder, port)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_dead(path):
            path.unlink()
        made.bind(str(path))
        path.chmod(_MODE)
    except OSError as fault:
        made.close()
        raise NotConfigured(
            f"can't listen on {path}: {fault.strerror or fault}",
            hint="is another server running there? choose another folder with --unix-socket",
        ) from None
    return made


def remove(listener: socket.socket, folder: Path, port: int) -> None:
    """Close a listening Unix socket, which the event loop may have done, and take its file away."""
    with suppress(OSError):
        listener.close()
    with suppress(OSError):
        _path(folder, port).unlink()


def _path(folder: Path, port: int) -> Path:
    return folder / f".s.PGSQL.{port}"


def _is_dead(path: Path) -> bool:
    """Say whether a socket's file was left behind by a process that is no more."""
    if not path.is_socket():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
