"""Connections that came and went, and pipelined requests, leave nothing behind."""

import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from forebay.web.connection_limits import DEFAULT_LIMITS
from tests.attack.faces import Face, everything, open_face, request
from tests.conftest import MakeServer
from tests.kit import poll_until

ROUNDS = int(os.environ.get("ROUNDS", "10"))
NUM_FIRST = 5
"""After so many rounds memory is what it will be."""
MARGIN = 1.1
NUM_CONNECTIONS = 400 if ROUNDS < 50 else 2_000
PIPELINED_BYTES = (2 << 20) if ROUNDS < 50 else (20 << 20)


@pytest.fixture(scope="module", params=("server", "gateway"))
def face(request: pytest.FixtureRequest, module_servers: MakeServer) -> Iterator[Face]:
    with open_face(request.param, module_servers, DEFAULT_LIMITS) as opened:
        yield opened


def stays_flat(face: Face, one_round: Callable[[], None]) -> None:
    """Memory after all rounds is within 10 % of that after the first few, whatever it is for a moment."""
    sizes = []
    for _ in range(ROUNDS):
        one_round()
        with face.connect() as opened:  # answered after whatever was closed before it
            opened.sendall(request(b"GET", face.get, b"Connection: close"))
            assert everything(opened).startswith(b"HTTP/1.1 200 ")
        sizes.append(face.rss_bytes())
    told = " ".join(f"{size / (1 << 20):.1f}" for size in sizes)
    print(f"{face.get.decode()}: MiB after each round: {told}")
    assert min(sizes[-3:]) < MARGIN * max(sizes[:NUM_FIRST]), told


def pipeline(face: Face, one: bytes, num_bytes: int) -> None:
    """Send as much, reading what comes back, and go away in the end without waiting for all of it."""
    flood = memoryview(one * (num_bytes // len(one)))
    with face.connect() as opened, selectors.DefaultSelector() as ready:
        opened.setblocking(False)
        ready.register(opened, selectors.EVENT_READ | selectors.EVENT_WRITE)
        until_s = time.monotonic() + 2
        with suppress(ConnectionError):
            while flood and time.monotonic() < until_s:
                for _, events in ready.select(0.1):
                    if events & selectors.EVENT_READ:
                        opened.recv(1 << 18)
                    if events & selectors.EVENT_WRITE:
                        with suppress(BlockingIOError):
                            flood = flood[opened.send(flood[: 1 << 18]) :]


@pytest.mark.parametrize("is_read", [True, False])
def test_what_is_pipelined_leaves_nothing(face: Face, is_read: bool) -> None:
    one = request(b"GET", face.get if is_read else b"/no/such")
    stays_flat(face, lambda: pipeline(face, one, PIPELINED_BYTES))


@pytest.mark.parametrize("has_asked", [False, True])
def test_connections_that_came_and_went_leave_nothing(face: Face, has_asked: bool) -> None:
    def come_and_go() -> None:
        with ExitStack() as stack:
            opened = [stack.enter_context(face.connect()) for _ in range(NUM_CONNECTIONS)]
            if has_asked:
                for each in opened:
                    each.sendall(request(b"GET", face.get))
                for each in opened:
                    assert each.recv(1 << 12).startswith(b"HTTP/1.1 200 ")
            else:
                for each in opened:
                    each.sendall(b"GET / HTTP/1.1\r\nHost: a")

    stays_flat(face, come_and_go)


def test_the_connections_are_gone(face: Face) -> None:
    fds = f"/proc/{face.pid}/fd"
    before = len(os.listdir(fds))
    opened = [face.connect() for _ in range(50)]
    poll_until(lambda: len(os.listdir(fds)) >= before + 50)
    for each in opened:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, not an end
        each.close()
    poll_until(lambda: len(os.listdir(fds)) <= before + 2)
