"""``/buffer/write`` as bytes on a connection: pieces, pipelining, early ends, and every way to announce a body."""

import json
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import IO

import pytest

from tests.conftest import MakeServer
from tests.kit import TIME_LIMIT_S, Json, ServerProcess, SlimeRun, make_group, make_sample, poll_until

Answer = tuple[int, dict[str, str], Json]


class Connection:
    """Requests go out as they are given; answers come in order."""

    def __init__(self, opened: socket.socket, stream: IO[bytes]) -> None:
        self.opened = opened
        self._stream = stream

    def post(self, path: str, body: bytes, *headers: str, version: str = "1.1") -> Answer:
        self.send(path, body, *headers, version=version)
        return self.answer()

    def send(self, path: str, body: bytes, *headers: str, version: str = "1.1") -> None:
        told = headers or (f"Content-Length: {len(body)}",)
        head = "\r\n".join([f"POST {path} HTTP/{version}", "Host: localhost", *told, "", ""])
        self.opened.sendall(head.encode() + body)

    def answer(self) -> Answer:
        status, headers = self.head()
        return status, headers, json.loads(self._stream.read(int(headers["content-length"])))

    def head(self) -> tuple[int, dict[str, str]]:
        """The status and the headers alone."""
        status = int(self._stream.readline().split()[1])
        lines = [line.decode().strip() for line in iter(self._stream.readline, b"\r\n")]
        return status, {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def is_closed(self) -> bool:
        """Whether the server has ended the connection, once everything before that was read."""
        return self._stream.read(1) == b""


@contextmanager
def connect(server: ServerProcess) -> Iterator[Connection]:
    opened = socket.create_connection(("127.0.0.1", server.port), timeout=TIME_LIMIT_S)
    with closing(opened), opened.makefile("rb") as stream:
        yield Connection(opened, stream)


@pytest.fixture
def run(server: ServerProcess) -> Iterator[SlimeRun]:
    run = server.start_slime("written")
    yield run
    run.stop()


def encoded(**changes: object) -> bytes:
    return json.dumps(make_sample(**changes)).encode()


def path_of(run: SlimeRun) -> str:
    return f"{run.prefix}/buffer/write"


def num_stored(run: SlimeRun) -> int:
    return int(run.view()["samples"]["buffered"])


def test_many_samples_go_over_one_connection(server: ServerProcess, run: SlimeRun) -> None:
    with connect(server) as connection:
        for number in range(20):
            body = encoded(instance_id=number)
            status, headers, told = connection.post(path_of(run), body)
            assert (status, told["success"], told["duplicate"]) == (200, True, False)
            assert told["data"]["data"] == [json.loads(body)]
            assert headers["content-type"] == "application/json"
    assert num_stored(run) == 20


def test_a_repeated_sample_is_told_from_a_new_one(server: ServerProcess, run: SlimeRun) -> None:
    body = encoded(uid="twice")
    with connect(server) as connection:
        assert [connection.post(path_of(run), body)[2]["duplicate"] for _ in range(3)] == [False, True, True]
    assert num_stored(run) == 1


@pytest.mark.parametrize("size", [0, 70_000, 1_500_000], ids=["short", "in several pieces", "long"])
def test_bodies_of_every_size_arrive_whole(server: ServerProcess, run: SlimeRun, size: int) -> None:
    body = encoded(padding="x" * size)
    with connect(server) as connection:
        status, _, told = connection.post(path_of(run), body)
        assert (status, told["data"]["data"]) == (200, [json.loads(body)])
        assert connection.post(path_of(run), encoded())[0] == 200, "the connection is good for more"


def test_a_body_that_comes_byte_by_byte_is_the_same_sample(server: ServerProcess, run: SlimeRun) -> None:
    body = encoded()
    request = f"POST {path_of(run)} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    with connect(server) as connection:
        connection.opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(len(request)):
            connection.opened.sendall(request[at : at + 1])
        assert connection.answer()[2]["data"]["data"] == [json.loads(body)]


def test_requests_sent_without_waiting_are_answered_in_order(server: ServerProcess, run: SlimeRun) -> None:
    with connect(server) as connection:
        for number in range(10):
            connection.send(path_of(run), encoded(uid=f"u{number}"))
        told = [connection.answer()[2] for _ in range(10)]
    assert [answer["data"]["data"][0]["uid"] for answer in told] == [f"u{number}" for number in range(10)]
    assert num_stored(run) == 10


def test_a_body_in_chunks_is_taken(server: ServerProcess, run: SlimeRun) -> None:
    body = encoded()
    chunks = b"%x\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (10, body[:10], len(body) - 10, body[10:])
    with connect(server) as connection:
        assert connection.post(path_of(run), chunks, "Transfer-Encoding: chunked")[2]["success"]


def test_a_client_that_asks_before_sending_is_told_to_go_on(server: ServerProcess, run: SlimeRun) -> None:
    body = encoded()
    with connect(server) as connection:
        connection.send(path_of(run), b"", f"Content-Length: {len(body)}", "Expect: 100-continue")
        assert connection.head()[0] == 100
        connection.opened.sendall(body)
        assert connection.answer()[2]["success"]


@pytest.mark.parametrize(
    ("version", "headers"), [("1.0", ()), ("1.1", ("Connection: close",))], ids=["HTTP/1.0", "Connection: close"]
)
def test_a_client_that_wants_no_more_gets_its_answer_and_the_end(
    server: ServerProcess, run: SlimeRun, version: str, headers: tuple[str, ...]
) -> None:
    body = encoded()
    with connect(server) as connection:
        told = connection.post(path_of(run), body, f"Content-Length: {len(body)}", *headers, version=version)
        assert told[2]["success"]
        assert connection.is_closed()


def test_what_is_wrong_is_told_and_the_connection_stays(server: ServerProcess, run: SlimeRun) -> None:
    with connect(server) as connection:
        status, _, told = connection.post(path_of(run), b'{"uid": [7]}')
        assert (status, told["success"], told["error"]["field"]) == (422, False, "uid")
        assert connection.post(path_of(run), b"")[0] == 422
        assert connection.post("/s/nobody/buffer/write", encoded())[0] == 404
        assert connection.post(path_of(run), encoded())[0] == 200
    assert num_stored(run) == 1


def test_a_full_buffer_is_waited_for(server: ServerProcess) -> None:
    run = server.start_slime("full", group_size=2, max_buffer_size=2)
    for sample in make_group("first", [0.0, 1.0]):
        run.send(sample)
    with connect(server) as connection:
        connection.send(path_of(run), encoded(uid="waits", instance_id="second"))
        assert run.fetch()["success"], "which makes room"
        assert connection.answer()[2]["data"]["data"][0]["uid"] == "waits"
    run.stop()


def test_a_buffer_that_stays_full_is_429(make_server: MakeServer) -> None:
    server = make_server(write_wait_s=0.2)
    run = server.start_slime("full", group_size=2, max_buffer_size=2)
    for sample in make_group("first", [0.0, 1.0]):
        run.send(sample)
    with connect(server) as connection:
        status, headers, told = connection.post(path_of(run), encoded(instance_id="second"))
    assert (status, told["error"]["code"]) == (429, "buffer_full")
    assert int(headers["retry-after"]) >= 1


def test_a_client_that_goes_away_leaves_neither_room_nor_sample(make_server: MakeServer) -> None:
    server = make_server(max_bodies_bytes=100_000)
    run = server.start_slime("gone")
    for _ in range(3):
        with connect(server) as connection:
            connection.send(path_of(run), b'{"uid"', "Content-Length: 90000")
    with connect(server) as connection:
        assert connection.post(path_of(run), encoded(padding="x" * 80_000))[2]["success"]
    assert num_stored(run) == 1


def test_a_client_that_goes_away_before_its_answer_has_written(server: ServerProcess, run: SlimeRun) -> None:
    with connect(server) as connection:
        connection.send(path_of(run), encoded())
    poll_until(lambda: num_stored(run) == 1)


def test_the_token_is_asked_for(make_server: MakeServer) -> None:
    server = make_server(token="secret")
    server.client.headers["authorization"] = "Bearer secret"
    run = server.start_slime("guarded")
    body = encoded()
    length = f"Content-Length: {len(body)}"
    with connect(server) as connection:
        assert connection.post(path_of(run), body)[0] == 401
        assert connection.post(path_of(run), body, length, "Authorization: Bearer wrong")[0] == 401
        assert connection.post("/w/wrong-key/buffer/write", body)[0] == 404
        assert num_stored(run) == 0
        assert connection.post(path_of(run), body, length, "Authorization: Bearer secret")[0] == 200
    assert num_stored(run) == 1
