"""Runs whose rollouts run in workers: a real server, a real run process and real workers around a scripted engine."""

import asyncio
import itertools
import json
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine, ThreadedEngine
from tests.conftest import MakeServer
from tests.e2e.payloads import make_payload, numbered_rows
from tests.e2e.reading import run_process_of
from tests.kit import Json, NativeRun, ServerProcess, assert_error, poll_until
from tests.workers.attempts_kit import summaries_of

TASKS = Path(__file__).parent / "run_tasks"
GROUP_SIZE = 2


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(TASKS, tmp_path_factory.mktemp("tasks") / "tasks"))


@pytest.fixture(scope="module")
def server(module_servers: MakeServer, tasks: Path) -> ServerProcess:
    return module_servers(generators=tasks, start_wait_s=60, max_workers=8)


class Gate(threading.Event):
    """Open; while it is closed, the engine answers the first ``num_passing`` calls and no other."""

    num_passing = 0

    def __init__(self) -> None:
        super().__init__()
        self.set()


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def engine(gate: Gate) -> Iterator[ThreadedEngine]:
    numbers = itertools.count()

    async def script(call: ScriptedCall) -> Reply:
        number = next(numbers)
        while not (gate.is_set() or number < gate.num_passing):  # noqa: ASYNC110 - another thread opens it
            await asyncio.sleep(0.005)
        return Reply(text="ab"[len(call.rid or "") % 2] * 3)

    with ScriptedEngine(script).in_thread() as engine:
        yield engine


class Starts:
    """Starts runs of the tasks beside this file."""

    def __init__(self, server: ServerProcess, folder: Path, engine: ThreadedEngine) -> None:
        self._server, self._folder, self._engine = server, folder, engine

    def __call__(self, task: str, num_rows: int, **changes: Any) -> NativeRun:
        numbers = {"num_repeat_per_sample": str(GROUP_SIZE), "task_type": task}
        payload = make_payload(self._folder, self._engine.url, numbered_rows(num_rows), **numbers)
        return self._server.start_run(group_size=GROUP_SIZE, **{"workers": 2, **payload, **changes})


@pytest.fixture
def start(server: ServerProcess, tmp_path: Path, engine: ThreadedEngine) -> Starts:
    return Starts(server, tmp_path, engine)


def wait_end(run: NativeRun) -> Json:
    """The view of a run whose process has ended; every slot has one sample."""
    view = poll_until(lambda: (view := run.view())["state"] not in ("validating", "running") and view, 120)
    assert view["state"] == "finished", view["reason"]
    return view


def wait_ready(run: NativeRun) -> None:
    """Every worker takes rollouts."""
    poll_until(lambda: (found := run.view()["workers"]) and all(each["state"] == "ready" for each in found))


def log_of(run: NativeRun) -> list[str]:
    lines: list[str] = run.client.get(f"{run.path}/log", params={"lines": 1_000}).json()["lines"]
    return lines


def forebay(server: ServerProcess, *words: str) -> str:
    """What the command prints."""
    command = [sys.executable, "-m", "forebay.server.cli", *words, "--url", server.url]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def check_counted(run: NativeRun, engine: ThreadedEngine, num_rows: int, num_processes: int) -> Json:
    """The view of a run of ``counted`` that has ended: every slot filled once, by two workers and their lead."""
    view, num_samples = wait_end(run), num_rows * GROUP_SIZE
    assert (view["samples"]["member"], view["samples"].get("duplicate", 0)) == (num_samples, 0)
    assert view["counts"]["rollouts_finished"] == num_samples
    assert view["counts"]["tokens_finished"] == sum(len(call.sampled_ids) for call in engine.calls)
    # What stands around `entry` runs in each of them; the lead alone has `is_lead`.
    told = Counter(line.split(" in ")[0] for line in log_of(run) if line.startswith(("before", "after")))
    ends = {f"after True {num_samples}": 1, f"after False {num_samples}": 2}
    assert told == {"before True": 1, "before False": 2, **ends}
    pids = {line.split(" in ")[1] for line in log_of(run) if line.startswith("before")}
    assert len(pids) == num_processes
    assert view["workers"] == []
    return view


def test_workers_fill_every_slot_once_and_each_attempt_has_a_summary(server, start, engine, gate) -> None:
    gate.clear()
    run = start("counted", 6, workers=[1, 1], num_process=2 * 6)
    wait_ready(run)
    gate.set()
    check_counted(run, engine, 6, num_processes=3)
    assert sum(line.endswith("INFO    counted: is done") for line in log_of(run)) == 3
    # The lead runs no rollouts: it has no use for half of what a worker loads.
    assert Counter(line for line in log_of(run) if line.startswith("openai")) == {"openai True": 2, "openai False": 1}
    summaries = summaries_of(server, run)
    assert len(summaries) == 6 * GROUP_SIZE
    assert {each["worker"] for each in summaries} <= {0, 1}
    assert {each["ending"] for each in summaries} == {"finished"}
    for each in summaries:
        assert sum(each["phases"].values()) == each["d"]
        assert each["phases"]["engine"] > 0
        assert each["started"] >= each["t"]
    engine_s, queue_s = (max(each["phases"].get(name, 0) for each in summaries) for name in ("engine_wait", "queue"))
    assert engine_s < queue_s  # what is waited for is a worker


def test_the_command_line_starts_workers_by_node_and_inline_ones_share_a_process(server, tmp_path, engine) -> None:
    rows = make_payload(tmp_path, engine.url, numbered_rows(2))["input_file"]
    flags = {"task-type": "counted", "input-file": rows, "group-size": "2", "engine-url": engine.url}
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    shown = forebay(server, "start", *words, "--workers", "[1, 1]", "--backend", "inline", "--json")
    view = check_counted(NativeRun(server, json.loads(shown)["run_id"]), engine, 2, num_processes=1)
    assert (view["settings"]["workers"], view["settings"]["backend"]) == ([1, 1], "inline")


def test_new_weights_reach_every_worker(server, tmp_path) -> None:
    """Of steps of two groups: what one does not need waits for the next, and calls in flight go on with new weights."""
    text, are_held_up = "one two three", threading.Event()
    are_held_up.set()

    def script(call: ScriptedCall) -> Reply:
        is_held_up = are_held_up.is_set() and call.prompt not in ("row-0", "row-1")
        return Reply(text="one two " if is_held_up and not call.said else text[len(call.said) :], hang=is_held_up)

    with ScriptedEngine(script).in_thread() as engine:
        step = {"groups_per_step": 2, "leftover": "keep"}
        run = Starts(server, tmp_path, engine)("counted", 8, num_process=8, max_tokens=64, oversampling=step)
        versions = ["default"]

        def update() -> None:
            body = {"weight_version": len(versions), "model_path": "/new", "mode": "abort"}
            versions.append(str(len(versions)))
            run.client.put(f"{run.path}/weight_version", json=body).raise_for_status()

        poll_until(lambda: run.view()["is_held"])
        engine.wait_in_flight(0)
        wait_ready(run)  # the worker that came first has all rollouts of the first step
        update()
        engine.wait_in_flight(8)
        poll_until(lambda: all(each["num_in_flight"] for each in run.view()["workers"]))
        are_held_up.clear()
        update()
        while run.view()["state"] == "running":
            if run.view()["is_held"]:
                engine.wait_in_flight(0)
                update()
            poll_until(lambda: (view := run.view())["is_held"] or view["state"] != "running")
        calls = engine.calls
    view = wait_end(run)
    assert (view["samples"]["member"], view["samples"].get("duplicate", 0)) == (8 * GROUP_SIZE, 0)
    # By the weights that a call was made under: one of a worker that is not yet told of a hold may still come late.
    steps = [[call for call in calls if call.asked_version == version] for version in versions]
    assert len({call.body["extra_key"] for call in steps[1]}) >= 2  # each worker has its own
    sampled = [{name for call in step for name in call.versions} for step in steps[:3]]
    assert sampled == [{"default"}, {"1"}, {"2"}]
    rows = run.take(num_groups=8, wait_s=20)["data"]
    assert {row["messages"][-1]["content"] for row in rows} == {text}
    spans = [span for row in rows for span in row["token_spans"] if span["source"] == "llm"]
    told = Counter(span["weight_version"] for span in spans for _ in range(span["start"], span["end"]))
    said = Counter(int(name.replace("default", "0")) for call in calls for name in call.versions)
    assert told == said


def test_two_jobs_of_one_run_rollout_reach_the_same_workers(server, start) -> None:
    run = start("twice", 3, backend="inline")
    view = wait_end(run)
    assert view["samples"]["member"] == 2 * 3 * GROUP_SIZE
    assert sum("worker" in line for line in log_of(run)) == 2


def test_agents_run_in_workers_over_one_gateway(server, start, engine) -> None:
    run = start("agents", 4)
    view = wait_end(run)
    assert (view["samples"]["member"], view["samples"].get("failed", 0)) == (4 * GROUP_SIZE, 0)
    assert len(engine.calls) == 2 * 4 * GROUP_SIZE
    rows = run.take(num_groups=4, wait_s=20)["data"]
    assert {sum(message["role"] == "assistant" for message in row["messages"]) for row in rows} == {2}
    assert all(row["tokens"] for row in rows)


def test_a_row_that_ends_its_process_costs_its_own_slots(server, start) -> None:
    run = start("deadly", 6)
    view = wait_end(run)
    assert (view["samples"]["member"], view["samples"]["failed"]) == (5 * GROUP_SIZE, GROUP_SIZE)
    assert view["outcomes"]["environment_failure"] == GROUP_SIZE
    rows = run.take(num_groups=5, wait_s=20)["data"]
    assert {row["instance_id"] for row in rows} == {f"row-{number}" for number in range(6)} - {"row-3"}
    assert view["counts"]["rollouts_lost"] >= 2


def test_a_killed_worker_costs_no_rollout_and_no_retry(server, start, gate) -> None:
    gate.num_passing = 20
    gate.clear()  # so that the run cannot be over before its worker is killed
    run = start("counted", 30, num_process="8", max_attempts=1)
    lead = run_process_of(server).pid
    workers = poll_until(lambda: (found := psutil.Process(lead).children()) and len(found) == 2 and found)
    # In the trace as well: a worker writes it twice a second, and what ended since then is lost with it.
    poll_until(lambda: sum(each["ending"] == "finished" for each in summaries_of(server, run)) == gate.num_passing)
    workers[0].kill()
    gate.set()
    view = wait_end(run)
    assert (view["samples"]["member"], view["samples"].get("failed", 0)) == (30 * GROUP_SIZE, 0)
    summaries = summaries_of(server, run)
    endings = Counter(each["ending"] for each in summaries)
    assert endings["lost"] == view["counts"].get("rollouts_lost", 0)
    assert endings["finished"] >= 30 * GROUP_SIZE - 8  # what died between its end and its write has no summary
    assert len({(each["uid"], each.get("attempt", 0)) for each in summaries}) == len(summaries)


@pytest.mark.soak
def test_silent_workers_are_replaced_and_none_outlives_its_lead(make_server, tasks, tmp_path, engine, gate) -> None:
    server = make_server(generators=tasks, start_wait_s=60, worker_silence_s=5)
    gate.clear()
    run = Starts(server, tmp_path, engine)("counted", 4)
    wait_ready(run)
    lead = run_process_of(server)
    lead.children()[0].send_signal(signal.SIGSTOP)
    replaced = poll_until(lambda: [each for each in run.view()["workers"] if each["num_restarts"]])
    assert "was silent" in replaced[0]["reason"]
    shown = forebay(server, "status", run.run_id)
    assert "1 restart" in shown
    assert "1 restarts" not in shown
    assert "was silent" in shown
    wait_ready(run)
    workers = lead.children()
    lead.kill()
    gone, left = psutil.wait_procs(workers, timeout=60)
    assert (len(gone), left) == (2, [])
    gate.set()
    assert wait_end(run)["samples"]["member"] == 4 * GROUP_SIZE


def test_workers_are_listed_while_they_run_and_end_with_the_run(server, start) -> None:
    run = start("blocking", 2)
    wait_ready(run)

    def all_begun() -> list[Json]:
        found: list[Json] = run.view()["workers"]
        are_begun = sum(each["num_in_flight"] for each in found) == 2 * GROUP_SIZE
        return found if are_begun and any(each["blocked_s"] for each in found) else []

    workers = poll_until(all_begun)
    assert [each["number"] for each in workers] == [0, 1]
    assert {each["state"] for each in workers} == {"ready"}
    assert all(each["node"] and each["rss_bytes"] > 1 << 20 and not each["num_restarts"] for each in workers)
    blocked = next(each for each in workers if each["blocked_s"])
    assert blocked["blocked_s"] >= 5
    assert "blocking_generator.py:" in blocked["blocked_at"]
    assert "in rollout" in blocked["blocked_at"]
    assert "begun" in log_of(run)  # line by line, as the lead's
    processes = run_process_of(server).children()
    server.client.post(f"{run.path}/stop")
    gone, left = psutil.wait_procs(processes, timeout=60)
    assert (len(gone), left) == (2, [])


@pytest.mark.soak
def test_the_log_of_a_run_that_is_stopped_in_the_middle_says_no_more_than_that(server, start) -> None:
    for _ in range(3):
        run = start("counted", 3_000, num_process=64, workers=3)
        poll_until(lambda: run.view()["samples"].get("member", 0) > 100)  # noqa: B023 - called within this round
        processes = run_process_of(server).children()
        server.client.post(f"{run.path}/stop").raise_for_status()
        assert len(psutil.wait_procs(processes, timeout=60)[0]) == 3
        log = log_of(run)
        assert log[-1] == "ended by SIGTERM: the run, or the server, was stopped", "\n".join(log)


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"workers": 0}, "workers", "at least 1"),
        ({"workers": [2, 0]}, "workers", "at least 1"),
        ({"workers": []}, "workers", "node"),
        ({"workers": "many"}, "workers", "many"),
        ({"workers": 9}, "workers", "at most 8 in total"),
        ({"workers": [4, 5]}, "workers", "at most 8 in total"),
        ({"workers": 2, "backend": "threads"}, "backend", "threads"),
        ({"workers": None, "backend": "processes"}, "backend", "without workers"),
    ],
)
def test_wrong_workers_are_refused_by_field(server, tmp_path, engine, fields, field, words) -> None:
    payload = make_payload(tmp_path, engine.url, numbered_rows(1), task_type="counted")
    error = assert_error(server.client.post("/v1/runs", json=payload | fields), 422, "invalid_input", field)
    assert words in error["message"]
    assert error["hint"]


def test_a_generator_that_starts_its_rollouts_itself_has_no_workers(server) -> None:
    body = {"task_type": "idle", "group_size": 2, "workers": 2}
    error = assert_error(server.client.post("/v1/runs", json=body), 422, "invalid_input", "workers")
    assert "starts them itself" in error["message"]
    assert "BaseGenerator" in error["hint"]
