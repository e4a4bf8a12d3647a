"""Refusing costs no line each: who floods a server with what is no request does not fill its log."""

import re
import socket
import time
from pathlib import Path

import httpx
import pytest

from tests.conftest import MakeServer
from tests.kit import TIME_LIMIT_S, ServerProcess, poll_until, write_generator

TELLS = """
import threading
TASK_TYPE = "tells"
def run_rollout(data):
    print(data["remote_buffer_url"])
    threading.Event().wait()
"""
NUM_GARBAGE = 300
LINE = "Invalid HTTP request received"


def send_garbage(url: str) -> None:
    parsed = httpx.URL(url)
    for _ in range(NUM_GARBAGE):
        with socket.create_connection((parsed.host, parsed.port or 80), timeout=TIME_LIMIT_S) as connection:
            connection.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
            connection.recv(100)


@pytest.mark.parametrize("whose", ["server", "gateway"])
def test_a_flood_of_garbage_is_counted(make_server: MakeServer, tmp_path: Path, whose: str) -> None:
    write_generator(tmp_path / "tasks", TELLS, "tells_generator.py")
    server = make_server(generators=tmp_path / "tasks", start_wait_s=60)
    url = server.url
    if whose == "gateway":
        run = server.start_run("tells", remote_engine_url="http://127.0.0.1:9")
        lines = poll_until(lambda: run.client.get(f"{run.path}/log").json()["lines"])
        link = next(line for line in lines if "/w/" in line)
        url = httpx.post(f"{link}/gateway", timeout=TIME_LIMIT_S).json()["url"]
    began_s = time.monotonic()
    send_garbage(url)
    poll_until(lambda: num_told(written(server)) >= NUM_GARBAGE)
    num_windows = 1 + (time.monotonic() - began_s) / 10
    assert len(written(server)) <= 2 * (1 + num_windows), "two for each ten seconds"


def written(server: ServerProcess) -> list[str]:
    return [line for line in server.log(10_000_000).splitlines() if LINE in line]


def num_told(lines: list[str]) -> int:
    """So many refusals are told by these lines, one by one or counted."""
    counted = [int(number) for line in lines for number in re.findall(r"\((\d+) more in", line)]
    return sum(counted) + sum("more in" not in line for line in lines)
