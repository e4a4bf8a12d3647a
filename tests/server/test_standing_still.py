"""Clients that stop reading in the middle of a reply, or read slowly, by connections of which the test has the end."""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import MakeServer
from tests.kit import TIME_LIMIT_S, NativeRun, ServerProcess, SlimeRun, make_group, poll_until

NUM_GROUPS = 4
PADDING = "x" * 1_500_000
"""Of each sample; the batch of all groups is larger than what the kernel holds of it."""
PIECE_BYTES = 64 << 10
PACE_S = 0.035


class Reader:
    """A client that has sent a request, and so far reads no more than the beginning of the reply."""

    def __init__(self, server: ServerProcess, method: str, path: str, **body: Any) -> None:
        content = json.dumps(body).encode()
        self._socket = socket.socket()
        self._socket.settimeout(TIME_LIMIT_S)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE_BYTES)
        self._socket.connect(("127.0.0.1", server.port))
        self._socket.sendall(
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        )
        self._socket.sendall(content)
        head, self._begun = self._socket.recv(4_000).split(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        self.num_bytes = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def read_on(self, pace_s: float = 0.0) -> bytes:
        """All that comes, a piece every ``pace_s``."""
        got = bytearray(self._begun)
        while len(got) < self.num_bytes and (piece := receive(self._socket)):
            got += piece
            time.sleep(pace_s)
        return bytes(got)

    def half_close(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)


def receive(connection: socket.socket) -> bytes:
    """What comes next; nothing where the connection has ended, in whichever way."""
    try:
        return connection.recv(PIECE_BYTES)
    except ConnectionError:
        return b""


@pytest.fixture(scope="module", params=["journal", "memory"], ids=["past the framework", "through it"])
def server(request: pytest.FixtureRequest, module_servers: MakeServer) -> ServerProcess:
    return module_servers(store=request.param)


@pytest.fixture
def run(server: ServerProcess) -> Iterator[NativeRun]:
    """A run with ``NUM_GROUPS`` groups, during which nothing is logged as an error."""
    run = server.start_run(group_size=2)
    fill(run)
    yield run
    run.stop()
    assert "ERROR" not in server.log()


def fill(run: NativeRun) -> None:
    for number in range(NUM_GROUPS):
        run.write(*make_group(number, [0.0, 1.0], padding=PADDING))


def ask(run: NativeRun, **body: Any) -> Reader:
    return Reader(run.server, "POST", f"{run.path}/batches", num_groups=NUM_GROUPS, **body)


def states(run: NativeRun) -> set[str]:
    return {group["state"] for group in run.groups()}


def test_a_reader_that_stops_reading_has_its_groups_no_longer_than_its_lease(run: NativeRun) -> None:
    with ask(run, lease_s=0.1) as reader:
        poll_until(lambda: states(run) == {"ready"})
        assert [batch["state"] for batch in run.batches()] == ["released"]
        assert len(run.read(num_groups=NUM_GROUPS)["data"]) == 2 * NUM_GROUPS
        assert len(reader.read_on()) < reader.num_bytes


def test_a_reader_that_reads_slowly_is_left_alone(run: NativeRun) -> None:
    lease_s = 5.0
    with ask(run, lease_s=lease_s) as reader:
        began_s = time.monotonic()
        rows = json.loads(reader.read_on(PACE_S))["data"]
    assert time.monotonic() - began_s > lease_s
    assert len(rows) == 2 * NUM_GROUPS


def test_a_batch_that_arrived_expires_though_an_older_reply_stands_still(run: NativeRun) -> None:
    with ask(run, lease_s=5, request_id="again") as dead:
        batch = run.read(num_groups=NUM_GROUPS, request_id="again")
        poll_until(lambda: states(run) == {"ready"})
        assert [(each["batch_id"], each["state"]) for each in run.batches()] == [(batch["batch_id"], "expired")]
        assert run.ack(batch)["state"] == "acked"
        assert len(dead.read_on()) < dead.num_bytes
    assert states(run) == {"acked"}


def test_a_reply_whose_batch_is_taken_away_ends_without_an_error(run: NativeRun) -> None:
    with ask(run) as revoked, ask_again(run) as released:
        run.release(run.batches()[1])
        run.rewind(None)
        assert len(run.take(num_groups=NUM_GROUPS + 1)["data"]) == 2 * NUM_GROUPS + 2
        for reader in (revoked, released):
            assert len(reader.read_on()) < reader.num_bytes
    assert states(run) == {"acked"}


def ask_again(run: NativeRun) -> Reader:
    """Another reader, of one more group."""
    run.write(*make_group("more", [0.0, 1.0], padding=4 * PADDING))
    return Reader(run.server, "POST", f"{run.path}/batches", num_groups=1)


def begin_write(run: NativeRun | SlimeRun, path: str = "") -> socket.socket:
    """A client that stops in the middle of a request."""
    writer = socket.create_connection(("127.0.0.1", run.server.port), TIME_LIMIT_S)
    path = path or f"{run.path}/samples"
    writer.sendall(f'POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{{"uid":'.encode())
    return writer


def test_a_server_ends_soon_though_replies_and_requests_stand_still(server: ServerProcess) -> None:
    run, slime = server.start_run(group_size=2), server.start_slime("still", group_size=2)
    fill(run)
    fill(slime)
    slime.write(*make_group("large", [0.0, 1.0], padding=4 * PADDING))
    path = f"{slime.path}/groups/{slime.groups()[-1]['group_id']}?bodies=true"
    reads = ask(run), Reader(server, "POST", f"{slime.prefix}/get_rollout_data"), Reader(server, "GET", path)
    reads[0].half_close()
    writes = begin_write(run), begin_write(slime, f"{slime.prefix}/buffer/write")
    assert server.stop() == 0, "within its time limit, though they would stand still for ever"
    for reader in reads:
        with reader:
            assert len(reader.read_on()) < reader.num_bytes
    for writer in writes:
        with writer:
            assert receive(writer) == b"", "its sample was not stored, and it is not told that it was"
    assert "ERROR" not in server.log()
    server.restart()
    if server.settings["FOREBAY_STORE"] == "journal":
        assert states(run) == states(slime) == {"ready"}
