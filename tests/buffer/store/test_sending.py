"""Stored bodies sent straight to a socket: the bytes that a reply is made of, whatever the client does meanwhile."""

import asyncio
import hashlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from forebay.buffer.store.abc import Edited, Outbound, Slice, num_sent
from forebay.buffer.store.journal import JournalStore
from forebay.buffer.store.log_segments import segment_path
from forebay.core.errors import StorageFailed
from forebay.core.records.rows import Location, SampleRow

SIZES = {"short": 4_000, "middling": 40_000, "long": 200_000}


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[JournalStore]:
    async with JournalStore(tmp_path, segment_bytes=2 << 20) as store:
        yield store


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The server's end, which does not block, and the client's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    server.setblocking(False)
    with server, client:
        yield server, client


def body_of(number: int, size: int) -> bytes:
    return (b"%06d " % number * (size // 7 + 1))[:size]


def row_of(number: int) -> SampleRow:
    return SampleRow(
        run_id="run",
        uid=str(number),
        instance_id=1,
        group_id="group",
        epoch=0,
        slot=number,
        outcome="member",
        reward=1.0,
        at_s=0.0,
        received_at_s=0.0,
    )


async def stored(store: JournalStore, count: int, size: int) -> list[Location]:
    """Where the bodies of so many samples lie."""
    appended = [store.append([row_of(n)], body_of(n, size)) for n in range(count)]
    found = [await location for location in appended]
    return [location for location in found if location is not None]


def pieces_of(locations: list[Location]) -> tuple[list[Outbound], bytes]:
    """A reply of every kind of piece, and its bytes."""
    pieces: list[Outbound] = [b"["]
    expected = [b"["]
    for number, at in enumerate(locations):
        body = body_of(number, at.length)
        pieces += [Edited(at, 100, 103, b"<new>"), Slice(at, 7, 70), b"..."]
        expected += [body[:100], b"<new>", body[103:], b",", body[7:70], b"..."]
    return pieces, b"".join(expected)


def sha256(data: bytes) -> str:
    """What is compared: the difference of two long texts takes minutes to print."""
    return hashlib.sha256(data).hexdigest()


def received(client: socket.socket, num_bytes: int) -> bytes:
    parts = []
    while num_bytes > 0 and (part := client.recv(min(num_bytes, 1 << 16))):
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
async def test_a_client_gets_every_byte_in_order(
    store: JournalStore, connection: tuple[socket.socket, socket.socket], size: int
) -> None:
    server, client = connection
    pieces, expected = pieces_of(await stored(store, 6_000_000 // size, size))
    assert sum(map(num_sent, pieces)) == len(expected)
    got = asyncio.create_task(asyncio.to_thread(received, client, len(expected)))
    assert await store.send(pieces, server)
    assert sha256(await got) == sha256(expected)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
async def test_a_client_that_waits_holds_up_nobody_and_loses_nothing(
    store: JournalStore, connection: tuple[socket.socket, socket.socket], size: int
) -> None:
    server, client = connection
    pieces, expected = pieces_of(await stored(store, 6_000_000 // size, size))
    sending = asyncio.create_task(store.send(pieces, server))
    await store.load_runs()  # other work goes on
    assert not sending.done()
    assert sha256(await asyncio.to_thread(received, client, len(expected))) == sha256(expected)
    assert await sending


async def test_a_client_that_goes_away_is_told_of(
    store: JournalStore, connection: tuple[socket.socket, socket.socket]
) -> None:
    server, client = connection
    pieces, _ = pieces_of(await stored(store, 60, 200_000))
    sending = asyncio.create_task(store.send(pieces, server))
    await asyncio.to_thread(received, client, 1_000)
    client.close()
    with pytest.raises(ConnectionError):
        await sending


async def test_whoever_stops_waiting_gets_the_socket_back_at_once(
    store: JournalStore, connection: tuple[socket.socket, socket.socket]
) -> None:
    server, client = connection
    pieces, _ = pieces_of(await stored(store, 60, 200_000))
    sending = asyncio.create_task(store.send(pieces, server))
    await asyncio.to_thread(received, client, 1_000)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert server.fileno() >= 0


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
async def test_a_segment_that_is_cut_off_under_way_is_no_crash(
    store: JournalStore, connection: tuple[socket.socket, socket.socket], tmp_path: Path, size: int
) -> None:
    server, client = connection
    locations = await stored(store, 6_000_000 // size, size)
    pieces, expected = pieces_of(locations)
    sending = asyncio.create_task(store.send(pieces, server))
    assert await asyncio.to_thread(received, client, 1_000) == expected[:1_000]
    for segment in {location.segment for location in locations}:
        os.truncate(segment_path(tmp_path / "segments", segment), 4_096)
    taking = asyncio.create_task(asyncio.to_thread(received, client, len(expected)))
    with pytest.raises(StorageFailed):
        await sending
    server.shutdown(socket.SHUT_WR)
    rest = await taking
    assert len(rest) < len(expected) - 1_000, "nobody takes it for a whole reply"
