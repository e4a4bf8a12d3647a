"""Refusing costs no line each: who floods a server with what is no request does not fill its log."""

import re
import socket
from pathlib import Path

import httpx
import pytest

from tests.conftest import MakeServer
from tests.kit import TIME_LIMIT_S, poll_until, write_generator

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
    send_garbage(url)
    poll_until(lambda: f"{LINE}. (" in server.log())
    written = [line for line in server.log(10_000_000).splitlines() if LINE in line]
    counted = sum(int(number) for line in written for number in re.findall(r"\((\d+) more in", line))
    assert len(written) <= 6, "two for each ten seconds"
    assert counted + sum("more in" not in line for line in written) >= NUM_GARBAGE
