"""A load balancer in front of the proxy, and the headers by which it says who the client is."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle

CLIENT = "203.0.113.9"
V1 = f"PROXY TCP4 {CLIENT} 192.0.2.1 40000 6543\r\n".encode()
V2 = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\x00\x11" + bytes([203, 0, 113, 9, 192, 0, 2, 1]) + b"\x9c\x40\x19\x8f"
V2 += b"\xe0\x00\x02xy"  # a TLV
LOCAL = b"\r\n\r\n\0\r\nQUIT\n\x20\x00\x00\x00"
HEADERS = (V1, V2, LOCAL, b"PROXY UNKNOWN\r\n")


class Balancer:
    """Forwards what comes to *targets* in turn, *header* first, in pieces of so many bytes or all at once."""

    def __init__(self, targets: Sequence[int], header: bytes, pieces: int) -> None:
        self._targets, self._header, self._step = cycle(targets), header, pieces or max(1, len(header))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets = [self._listener]
        self._threads: list[threading.Thread] = []
        #: While it is not set nothing gets through, and nobody is told.
        self.flows = threading.Event()
        self.flows.set()
        self._start(self._accept)

    def _start(self, work: Callable[..., None], *given: socket.socket) -> None:
        self._threads.append(threading.Thread(target=work, args=given))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(("127.0.0.1", next(self._targets)))
                self._sockets += [client, server]
                for at in range(0, len(self._header), self._step):
                    server.sendall(self._header[at : at + self._step])
                    time.sleep(0.001)
                self._start(self._copy, client, server)
                self._start(self._copy, server, client)

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self.flows.wait()
                sink.sendall(data)
        _shut(source, sink)

    def close(self) -> None:
        self.flows.set()
        _shut(*self._sockets)
        for thread in self._threads:
            thread.join(20)
        for end in self._sockets:
            end.close()


def _shut(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextmanager
def balancer(target: int | Sequence[int], header: bytes = b"", pieces: int = 0) -> Iterator[int]:
    made = Balancer([target] if isinstance(target, int) else target, header, pieces)
    try:
        yield made.port
    finally:
        made.close()
