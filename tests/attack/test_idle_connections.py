"""Connections that show no key leave descriptors for those who have one, and for the journal."""

import os
from contextlib import ExitStack

import httpx
import pytest

from tests.attack.raw_requests import connected, head
from tests.conftest import MakeServer
from tests.kit import make_sample

MAX_OPEN_FILES = 200
NUM_IDLE = 300
NUM_WRITES = 100
TOKEN = {"Authorization": "Bearer a-secret"}
HEALTH = head("GET", "/healthz", "Host: 127.0.0.1")


@pytest.mark.parametrize("sent", [b"", HEALTH[:20], HEALTH], ids=["nothing", "half a head", "no key"])
def test_idle_connections_leave_descriptors_for_writers(make_server: MakeServer, sent: bytes) -> None:
    limited = ("prlimit", f"--nofile={MAX_OPEN_FILES}")
    server = make_server(command_prefix=limited, token="a-secret", segment_bytes=1 << 16)
    server.client.headers.update(TOKEN)
    run = server.start_run(group_size=2)
    run.wait_for_state("running")
    with ExitStack() as stack:
        kept = stack.enter_context(httpx.Client(base_url=server.url, headers=TOKEN, timeout=30))
        assert kept.get(run.path).status_code == 200
        for _ in range(NUM_IDLE):
            stack.enter_context(connected(server.url)).sendall(sent)

        def write(client: httpx.Client, number: int) -> int:
            sample = make_sample(instance_id=f"task-{number}", text="x" * 8_000)
            return client.post(f"{run.path}/samples", json=[sample]).status_code

        assert [write(kept, number) for number in range(NUM_WRITES)] == [200] * NUM_WRITES
        for number in range(NUM_WRITES):
            with httpx.Client(base_url=server.url, headers=TOKEN, timeout=30) as fresh:
                assert write(fresh, NUM_WRITES + number) == 200
        assert len(os.listdir(f"/proc/{server.pid}/fd")) < MAX_OPEN_FILES - 20
