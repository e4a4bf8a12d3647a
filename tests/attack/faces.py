"""The three HTTP faces that are attacked alike: a server, a gateway and an embedded engine, each a real one."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.core.processes.parent_link import frame
from forebay.engines.scripted import ScriptedEngine
from forebay.gateway.spec import GatewaySpec
from forebay.web.connection_limits import ConnectionLimits
from tests.conftest import MakeServer
from tests.kit import TIME_LIMIT_S, poll_until

SHORT = ConnectionLimits(head_timeout_s=4.0, body_timeout_s=4.0, idle_timeout_s=5.0)
"""Longer than a machine with other work stands still, and much shorter than the defaults."""
CONTROL_KEY = "control"


@dataclass
class Face:
    """Where it listens, its process, and two routes: one that needs no body, and one that reads one."""

    port: int
    pid: int
    get: bytes
    post: bytes

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=TIME_LIMIT_S)

    def sends(self, request: bytes) -> bytes:
        """All that comes back until the connection is closed."""
        with self.connect() as opened:
            with suppress(ConnectionError):
                opened.sendall(request)
            return everything(opened)

    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def everything(opened: socket.socket) -> bytes:
    """What comes until the other side closes."""
    parts = []
    with suppress(ConnectionError):
        while part := opened.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


@contextmanager
def open_face(kind: str, make_server: MakeServer, limits: ConnectionLimits = SHORT, **settings: Any) -> Iterator[Face]:
    """``server``, ``gateway`` or ``engine``. ``settings`` are those that server and gateway have in common."""
    if kind == "server":
        server = make_server(**vars(limits), **settings)
        yield Face(server.port, server.pid, b"/healthz", b"/v1/runs")
    elif kind == "gateway":
        with _gateway(limits, settings) as (port, pid):
            yield Face(port, pid, b"/gateway/healthz", b"/gateway/runs/a")
    else:
        with ScriptedEngine(lambda _: "four", limits=limits).in_thread() as engine:
            yield Face(int(engine.url.rpartition(":")[2]), os.getpid(), b"/health", b"/tokenize")


@contextmanager
def _gateway(limits: ConnectionLimits, settings: dict[str, Any]) -> Iterator[tuple[int, int]]:
    sizes = {"max_body_bytes": 1 << 26, "max_bodies_bytes": 1 << 27} | settings
    with socket.create_server(("127.0.0.1", 0), backlog=2_048) as listening:
        ours, theirs = socket.socketpair()
        fds = (listening.fileno(), theirs.fileno())
        command = [sys.executable, "-m", "forebay.gateway", *map(str, fds), str(os.getpid())]
        with theirs:
            process = subprocess.Popen(command, pass_fds=fds)
        ours.sendall(frame(GatewaySpec(CONTROL_KEY, "", connections=limits, **sizes)))
        try:
            yield listening.getsockname()[1], process.pid
        finally:
            process.terminate()
            process.wait(TIME_LIMIT_S)
            ours.close()


def request(method: bytes, path: bytes, *headers: bytes, body: bytes = b"") -> bytes:
    """One request; the gateway's control key goes with each."""
    key = b"Authorization: Bearer " + CONTROL_KEY.encode()
    return b"\r\n".join([method + b" " + path + b" HTTP/1.1", b"Host: localhost", key, *headers, b"", body])


def closes(opened: socket.socket) -> bytes:
    """Waits until the other side has closed; what it said."""
    return poll_until(lambda: (everything(opened),))[0]


def told(answer: bytes) -> tuple[int, Any]:
    """Status and JSON body of an answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)
