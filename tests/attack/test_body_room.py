"""Room for request bodies: paid by bytes that came, never by what was announced."""

import gzip
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.attack.faces import CONTROL_KEY, Face, everything, open_face, request, told
from tests.conftest import MakeServer
from tests.kit import NativeRun, ServerProcess, make_sample, poll_until

ROOM = 4 << 20


@pytest.fixture(scope="module")
def server(module_servers: MakeServer) -> ServerProcess:
    return module_servers(max_body_bytes=ROOM, max_bodies_bytes=ROOM, body_room_wait_s=20)


@pytest.fixture(scope="module")
def run(server: ServerProcess) -> NativeRun:
    return server.start_run()


@pytest.fixture
def face(server: ServerProcess) -> Face:
    return Face(server.port, server.pid, b"", b"")


def begin(face: Face, run: NativeRun, num_announced: int, num_sent: int, *headers: bytes) -> socket.socket:
    """A write of which so many bytes are sent."""
    opened = face.connect()
    length = b"Content-Length: %d" % num_announced
    path = f"{run.path}/samples".encode()
    opened.sendall(request(b"POST", path, length, b"Connection: close", *headers, body=b" " * num_sent))
    return opened


def test_announced_lengths_hold_no_room(face: Face, run: NativeRun) -> None:
    silent = [begin(face, run, ROOM, 100) for _ in range(20)]
    for n in range(5):
        assert run.write(make_sample(uid=f"beside {n}", text="x" * 1_000_000))[0]["status"] == 200
    for opened in silent:
        opened.close()


def test_of_bodies_that_hold_all_of_it_the_newest_is_refused_and_the_oldest_finishes(
    face: Face, run: NativeRun
) -> None:
    size = ROOM - 100_000
    with (
        ThreadPoolExecutor(2) as pool,
        begin(face, run, size, ROOM // 2) as first,
        begin(face, run, size, 0) as second,
    ):
        rest = pool.submit(second.sendall, b" " * size)
        # Half of the room is the second's now; the first can go on only where that gives way.
        poll_until(lambda: _is_full(face, run))
        first.sendall(b" " * (size - ROOM // 2))
        assert told(everything(first))[0] == 422, "it is whole, and no JSON"
        status, body = told(everything(second))
        assert (status, body["error"]["code"]) == (429, "buffer_full")
        assert "max_bodies_bytes" in body["error"]["hint"]
        second.close()
        rest.exception(60)
    assert run.write(make_sample(uid="after", text="x" * 3_000_000))[0]["status"] == 200


def _is_full(face: Face, run: NativeRun) -> bool:
    """Whether a body of some size has to wait."""
    body = b" " * 300_000
    with begin(face, run, len(body), len(body)) as probe:
        probe.settimeout(3)
        try:
            return not probe.recv(1)
        except TimeoutError:
            return True


def test_a_body_waits_while_others_can_finish(face: Face, run: NativeRun) -> None:
    sample = make_sample(uid="waits", text="x" * 1_000_000)
    with ThreadPoolExecutor(1) as pool, begin(face, run, ROOM - 1, ROOM - 1_000) as first:
        poll_until(lambda: _is_full(face, run))  # all that was sent has been read
        waiting = pool.submit(run.write, sample)
        poll_until(lambda: _is_full(face, run))
        assert not waiting.done()
        first.sendall(b" " * 999)
        assert told(everything(first))[0] == 422
        assert waiting.result(60)[0]["status"] == 200


def test_what_unfolds_is_paid_for_too(face: Face, run: NativeRun) -> None:
    """Bombs that together would take many times the room are refused or wait; the server goes on."""
    bomb = gzip.compress(b" " * (ROOM - 200_000))
    before = face.rss_bytes()
    opened = []
    for _ in range(30):
        opened.append(begin(face, run, len(bomb), 0, b"Content-Encoding: gzip", b"Content-Type: application/x-ndjson"))
        opened[-1].sendall(bomb)
    statuses = set()
    for each in opened:
        with each:
            statuses.add(told(everything(each))[0])
    assert statuses <= {200, 422, 429}
    assert face.rss_bytes() - before < 12 * ROOM
    assert run.write(make_sample(uid="after bombs"))[0]["status"] == 200


def test_a_length_above_the_limit_is_refused_before_a_byte_is_read(face: Face, run: NativeRun) -> None:
    with begin(face, run, ROOM + 1, 0) as opened:
        assert told(everything(opened))[0] == 413


@pytest.fixture(scope="module")
def gateway(module_servers: MakeServer) -> Iterator[Face]:
    with open_face("gateway", module_servers, max_body_bytes=ROOM, max_bodies_bytes=ROOM) as opened:
        yield opened


def test_the_gateways_bodies_hold_no_room_by_their_length(gateway: Face) -> None:
    silent = []
    for _ in range(20):
        silent.append(gateway.connect())
        silent[-1].sendall(request(b"PUT", b"/gateway/runs/a", b"Content-Length: %d" % ROOM, body=b"{"))
    registration = json.dumps(
        {"key": "k", "engine_urls": ["http://127.0.0.1:9"], "buffer_url": "http://127.0.0.1:9/w/k"}
    )
    body = registration.encode() + b" " * 1_000_000
    length = b"Content-Length: %d" % len(body)
    answer = gateway.sends(request(b"PUT", b"/gateway/runs/b", length, b"Connection: close", body=body))
    assert told(answer)[0] == 200, CONTROL_KEY
    for opened in silent:
        opened.close()


def test_an_engines_bodies_are_bounded(module_servers: MakeServer) -> None:
    with open_face("engine", module_servers) as engine:
        for length in (b"Content-Length: 100000000000", b"Content-Length: %d" % (65 << 20)):
            status, body = told(engine.sends(request(b"POST", engine.post, length, b"Connection: close")))
            assert (status, "larger than" in body["message"]) == (413, True)
