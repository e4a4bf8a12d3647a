"""Connections that show no key leave descriptors for those who have one, and for the journal."""

import json
import os
from contextlib import ExitStack

import pytest

from tests.attack.raw_requests import ask_raw, connected, head, reply_to
from tests.conftest import MakeServer
from tests.kit import NativeRun, make_sample

MAX_OPEN_FILES = 200
NUM_IDLE = 300
NUM_WRITES = 100
HEALTH = head("GET", "/healthz", "Host: 127.0.0.1")
REFUSED = head("POST", "/v1/runs", "Host: 127.0.0.1", "Content-Length: 100000") + b"{"
SENT = {"nothing": b"", "half a head": HEALTH[:20], "no key": HEALTH, "half a body without a key": REFUSED}


def write(run: NativeRun, instance_id: str) -> bytes:
    """A request that writes a sample."""
    body = json.dumps([make_sample(instance_id=instance_id, text="x" * 8_000)]).encode()
    headers = ("Host: 127.0.0.1", "Authorization: Bearer a-secret", f"Content-Length: {len(body)}")
    return head("POST", f"{run.path}/samples", *headers) + body


@pytest.mark.parametrize("sent", SENT.values(), ids=SENT)
def test_idle_connections_leave_descriptors_for_writers(make_server: MakeServer, sent: bytes) -> None:
    limited = ("prlimit", f"--nofile={MAX_OPEN_FILES}")
    server = make_server(command_prefix=limited, token="a-secret", segment_bytes=1 << 16)
    server.client.headers["Authorization"] = "Bearer a-secret"
    run = server.start_run(group_size=2)
    run.wait_for_state("running")
    with ExitStack() as stack:
        kept = stack.enter_context(connected(server.url))
        assert reply_to(kept, write(run, "first")).status == 200
        for _ in range(NUM_IDLE):
            stack.enter_context(connected(server.url)).sendall(sent)
        # On the connection that has written before, which is the oldest of all, and on new ones.
        assert [reply_to(kept, write(run, f"kept-{n}")).status for n in range(NUM_WRITES)] == [200] * NUM_WRITES
        assert [ask_raw(server.url, write(run, f"new-{n}")).status for n in range(NUM_WRITES)] == [200] * NUM_WRITES
        assert len(os.listdir(f"/proc/{server.pid}/fd")) < MAX_OPEN_FILES - 20
