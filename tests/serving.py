"""A server of the standard library for as long as a test wants it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import BaseServer

POLL_S = 0.02
"""How soon it notices that it is to end."""


@contextmanager
def in_thread(server: BaseServer) -> Iterator[None]:
    """Serve in a thread; the socket is closed at the end."""
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
