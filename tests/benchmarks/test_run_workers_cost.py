"""What workers bring to a run, and what they cost: beside the same run with fewer, or without."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import psutil
import pytest

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine, ThreadedEngine
from tests.benchmarks.machines import show
from tests.conftest import MakeServer
from tests.e2e.payloads import make_payload
from tests.e2e.reading import run_process_of
from tests.kit import Json, NativeRun, ServerProcess, poll_until
from tests.ray_kit import join_cluster

pytestmark = pytest.mark.bench

TASKS = Path(__file__).parent / "worker_tasks"
GROUP_SIZE = 8
NUM_WORKERS = 2
FIRST_ROWS = 4
"""Of a passage before the one that is measured, in which everything is loaded."""
NUM_ROUNDS = 3
LIMIT_S = 300.0
PROMPT = "Tell me of the river. " * 20
ANSWER = "The river is wide and slow, and nobody has seen its end. " * 4
CALL = {"id": "c1", "type": "function", "function": {"name": "compute", "arguments": '{"number": 7}'}}

LEAST_SPEED_UP = 1.6
MOST_CPU = {"processes": 1.2, "ray": 1.5}
MOST_WORKER_MEMORY = 1.15
MOST_LEAD_MEMORY = 1.2


def answers(call: ScriptedCall) -> Reply:
    """Of a task with a tool its call first."""
    is_call = bool(call.body.get("tools")) and call.messages[-1]["role"] != "tool"
    return Reply(tool_calls=[CALL]) if is_call else Reply(text=ANSWER, queue_s=0.001, prefill_s=0.001)


@pytest.fixture(scope="module")
def engine() -> Iterator[ThreadedEngine]:
    with ScriptedEngine(answers).in_thread() as engine:
        yield engine


@pytest.fixture(scope="module")
def server(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    tasks = Path(shutil.copytree(TASKS, tmp_path_factory.mktemp("tasks") / "tasks"))
    return module_servers(generators=tasks, start_wait_s=60, ray_address="auto")


class Starts:
    """Starts runs of the tasks beside this file, each with the same rows."""

    def __init__(self, server: ServerProcess, folder: Path, engine: ThreadedEngine) -> None:
        self._server, self._folder, self._engine = server, folder, engine

    def __call__(self, task: str, num_rows: int, **fields: object) -> NativeRun:
        rows = [{"instance_id": f"row-{number}", "prompt": PROMPT} for number in range(num_rows + FIRST_ROWS)]
        params = {"max_tokens": 256, "temperature": 1.0}
        payload = make_payload(
            self._folder, self._engine.url, rows[FIRST_ROWS:], task_type=task, max_tokens=256, sampling_params=params
        )
        first = "".join(f"{json.dumps(row)}\n" for row in rows[:FIRST_ROWS])
        Path(f"{payload['input_file']}.first").write_text(first)
        return self._server.start_run(group_size=GROUP_SIZE, **payload, **fields)

    def costs(self, task: str, num_rows: int, **fields: object) -> tuple[list[Json], list[Json]]:
        """What the processes of a run tell of the rows but the first: the lead, and the workers."""
        run = self(task, num_rows, **fields)
        view = poll_until(lambda: (view := run.view())["state"] not in ("validating", "running") and view, LIMIT_S)
        assert view["state"] == "finished", view["reason"]
        assert view["samples"]["member"] == (num_rows + FIRST_ROWS) * GROUP_SIZE
        lines = run.client.get(f"{run.path}/log", params={"lines": 1_000}).json()["lines"]
        # Ray says before a line which actor has printed it.
        told = [json.loads(line[line.index('{"cpu_s"') :]) for line in lines if '{"cpu_s"' in line]
        lead, workers = ([each for each in told if each["is_lead"] is is_lead] for is_lead in (True, False))
        assert (len(lead), len(workers)) == (1, fields.get("workers", 0))
        return lead, workers


@pytest.fixture
def start(server: ServerProcess, tmp_path: Path, engine: ThreadedEngine) -> Starts:
    return Starts(server, tmp_path, engine)


def test_two_workers_share_the_work_of_tools(start) -> None:
    num_rows = 10
    rates: dict[int, list[float]] = {1: [], NUM_WORKERS: []}
    for _ in range(NUM_ROUNDS):
        for num_workers, found in rates.items():
            (lead,), _ = start.costs("busy_tool", num_rows, workers=num_workers)
            found.append(num_rows * GROUP_SIZE / lead["wall_s"])
    one, two = max(rates[1]), max(rates[NUM_WORKERS])
    columns = ("one worker, 1/s", "two workers, 1/s", "ratio")
    show("rollouts with a tool of 50 ms CPU", columns, [(one, two, f"{two / one:.3f}")])
    assert two / one >= LEAST_SPEED_UP


@pytest.mark.parametrize("backend", MOST_CPU)
def test_workers_cost_little_cpu(start, backend) -> None:
    if backend == "ray":
        pytest.importorskip("ray", reason="make test-ray installs it")
        join_cluster()
    num_rows = 50
    alone, leads, workers = list[float](), list[float](), list[float]()
    for _ in range(NUM_ROUNDS):
        for fields in ({}, {"workers": NUM_WORKERS, "backend": backend}):
            told = start.costs("engine_only", num_rows, **fields)
            lead_ms, workers_ms = (sum(each["cpu_s"] for each in some) * 1e3 / num_rows / GROUP_SIZE for some in told)
            if fields:
                leads.append(lead_ms)
                workers.append(workers_ms)
            else:
                alone.append(lead_ms)
    together = [lead + other for lead, other in zip(leads, workers, strict=True)]
    ratio, ratio_of_medians = min(together) / min(alone), median(together) / median(alone)
    columns = ("without workers", "lead", "workers", "ratio", "ratio of medians")
    row = (min(alone), min(leads), min(workers), f"{ratio:.3f}", f"{ratio_of_medians:.3f}")
    show(f"CPU of a rollout that asks an engine once, ms ({backend})", columns, [row])
    assert ratio <= MOST_CPU[backend]


def mib_of(server: ServerProcess, run: NativeRun, num_samples: int, *, are_workers: bool) -> list[float]:
    """Resident memory of the lead, or of its workers, once so many samples were written; the run is ended then."""
    poll_until(lambda: run.view()["samples"].get("member", 0) >= num_samples, LIMIT_S)
    lead = run_process_of(server)
    measured = lead.children() if are_workers else [lead]
    found = [each.memory_info().rss / 2**20 for each in measured]
    run.stop()
    psutil.wait_procs([lead, *measured], timeout=LIMIT_S)
    return found


def test_a_worker_needs_little_more_memory_than_a_run_process(server, start) -> None:
    num_rows = 300
    (alone,) = mib_of(server, start("engine_only", num_rows), 400, are_workers=False)
    run = start("engine_only", num_rows, workers=NUM_WORKERS)
    workers = mib_of(server, run, 400, are_workers=True)
    assert len(workers) == NUM_WORKERS
    ratio = max(workers) / alone
    columns = ("without workers", *(f"worker {number}" for number in range(NUM_WORKERS)), "ratio")
    show("resident memory of a process, MiB", columns, [(alone, *workers, f"{ratio:.3f}")])
    assert ratio <= MOST_WORKER_MEMORY


def test_a_long_input_costs_the_lead_no_memory(server, start) -> None:
    sizes = (10_000, 1_000_000)
    leads = list[float]()
    for num_rows in sizes:
        run = start("engine_only", num_rows, workers=NUM_WORKERS)
        leads += mib_of(server, run, 400, are_workers=False)
    ratio = leads[1] / leads[0]
    show("resident memory of a lead, MiB", (*(f"{size} rows" for size in sizes), "ratio"), [(*leads, f"{ratio:.3f}")])
    assert ratio <= MOST_LEAD_MEMORY
