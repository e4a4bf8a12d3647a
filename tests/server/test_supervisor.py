"""The supervisor over real run processes: restart, failure, stop, shutdown, and the death of the server."""

import asyncio
import json
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from forebay.core.backoff import Backoff
from forebay.core.ids import run_rid_prefix
from forebay.engines.scripted import Reply, ScriptedEngine
from forebay.generators.process.code_copy import copy_code
from forebay.server.runs.process import ProcessOutcome
from forebay.server.runs.supervisor import LaunchSpec, Supervisor, restart_pauses

HEADER = """
import json, multiprocessing, os, signal, subprocess, sys, threading, time
from pathlib import Path
TASK_TYPE = "t"
RUN = Path(__file__).parent.parent
def children():
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)); child.start()
    other = subprocess.Popen(["sleep", "600"])
    draft = RUN / "pids.draft"
    draft.write_text(json.dumps([os.getpid(), child.pid, other.pid]))
    draft.rename(RUN / "pids")
"""
FOR_EVER = "def run_rollout(data):\n    children()\n    threading.Event().wait(600)\n"
AT_ONCE = partial(Backoff, 0.0)


class Host:
    """A run host that remembers what it was told, and lets a test wait for it."""

    def __init__(self) -> None:
        self.payloads = 0
        self.started: list[tuple[str, int]] = []
        self.noted: list[str] = []
        self.ended: list[tuple[str, ProcessOutcome]] = []
        self._changed = asyncio.Condition()

    async def launch_payload(self, run_id: str) -> dict[str, Any]:
        self.payloads += 1
        return {"run_id": run_id, "asked": self.payloads}

    async def process_started(self, run_id: str, attempt: int) -> None:
        await self._tell(self.started, (run_id, attempt))

    async def earlier_traces(self, run_id: str) -> list[str]:
        return []

    def process_settings(self, run_id: str) -> None:
        """Nothing is traced."""

    def note_process(self, run_id: str, what: str) -> None:
        self.noted.append(what)

    async def process_ended(self, run_id: str, outcome: ProcessOutcome) -> None:
        await self._tell(self.ended, (run_id, outcome))

    async def _tell(self, told: list[Any], entry: object) -> None:
        async with self._changed:
            told.append(entry)
            self._changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(condition)

    async def outcome(self) -> ProcessOutcome:
        await self.until(lambda: bool(self.ended))
        return self.ended[0][1]


@pytest.fixture
def host() -> Host:
    return Host()


def make_spec(tmp_path: Path, body: str, run_id: str = "run-0123456789ab", **values: Any) -> LaunchSpec:
    source = tmp_path / "tasks" / "my_generator.py"
    source.parent.mkdir(exist_ok=True)
    source.write_text(HEADER + textwrap.dedent(body))
    copy_code(source, tmp_path / "runs" / run_id)
    return LaunchSpec(run_id, source, tmp_path / "runs" / run_id, **values)


async def until(condition: Callable[[], bool]) -> None:
    """Wait, at most 60 s, for something that other processes do and cannot announce."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 -- there is no event for it in this process
            await asyncio.sleep(0.005)


async def pids_of(spec: LaunchSpec) -> list[int]:
    """The process ids that the generator wrote down, once it has: another process can only be looked at."""
    await until((spec.run_dir / "pids").exists)
    return json.loads((spec.run_dir / "pids").read_text())


async def assert_gone(pids: list[int]) -> None:
    await until(lambda: not any(is_running(pid) for pid in pids))


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_run_that_returns_ends_as_returned(host: Host, tmp_path: Path) -> None:
    spec = make_spec(tmp_path, "def run_rollout(data): (RUN / 'out').write_text(json.dumps(data))\n")
    async with Supervisor(host) as supervisor:
        await supervisor.launch(spec)
        assert supervisor.is_alive(spec.run_id)
        assert await host.outcome() == ProcessOutcome("returned", 1)
        assert not supervisor.is_alive(spec.run_id)
    assert host.started == [(spec.run_id, 1)]
    assert json.loads((spec.run_dir / "out").read_text()) == {"run_id": spec.run_id, "asked": 1}


async def test_a_crash_is_restarted_with_a_fresh_payload(host: Host, tmp_path: Path) -> None:
    body = "def run_rollout(data):\n    if data['asked'] < 3: os._exit(9)\n"
    async with Supervisor(host, restart_pauses=AT_ONCE) as supervisor:
        await supervisor.launch(make_spec(tmp_path, body))
        assert await host.outcome() == ProcessOutcome("returned", 3)
    assert [attempt for _, attempt in host.started] == [1, 2, 3]
    assert host.noted == ["failed", "failed", "ended"]


async def test_a_run_that_keeps_crashing_fails_with_traceback_and_last_lines(host: Host, tmp_path: Path) -> None:
    body = """
    def run_rollout(data):
        print("attempt", data["asked"])
        {}["missing"]
    """
    spec = make_spec(tmp_path, body)
    async with Supervisor(host, restart_pauses=AT_ONCE) as supervisor:
        await supervisor.launch(spec)
        outcome = await host.outcome()
        tail = await supervisor.log_tail(spec.run_dir, 3)
    assert (outcome.kind, outcome.num_attempts, outcome.error) == ("failed", 4, "KeyError: 'missing'")
    assert 'in run_rollout\n    {}["missing"]' in outcome.traceback
    assert [line for line in outcome.log_tail if line.startswith("attempt")] == [f"attempt {n}" for n in range(1, 5)]
    assert tail[-1] == outcome.log_tail[-1] == "KeyError: 'missing'"


async def test_an_invalid_input_is_not_restarted(host: Host, tmp_path: Path) -> None:
    body = "from forebay.core.errors import InvalidInput\ndef run_rollout(data): raise InvalidInput('no such task')\n"
    async with Supervisor(host, restart_pauses=AT_ONCE) as supervisor:
        await supervisor.launch(make_spec(tmp_path, body))
        outcome = await host.outcome()
    assert (outcome.kind, outcome.num_attempts) == ("failed", 1)
    assert outcome.error.endswith("InvalidInput: no such task")


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("os.kill(os.getpid(), 9)", "the run process was killed by signal 9 (Killed)"),
        ("os._exit(0)", "the run process ended with exit code 0 before run_rollout returned"),
        ("sys.exit('no GPU')", "SystemExit: no GPU"),
        ("os.kill(os.getppid(), 9); time.sleep(600)", "the run process was killed by signal 9 (Killed)"),
    ],
)
async def test_every_kind_of_crash_is_told(host: Host, tmp_path: Path, body: str, error: str) -> None:
    async with Supervisor(host, max_restarts=0) as supervisor:
        await supervisor.launch(make_spec(tmp_path, f"def run_rollout(data): {body}\n"))
        assert (await host.outcome()).error == error


async def test_stop_ends_everything_that_the_run_forked_and_nothing_is_restarted(host: Host, tmp_path: Path) -> None:
    spec = make_spec(tmp_path, FOR_EVER)
    async with Supervisor(host, restart_pauses=AT_ONCE) as supervisor:
        await supervisor.launch(spec)
        pids = await pids_of(spec)
        await supervisor.stop(spec.run_id)
        assert host.ended == [(spec.run_id, ProcessOutcome("stopped", 1))]
        await assert_gone(pids)
        await supervisor.stop(spec.run_id)
    assert len(host.started) == 1


async def test_a_process_that_ignores_sigterm_is_killed_after_the_grace(host: Host, tmp_path: Path) -> None:
    body = """
    def run_rollout(data):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        children()
        while True:
            try: time.sleep(600)
            except BaseException: pass
    """
    spec = make_spec(tmp_path, body)
    async with Supervisor(host, stop_grace_s=0.2) as supervisor:
        await supervisor.launch(spec)
        pids = await pids_of(spec)
        await supervisor.stop(spec.run_id)
        await assert_gone(pids)


async def test_a_stop_ends_the_wait_before_a_restart(host: Host, tmp_path: Path) -> None:
    aborted = asyncio.Event()

    async def abort(url: str, prefix: str, timeout_s: float) -> None:
        aborted.set()

    spec = make_spec(tmp_path, "def run_rollout(data): os._exit(1)\n", engine_urls=["http://engine"])
    async with Supervisor(host, restart_pauses=partial(Backoff, 3_600.0, 3_600.0), abort_calls=abort) as supervisor:
        await supervisor.launch(spec)
        async with asyncio.timeout(60):
            await aborted.wait()
        assert supervisor.is_alive(spec.run_id)
        await supervisor.stop(spec.run_id)
    assert host.ended == [(spec.run_id, ProcessOutcome("stopped", 1))]


async def test_shutdown_stops_all_in_parallel_and_ends_no_run(host: Host, tmp_path: Path) -> None:
    async with Supervisor(host) as supervisor:
        specs = [make_spec(tmp_path, FOR_EVER, run_id=f"run-{number}") for number in range(3)]
        for spec in specs:
            await supervisor.launch(spec)
        pids = [pid for spec in specs for pid in await pids_of(spec)]
    assert host.ended == []
    await assert_gone(pids)


async def test_calls_of_a_dead_process_are_aborted_before_the_next_one_starts(host: Host, tmp_path: Path) -> None:
    aborted: list[tuple[str, str, int]] = []

    async def abort(url: str, prefix: str, timeout_s: float) -> None:
        aborted.append((url, prefix, len(host.started)))
        raise ConnectionError("the engine is gone as well")

    spec = make_spec(tmp_path, "def run_rollout(data): os._exit(1)\n", engine_urls=["http://a", "http://b"])
    async with Supervisor(host, max_restarts=1, restart_pauses=AT_ONCE, abort_calls=abort) as supervisor:
        await supervisor.launch(spec)
        await host.outcome()
    prefix = run_rid_prefix(spec.run_id)
    assert aborted == [(url, prefix, attempt) for attempt in (1, 2) for url in ("http://a", "http://b")]


async def test_calls_of_a_killed_process_end_at_a_real_engine(host: Host, tmp_path: Path) -> None:
    body = """
    import urllib.request
    def run_rollout(data):
        rid = "fb-0123456789ab-" + "0" * 8
        body = json.dumps({"messages": [{"role": "user", "content": "?"}], "rid": rid}).encode()
        headers = {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(ENGINE + "/v1/chat/completions", body, headers))
    """
    async with ScriptedEngine(lambda _: Reply("late", hang=True)) as engine:
        spec = make_spec(tmp_path, f"ENGINE = {engine.url!r}\n" + textwrap.dedent(body), engine_urls=[engine.url])
        async with Supervisor(host) as supervisor:
            await supervisor.launch(spec)
            await engine.wait_in_flight(1, timeout_s=30)
            await supervisor.stop(spec.run_id)
        assert run_rid_prefix(spec.run_id) in engine.aborts
        await engine.wait_in_flight(0)


async def test_an_engine_that_never_answers_an_abort_does_not_hold_up_the_run(host: Host, tmp_path: Path) -> None:
    async def abort(url: str, prefix: str, timeout_s: float) -> None:
        await asyncio.Event().wait()

    spec = make_spec(tmp_path, "def run_rollout(data): os._exit(1)\n", engine_urls=["http://a"])
    options = {"max_restarts": 1, "restart_pauses": AT_ONCE, "abort_timeout_s": 0.05}
    async with Supervisor(host, abort_calls=abort, **options) as supervisor:
        await supervisor.launch(spec)
        assert (await host.outcome()).num_attempts == 2


async def test_a_resumed_run_keeps_its_code_even_if_the_file_is_gone(host: Host, tmp_path: Path) -> None:
    spec = make_spec(tmp_path, "def run_rollout(data): (RUN / 'first').touch()\n")
    async with Supervisor(host) as supervisor:
        await supervisor.launch(spec)
        await host.outcome()
        (spec.run_dir / "first").unlink()
        spec.module_path.unlink()
        await supervisor.launch(spec)
        await host.until(lambda: len(host.ended) == 2)
    assert (spec.run_dir / "first").exists()


async def test_a_second_launch_of_a_live_run_is_refused(host: Host, tmp_path: Path) -> None:
    spec = make_spec(tmp_path, FOR_EVER)
    async with Supervisor(host) as supervisor:
        await supervisor.launch(spec)
        with pytest.raises(RuntimeError, match="stop it first"):
            await supervisor.launch(spec)


async def test_a_host_that_cannot_give_a_payload_fails_the_run(host: Host, tmp_path: Path) -> None:
    async def launch_payload(run_id: str) -> dict[str, Any]:
        raise OSError("the store is gone")

    host.launch_payload = launch_payload
    async with Supervisor(host) as supervisor:
        await supervisor.launch(make_spec(tmp_path, FOR_EVER))
        outcome = await host.outcome()
    assert (outcome.kind, outcome.error) == ("failed", "OSError: the store is gone")


def test_restarts_are_spaced_further_and_further_apart() -> None:
    pauses = restart_pauses()
    assert [pauses.next_s() for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]


def test_it_works_on_the_servers_event_loop(tmp_path: Path) -> None:
    async def scenario() -> list[str]:
        host = Host()
        async with Supervisor(host, restart_pauses=AT_ONCE, max_restarts=1) as supervisor:
            await supervisor.launch(make_spec(tmp_path, "def run_rollout(data): os._exit(1)\n", "run-1"))
            await host.until(lambda: len(host.ended) == 1)
            last = make_spec(tmp_path, FOR_EVER, "run-2")
            await supervisor.launch(last)
            pids = await pids_of(last)
            await supervisor.stop("run-2")
            await assert_gone(pids)
        return [outcome.kind for _, outcome in host.ended]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(scenario()) == ["failed", "stopped"]


SERVER = """
import asyncio, sys
from pathlib import Path
from forebay.server.runs.supervisor import LaunchSpec, Supervisor

class Host:
    async def launch_payload(self, run_id): return {}
    async def earlier_traces(self, run_id): return []
    async def process_started(self, run_id, attempt): pass
    async def process_ended(self, run_id, outcome): pass
    def process_settings(self, run_id): return None
    def note_process(self, run_id, what): pass

async def main():
    async with Supervisor(Host()) as supervisor:
        await supervisor.launch(LaunchSpec("run-1", Path(sys.argv[1]), Path(sys.argv[2])))
        await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_run_processes_and_their_children_die_with_a_killed_server(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, FOR_EVER, "run-1")
    argv = [sys.executable, "-c", SERVER, str(spec.module_path), str(spec.run_dir)]
    server = await asyncio.create_subprocess_exec(*argv)
    try:
        pids = await pids_of(spec)
        monitors = [child.pid for child in psutil.Process(server.pid).children()]
    finally:
        server.kill()
        await server.wait()
    assert len(monitors) == 1
    await assert_gone([*pids, *monitors])
