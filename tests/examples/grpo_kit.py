"""What the tests of examples/grpo_loop share: the loop as a process, what it left behind, and what it asked for."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil

from forebay.client import Batch, BufferClient
from tests.kit import TIME_LIMIT_S, ServerProcess, children_with, poll_until

LOOP = Path(__file__).parents[2] / "examples" / "grpo_loop" / "loop.py"
START_LIMIT_S = 120.0
SMALL = ["--num-groups", "4", "--group-size", "4", "--num-process", "16"]

Slot = tuple[str, str]
"""Group and slot, as ids name them."""


class LoopProcess:
    """``loop.py`` on a folder, with a budget of four groups of four, if ``more`` says nothing else."""

    def __init__(self, folder: Path, engine_url: str | None = None, *more: str) -> None:
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None
        engine = ["--engine", engine_url] if engine_url else []
        self._command = [sys.executable, str(LOOP), "--dir", str(folder), *engine, *SMALL, *more]

    @contextmanager
    def running(self, num_steps: int) -> Iterator[subprocess.Popen[str]]:
        """The loop on its way to ``num_steps``; killed at the end if it is not there yet."""
        command = [*self._command, "--steps", str(num_steps)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            self.process = process
            parts = psutil.Process(process.pid)
            try:
                yield process
            finally:
                left = [*parts.children(recursive=True)] if process.poll() is None else []
                process.kill()
                psutil.wait_procs(left, TIME_LIMIT_S)

    def history(self) -> list[dict[str, Any]]:
        path = self.folder / "history.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_steps(self, count: int) -> None:
        """Until the history has ``count`` lines. Fails with what the loop printed if it ends before."""

        def reached() -> bool:
            assert self.process is not None
            if self.process.poll() is None:
                return len(self.history()) >= count
            assert self.process.stdout is not None
            raise AssertionError(self.process.stdout.read())

        poll_until(reached, START_LIMIT_S)

    def part(self, module: str) -> psutil.Process:
        """The loop's process that runs a module."""
        assert self.process is not None
        return children_with(self.process.pid, module)[0]

    def stored_slots(self) -> set[Slot]:
        """The slots whose samples the server has."""
        port = json.loads((self.folder / "ports.json").read_text())["server"]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIME_LIMIT_S) as http:
            run = f"/v1/runs/{http.get('/v1/runs').json()['runs'][0]['run_id']}"
            groups = http.get(f"{run}/groups", params={"limit": 1_000}).json()["groups"]
            views = [http.get(f"{run}/groups/{group['group_id']}").json() for group in groups]
        uids = [sample["uid"] for view in views for sample in view["samples"]]
        return {slot_of(uid) for uid in uids}


def slot_of(name: str) -> Slot:
    """Group and slot of a sample's uid (``run-…-GROUP-SLOT``), or of a call's rid (``fb-…-GROUP-SLOT-…``)."""
    _, _, group, slot, *_ = name.split("-")
    return group, slot


def check_history(history: list[dict[str, Any]], num_steps: int) -> None:
    """Each step once, no group in two of them, weights as old as they may be."""
    assert [entry["step"] for entry in history] == list(range(1, num_steps + 1))
    trained = [tuple(group) for entry in history for group in entry["groups"]]
    assert len(trained) == 4 * num_steps
    assert len(set(trained)) == len(trained), "a group was trained on twice"
    for entry in history:
        assert entry["weight_versions"], "samples do not say which weights they are of"
        assert entry["step"] - 1 - 2 <= min(entry["weight_versions"]) <= max(entry["weight_versions"]) < entry["step"]


def read_all_again(folder: Path, directory: Path, num_steps: int) -> Batch:
    """Everything that the loop trained on, read once more from its data."""
    server = ServerProcess(directory, data_dir=folder / "data").start()
    try:
        with BufferClient(server.url) as client:
            client.attach(client.runs()[0].run_id)
            assert [checkpoint.step for checkpoint in client.checkpoints()] == list(range(1, num_steps + 1))
            undone = client.rewind(None)
            assert undone.num_groups >= 4 * num_steps
            batch = client.read(num_groups=4 * num_steps, wait_s=TIME_LIMIT_S, max_staleness=num_steps)
            assert batch is not None
            return batch
    finally:
        server.close()


class _QuietServer(ThreadingHTTPServer):
    """Clients that were killed are no news."""

    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        pass


class RecordingProxy:
    """Hands everything on to an engine, and remembers which slots were asked for."""

    def __init__(self, engine_url: str) -> None:
        self.asked: list[Slot] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._hand_on(None)

            def do_POST(self) -> None:
                self._hand_on(self.rfile.read(int(self.headers["content-length"])))

            def _hand_on(self, body: bytes | None) -> None:
                if self.path == "/v1/chat/completions" and body is not None:
                    proxy.asked.append(slot_of(json.loads(body)["rid"]))
                headers = {"content-type": "application/json"}
                reply = httpx.request(self.command, engine_url + self.path, content=body, headers=headers, timeout=60)
                self.send_response(reply.status_code)
                self.send_header("content-length", str(len(reply.content)))
                self.send_header("content-type", reply.headers.get("content-type", "text/plain"))
                self.end_headers()
                self.wfile.write(reply.content)

            def log_message(self, *_: object) -> None:
                pass

        self._server = _QuietServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serving(self) -> Iterator["RecordingProxy"]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()
