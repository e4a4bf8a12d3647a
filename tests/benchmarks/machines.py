"""What the benchmarks measure with: the floor, CPU time of a process, a loopback transfer, a pass, and a table."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table
from xxhash import xxh3_64_intdigest

CHUNK_BYTES = 256 << 10
WINDOW_BYTES = 128 << 10
PROVED_BYTES = 128 << 20


@contextmanager
def floor_server() -> Iterator[tuple[str, int]]:
    """URL and process id of a bare uvicorn app that reads bodies."""
    script = Path(__file__).with_name("floor_app.py")
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.kill()
        process.communicate()


class Cpu:
    """CPU time of a process, from the making of this object."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._began_s = self._now_s()

    def _now_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system

    @property
    def used_s(self) -> float:
        return self._now_s() - self._began_s


def loopback_seconds(num_bytes: int) -> float:
    """How long the same bytes take over a bare TCP connection of this machine, from a waiting sender."""
    chunk = b"x" * CHUNK_BYTES
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = threading.Thread(target=_send_all, args=(listener, chunk, num_bytes))
        sender.start()
        with socket.create_connection(listener.getsockname()) as receiver:
            began_s = time.perf_counter()
            left = num_bytes
            while left > 0:
                left -= len(receiver.recv(CHUNK_BYTES))
            took_s = time.perf_counter() - began_s
        sender.join()
    return took_s


def proof_seconds(num_bytes: int) -> float:
    """How long one pass over so many bytes of a file in the page cache takes that computes their checksum."""
    with tempfile.TemporaryFile() as file:
        # Less than all of it, several times: what counts is that it does not fit into a cache.
        num_written = min(num_bytes, PROVED_BYTES)
        file.write(b"x" * num_written)
        file.flush()
        window = memoryview(bytearray(WINDOW_BYTES))
        began_s = time.perf_counter()
        for at in range(0, num_bytes, WINDOW_BYTES):
            os.preadv(file.fileno(), [window], at % num_written)
            xxh3_64_intdigest(window)
        return time.perf_counter() - began_s


def _send_all(listener: socket.socket, chunk: bytes, num_bytes: int) -> None:
    connection, _ = listener.accept()
    with connection:
        for at in range(0, num_bytes, len(chunk)):
            connection.sendall(chunk[: num_bytes - at])


def request_seconds(url: str, request: bytes) -> tuple[float, int]:
    """How long a reply takes to its last byte, and its size, read as bare as ``loopback_seconds`` reads."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        began_s = time.perf_counter()
        connection.sendall(request)
        head, _, body = _head(connection).partition(b"\r\n\r\n")
        size = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        left = size - len(body)
        while left > 0:
            left -= len(connection.recv(CHUNK_BYTES))
        return time.perf_counter() - began_s, size


def _head(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(CHUNK_BYTES)
    return data


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=110).print(table)
