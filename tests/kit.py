"""What tests share: valid samples, a real server process, and runs whose samples the test writes itself."""

import os
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import httpx
import psutil
import pytest

from forebay.client import SampleWriter
from tests import preloaded

Json = dict[str, Any]
T = TypeVar("T")

TIME_LIMIT_S = 30.0
"""For what takes well under a second on an idle machine."""

FAILS_WITH_A_HINT = """
from forebay.core.errors import InvalidInput
TASK_TYPE = "hints"
def run_rollout(data):
    raise InvalidInput("no such dataset", hint="mount it")
"""
IDLE = """
import threading
TASK_TYPE = "idle"
def run_rollout(data):
    threading.Event().wait()
"""
"""A generator file that leaves writing to the test."""


def make_sample(**changes: Any) -> Json:
    """A valid sample; ``changes`` replace or add fields, and a change to ``...`` removes one."""
    sample = {
        "uid": f"uid-{os.urandom(6).hex()}",
        "instance_id": "task-1",
        "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
        "reward": 1.0,
        "extra_info": {"finish_reason": "stop", "timestamp": "1700000000.5"},
    }
    return {name: value for name, value in (sample | changes).items() if value is not ...}


def make_group(instance_id: str | int, rewards: Sequence[float | None], **changes: Any) -> list[Json]:
    """A sample per reward, with uids that tell instance and position."""
    return [
        make_sample(uid=f"{instance_id}/{n}", instance_id=instance_id, reward=reward, **changes)
        for n, reward in enumerate(rewards)
    ]


def poll_until(condition: Callable[[], T], timeout_s: float = TIME_LIMIT_S) -> T:
    """Ask until the answer is true, and return it: for what another process does and cannot announce."""
    until_s = time.monotonic() + timeout_s
    pause_s = 0.005
    while not (answer := condition()):
        if time.monotonic() > until_s:
            raise AssertionError(f"not within {timeout_s} s: {getattr(condition, '__qualname__', condition)}")
        time.sleep(pause_s)
        pause_s = min(1.25 * pause_s, 0.05)  # asking often would slow down what is waited for
    return answer


def damage(data_dir: Path, stored: bytes) -> None:
    """Flip a bit of what one segment has stored; the server may be writing more behind it."""
    segments = (data_dir / "segments").glob("*.log")
    [(path, at)] = [(path, at) for path in segments if (at := path.read_bytes().find(stored)) >= 0]
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([stored[0] ^ 1]))


def children_with(pid: int, word: str) -> list[psutil.Process]:
    """What ``pid`` has started with ``word`` on its command line; of a server, other processes come and go."""
    found = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.Error):  # it has ended since it was listed
            if word in child.cmdline():
                found.append(child)
    return found


def write_generator(folder: Path, source: str, name: str = "idle_generator.py") -> Path:
    """Put a generator file into ``folder``, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(source)
    return path


def run_ids(server: "ServerProcess") -> list[str]:
    """The ids of the newest runs, newest first."""
    return [run["run_id"] for run in server.client.get("/v1/runs").json()["runs"]]


def assert_error(response: httpx.Response, status: int, code: str, field: str | None = None) -> Json:
    """The one error body; what is in it."""
    assert response.status_code == status, response.text
    body = response.json()
    error: Json = body["error"]
    assert set(error) == {"code", "message", "hint"} | ({"field"} if field else set()), error
    assert error["code"] == code, error
    assert error["message"]
    if field:
        assert error["field"] == field, error
    if not response.request.url.path.startswith("/v1/") and "success" in body:
        assert body["success"] is False
        assert body["message"].startswith(error["message"])
    return error


@dataclass
class NativeRun:
    """A run on a server, over ``/v1``."""

    server: "ServerProcess"
    run_id: str

    @property
    def client(self) -> httpx.Client:
        """The server's present one: a restart makes another."""
        return self.server.client

    @property
    def path(self) -> str:
        return f"/v1/runs/{self.run_id}"

    def view(self) -> Json:
        return _ok(self.client.get(self.path))

    def write(self, *samples: Json) -> list[Json]:
        """Write samples at once; each one's verdict."""
        verdicts: list[Json] = _ok(self.client.post(f"{self.path}/samples", json=list(samples)))["results"]
        return verdicts

    def send(self, samples: Iterable[Json]) -> None:
        """Write samples with the client's writer, which sends arrays as such."""
        with SampleWriter(self.server.url, self.run_id) as writer:
            for sample in samples:
                writer.write(sample)

    def read(self, **body: Any) -> Json:
        return _ok(self.client.post(f"{self.path}/batches", json=body))

    def take(self, **body: Any) -> Json:
        """Read and acknowledge a batch that is there."""
        batch = self.read(**body)
        self.ack(batch)
        return batch

    def ack(self, batch: Json) -> Json:
        return _ok(self.client.post(f"{self.path}/batches/{batch['batch_id']}/ack"))

    def release(self, batch: Json) -> Json:
        return _ok(self.client.post(f"{self.path}/batches/{batch['batch_id']}/release"))

    def extend(self, batch: Json, **body: Any) -> Json:
        return _ok(self.client.post(f"{self.path}/batches/{batch['batch_id']}/extend", json=body))

    def checkpoint(self, step: int, *batches: Json) -> Json:
        """Fix these batches; without any, all that are acknowledged."""
        named = {"batch_ids": [batch["batch_id"] for batch in batches]} if batches else {}
        return _ok(self.client.post(f"{self.path}/checkpoints", json={"step": step, **named}))

    def rewind(self, step: int | None) -> Json:
        return _ok(self.client.post(f"{self.path}/rewind", json={"step": step}))

    def batches(self, **query: Any) -> list[Json]:
        batches: list[Json] = _ok(self.client.get(f"{self.path}/batches", params=query))["batches"]
        return batches

    def groups(self, **query: Any) -> list[Json]:
        groups: list[Json] = _ok(self.client.get(f"{self.path}/groups", params={"limit": 1_000, **query}))["groups"]
        return groups

    def group(self, group_id: str) -> Json:
        """One group with its samples."""
        return _ok(self.client.get(f"{self.path}/groups/{group_id}"))

    def closed(self, num: int = 1, timeout_s: float = TIME_LIMIT_S) -> list[Json]:
        """The closed groups, once there are ``num``: a long poll."""
        until_s = time.monotonic() + timeout_s
        while (left_s := until_s - time.monotonic()) > 0:
            query = {"after": num - 1, "wait_s": min(left_s, 20)}
            told = _ok(self.client.get(f"{self.path}/closed_groups", params=query))
            if told["groups"]:
                break
            if told["run_state"] not in ("validating", "running"):  # then the feed answers at once
                time.sleep(0.05)
        groups: list[Json] = _ok(self.client.get(f"{self.path}/closed_groups"))["groups"]
        assert len(groups) >= num, groups
        return groups

    def stop(self) -> Json:
        return _ok(self.client.post(f"{self.path}/stop"))

    def wait_for_state(self, state: str, timeout_s: float = TIME_LIMIT_S) -> Json:
        """The run, once it is in ``state``."""
        return poll_until(lambda: view if (view := self.view())["state"] == state else {}, timeout_s)


@dataclass
class SlimeRun(NativeRun):
    """The same, written and read over slime's routes: those at the root, or those of a named stream."""

    prefix: str = ""

    def send(self, sample: Json) -> httpx.Response:
        return self.client.post(f"{self.prefix}/buffer/write", json=sample)

    def fetch(self, **body: Any) -> Json:
        return _ok(self.client.post(f"{self.prefix}/get_rollout_data", json=body))


def _ok(response: httpx.Response) -> Json:
    assert response.is_success, f"{response.status_code}: {response.text}"
    answer: Json = response.json()
    return answer


class ServerProcess:
    """``forebay serve`` as its own process, with its files below ``directory``. Settings go by the environment.

    ``is_preloaded`` has it forked from a process that has loaded its modules. ``command_prefix`` is a program that
    starts it, as ``nice`` does.
    """

    def __init__(
        self,
        directory: Path,
        *,
        generators: Path | None = None,
        data_dir: Path | None = None,
        env: dict[str, str] | None = None,
        config: Path | None = None,
        flags: Sequence[str] = (),
        is_preloaded: bool = False,
        command_prefix: Sequence[str] = (),
        **settings: object,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.generators = generators or directory / "tasks"
        write_generator(self.generators, IDLE)
        self.data_dir = data_dir or directory / "data"
        self.log_path = directory / "server.log"
        self.port = 0
        self._kept_port: socket.socket | None = None
        settings.setdefault("start_wait_s", TIME_LIMIT_S)  # what an inspection finds is told by the start itself
        self._client_limit_s = TIME_LIMIT_S + float(str(settings["start_wait_s"]))  # a start may take its wait
        self.client = httpx.Client(timeout=self._client_limit_s)
        self._env = dict(env or {})
        self._is_preloaded = is_preloaded
        self._flags = [*(["--config", str(config)] if config else []), *flags]
        self._command_prefix = command_prefix
        settings.setdefault("reserve_bytes", 1 << 20)  # the disk of those who run tests is small
        self.settings = {f"FOREBAY_{name.upper()}": str(value) for name, value in settings.items()}
        self._process: subprocess.Popen[str] | preloaded.ForkedServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> Self:
        """Start, on the port of the time before if there was one, and wait until it listens."""
        self._keep_port()
        flags = ["--port", str(self.port), "--data-dir", str(self.data_dir), "--generators", str(self.generators)]
        flags += self._flags
        env = {**os.environ, **self._env, **self.settings}
        with self.log_path.open("a") as log:
            forked = preloaded.launch(["serve", *flags], self.directory, env, log) if self._is_preloaded else None
            self._process = forked or subprocess.Popen(
                [*self._command_prefix, preloaded.PYTHON, "-m", "forebay.server.cli", "serve", *flags],
                cwd=self.directory,
                env=env,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._process.stdout is not None
        line = first_line(self._process.stdout, TIME_LIMIT_S)
        assert line.startswith("forebay listens on http://"), f"{line!r}; its log:\n{self.log()}"
        self.port = int(line.rpartition(":")[2])
        self._renew_client()
        return self

    def _keep_port(self) -> None:
        """A bound socket that does not listen: while the server is down, nobody else is given its port."""
        if self._kept_port is None:
            self._kept_port = socket.socket()
            self._kept_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server's, which binds it too
            self._kept_port.bind(("127.0.0.1", 0))
            self.port = self._kept_port.getsockname()[1]

    def _renew_client(self) -> None:
        """Connections to a process that is gone are of no use."""
        self.client.close()
        self.client = httpx.Client(base_url=self.url, timeout=self._client_limit_s)

    def kill9(self) -> None:
        """End the process without a word."""
        if self._process is not None:
            self._process.kill()
            self._reap()

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        if self._process is None:
            return 0
        self._process.terminate()
        return self._reap()

    def _reap(self) -> int:
        assert self._process is not None
        assert self._process.stdout is not None
        status = self._process.wait(TIME_LIMIT_S)
        self._process.stdout.close()
        self._process = None
        return status

    def restart(self) -> Self:
        """Start again after ``kill9`` or ``stop``, with the same port and data."""
        return self.start()

    def close(self) -> None:
        """Whatever a test did to it, leave nothing behind."""
        self.kill9()
        self.client.close()
        if self._kept_port is not None:
            self._kept_port.close()

    def log(self, num_bytes: int = 20_000) -> str:
        """The end of what it logged."""
        return self.log_path.read_text(errors="replace")[-num_bytes:]

    def start_run(self, task_type: str = "idle", group_size: int = 4, **payload: Any) -> NativeRun:
        """Start a run over ``/v1``; without a task type, one that leaves writing to the test."""
        body = {"task_type": task_type, "group_size": group_size, **payload}
        return NativeRun(self, _ok(self.client.post("/v1/runs", json=body))["run_id"])

    def start_slime(self, name: str = "", task_type: str = "idle", group_size: int = 4, **payload: Any) -> SlimeRun:
        """Start a run as slime's client does, under ``name``."""
        prefix = f"/s/{name}" if name else ""
        body = {"task_type": task_type, "num_repeat_per_sample": str(group_size), **payload}
        started = _ok(self.client.post(f"{prefix}/start_rollout", json=body))
        return SlimeRun(self, started["run_id"], prefix)


def first_line(stream: IO[str], timeout_s: float) -> str:
    """The first line that comes within ``timeout_s``; empty if there is none."""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return stream.readline().strip() if selector.select(timeout_s) else ""


def metric(server: ServerProcess, name: str) -> float:
    """The value of a metric of the server; 0 if it has none."""
    page = server.client.get("/metrics").text
    return next((float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(f"{name} ")), 0.0)


def interpreter(variable: str, packages: str, command: str) -> str:
    """The interpreter that ``variable`` names, of an install.sh's environment. Skips the test without one."""
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} does not name an interpreter with {packages}: run `{command}`")
    return python
