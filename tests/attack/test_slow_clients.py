"""Clients that keep a connection and send nothing, too slowly, or too much before a request begins."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.attack.faces import SHORT, Face, everything, open_face, request, told
from tests.conftest import MakeServer
from tests.kit import TIME_LIMIT_S, ServerProcess

KINDS = ("server", "gateway", "engine")
ROUNDING_S = 0.1


@pytest.fixture(scope="module", params=KINDS)
def face(request: pytest.FixtureRequest, module_servers: MakeServer) -> Iterator[Face]:
    with open_face(request.param, module_servers) as opened:
        yield opened


def test_a_head_that_never_ends_is_a_431(face: Face) -> None:
    for endless in (
        b"GET /" + b"a" * 200_000,
        b"GET / HTTP/1.1\r\n" + b"X-Pad: aaaaaaaaaaaaaaaa\r\n" * 10_000,
        b"GET / HTTP/1.1\r\nX-Pad: " + b"a" * 200_000,
        b"\r\n" * 100_000,
    ):
        status, body = told(face.sends(endless))
        assert (status, body["error"]["code"]) == (431, "head_too_large")
        assert "max_head_bytes" in body["error"]["hint"]


def test_a_head_within_the_bound_is_taken(face: Face) -> None:
    padded = request(b"GET", face.get, b"X-Pad: " + b"a" * 60_000, b"Connection: close")
    assert face.sends(padded).startswith(b"HTTP/1.1 200 ")


def test_a_head_that_comes_byte_by_byte_is_closed_in_time(face: Face) -> None:
    began_s, answer = time.monotonic(), b""
    with face.connect() as opened:
        opened.settimeout(0.1)
        opened.sendall(b"GET /")
        while not answer and time.monotonic() - began_s < TIME_LIMIT_S:
            opened.sendall(b"a")
            try:
                answer = opened.recv(1 << 16)
            except TimeoutError:
                continue
        assert told(answer + everything(opened))[1]["error"]["code"] == "request_stalled"
        assert time.monotonic() - began_s >= SHORT.head_timeout_s - ROUNDING_S


def test_the_second_head_of_a_connection_has_no_more_time(face: Face) -> None:
    with face.connect() as opened:
        opened.sendall(request(b"GET", face.get))
        assert opened.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        opened.sendall(b"GET / HTT")
        assert b" 408 " in everything(opened)


def test_a_body_that_stands_still_is_a_408(face: Face) -> None:
    method = b"PUT" if face.post.startswith(b"/gateway") else b"POST"
    began_s = time.monotonic()
    with face.connect() as opened:
        opened.sendall(request(method, face.post, b"Content-Length: 1000", body=b"{"))
        status, _ = told(everything(opened))
        assert status == 408
        assert time.monotonic() - began_s >= SHORT.body_timeout_s - ROUNDING_S


def test_a_body_that_goes_on_slowly_is_waited_for(face: Face) -> None:
    method = b"PUT" if face.post.startswith(b"/gateway") else b"POST"
    with face.connect() as opened:
        opened.sendall(request(method, face.post, b"Content-Length: 6", b"Connection: close"))
        for _ in range(6):
            time.sleep(0.9)  # a client that is slow, and all in all takes longer than the bound
            opened.sendall(b"x")
        assert told(everything(opened))[0] in (400, 422)


@pytest.mark.parametrize("has_asked", [False, True])
def test_an_idle_connection_is_closed(face: Face, has_asked: bool) -> None:
    began_s = time.monotonic()
    with face.connect() as opened:
        if has_asked:
            opened.sendall(request(b"GET", face.get))
            assert opened.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        everything(opened)
        assert time.monotonic() - began_s >= SHORT.idle_timeout_s - 2 * ROUNDING_S


@contextmanager
def full_connection(server: ServerProcess) -> Iterator[socket.socket]:
    """A connection over which the server can send no more, until replies are taken."""
    with socket.socket() as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        opened.settimeout(0.5)
        opened.connect(("127.0.0.1", server.port))
        opened.sendall(request(b"GET", b"/openapi.json") * 500)
        yield opened


def test_replies_that_nobody_takes_hold_a_connection_no_longer(module_servers: MakeServer) -> None:
    server = module_servers(idle_timeout_s=1)
    with full_connection(server) as opened:
        began_s = time.monotonic()
        with pytest.raises(ConnectionError):  # noqa: PT012 - which send finds it closed is left open
            while time.monotonic() - began_s < TIME_LIMIT_S:
                with suppress(TimeoutError):
                    opened.sendall(b"G" * (1 << 16))


def test_replies_that_are_taken_slowly_are_sent(module_servers: MakeServer) -> None:
    """A little within each bound, for longer than the bound: far less than the kernel asks for more after."""
    server = module_servers(idle_timeout_s=5)
    with full_connection(server) as opened:
        opened.settimeout(TIME_LIMIT_S)
        began_s = time.monotonic()
        while time.monotonic() - began_s < 7:
            assert opened.recv(8_192)
            time.sleep(0.1)  # a client that is slow


def test_trailers_without_an_end_are_cut_off(face: Face) -> None:
    method = b"PUT" if face.post.startswith(b"/gateway") else b"POST"
    begun = request(method, face.post, b"Transfer-Encoding: chunked", body=b"1\r\n{\r\n0\r\n")
    with face.connect() as opened:
        opened.sendall(begun)
        with pytest.raises(ConnectionError):  # noqa: PT012 - which of many packets finds it closed is left open
            for _ in range(2_000):
                opened.sendall(b"X-Trailer: " + b"a" * 20_000 + b"\r\n")


def test_a_long_poll_is_no_idle_connection(make_server: MakeServer) -> None:
    server = make_server(idle_timeout_s=1, head_timeout_s=1, body_timeout_s=1)
    run = server.start_run()
    began_s = time.monotonic()
    answer = server.client.get(f"{run.path}/closed_groups", params={"after": 0, "wait_s": 4})
    assert answer.status_code == 200
    assert time.monotonic() - began_s > 3.5
