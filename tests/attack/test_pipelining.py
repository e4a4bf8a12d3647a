"""Requests sent before the one ahead of them is answered: all answered, in their order, and not read before."""

import json
from collections.abc import Iterator

import pytest

from forebay.web.connection_limits import DEFAULT_LIMITS
from tests.attack.faces import Face, everything, open_face, request
from tests.conftest import MakeServer
from tests.kit import make_sample, poll_until

NUM = 40


@pytest.fixture(scope="module", params=("server", "gateway", "engine"))
def face(request: pytest.FixtureRequest, module_servers: MakeServer) -> Iterator[Face]:
    with open_face(request.param, module_servers, DEFAULT_LIMITS) as opened:
        yield opened


def requests_of(face: Face) -> bytes:
    """Of every shape that a request's end can have."""
    method = b"PUT" if face.post.startswith(b"/gateway") else b"POST"
    shapes = [
        request(b"GET", face.get),
        request(method, face.post, b"Content-Length: 7", body=b"GET / H"),
        request(method, face.post, b"Transfer-Encoding: chunked", body=b"6\r\n\r\n\r\n\r\n\r\n0\r\nX-T: a\r\n\r\n"),
        request(b"GET", b"/no/such"),
    ]
    return b"".join(shapes[n % 4] for n in range(NUM)) + request(b"GET", face.get, b"Connection: close")


@pytest.mark.parametrize("packet_bytes", [1, 2, 3, 7, 100, 1 << 20])
def test_pipelined_requests_are_answered_in_their_order(face: Face, packet_bytes: int) -> None:
    sent = requests_of(face)
    with face.connect() as opened:
        for at in range(0, len(sent), packet_bytes):
            opened.sendall(sent[at : at + packet_bytes])
        answer = everything(opened)
    statuses = [int(part.split(b" ", 1)[0]) for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert len(statuses) == NUM + 1
    assert statuses[::4] == [200] * (NUM // 4 + 1)
    assert {*statuses[1::4], *statuses[2::4]} <= {400, 422}
    assert statuses[3::4] == [404] * (NUM // 4)


def test_nothing_is_read_behind_a_request_that_waits(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run()
    poll_until(lambda: run.view()["state"] == "running")
    waiting = request(b"GET", f"{run.path}/closed_groups?after=0&wait_s=20".encode())
    flood = request(b"GET", b"/healthz") * 1_000
    face = Face(server.port, server.pid, b"", b"")
    before = face.rss_bytes()
    with face.connect() as opened:
        opened.sendall(waiting)
        opened.settimeout(1)
        num_sent = 0
        with pytest.raises(TimeoutError):  # noqa: PT012 - how much the kernels take is left open
            while num_sent < 64 << 20:
                num_sent += opened.send(flood)
        assert face.rss_bytes() - before < 16 << 20
        assert server.client.get("/healthz").status_code == 200


def test_an_upgrade_is_answered_and_what_follows_is_no_request(face: Face) -> None:
    upgrade = request(b"GET", face.get, b"Connection: Upgrade", b"Upgrade: h2c")
    answer = face.sends(upgrade + request(b"GET", face.get))
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_writes_that_are_pipelined_are_all_stored(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run(group_size=1)
    bodies = [json.dumps(make_sample(uid=f"u{n}", instance_id=n, text="x" * 9_000)).encode() for n in range(300)]
    path = f"{run.path}/samples".encode()
    sent = b"".join(request(b"POST", path, b"Content-Length: %d" % len(body), body=body) for body in bodies)
    with Face(server.port, server.pid, b"", b"").connect() as opened:
        opened.sendall(sent + request(b"GET", b"/healthz", b"Connection: close"))
        answer = everything(opened)
    assert answer.count(b"HTTP/1.1 200 ") == 301
    assert run.view()["groups"]["open"] == 300
