"""What a replay costs: against the run that it replays, and against a writer that sends the same samples."""

import shutil
import time
from pathlib import Path

import pytest

from forebay.client import SampleWriter
from tests.benchmarks.machines import show
from tests.conftest import MakeServer
from tests.e2e.conftest import TASKS
from tests.e2e.engines import TinyProcess
from tests.e2e.payloads import make_payload
from tests.kit import Json, NativeRun, ServerProcess, poll_until
from tests.replay.replay_kit import groups_of, plain, start_replay, until_ended

pytestmark = pytest.mark.bench

ROUNDS = 3
GROUP_SIZE = 8
NUM_ROWS = 200
MIN_TIMES_FASTER = 20.0
MAX_WRITER_RATIO = 1.2
END_LIMIT_S = 1_800.0


def ended(run: NativeRun) -> Json:
    return poll_until(lambda: view if (view := run.view())["has_ended"] else {}, END_LIMIT_S)


def read_rows(run: NativeRun) -> list[Json]:
    rows: list[Json] = []
    while (reply := run.client.post(f"{run.path}/batches", json={"num_groups": 20})).status_code == 200:
        if reply.json()["batch_id"] is None:
            break
        run.ack(reply.json())
        rows += reply.json()["data"]
    return rows


def test_a_replay_is_much_faster_than_the_tiny_engine(make_server: MakeServer, tmp_path: Path) -> None:
    """200 groups of 8, and then the engine is stopped: the same groups, reasons and rows."""
    server = make_server(generators=Path(shutil.copytree(TASKS, tmp_path / "tasks")))
    rows = [{"instance_id": f"row-{n}", "prompt": f"Is {n} even?", "label": str(n % 2)} for n in range(NUM_ROWS)]
    with TinyProcess(tmp_path / "engine.log") as engine:
        body = make_payload(tmp_path, engine.url, rows, min_valid_group_size_ratio=0.5)
        began_s = time.perf_counter()
        recorded = NativeRun(server, server.client.post("/v1/runs", json=body).json()["run_id"])
        ended(recorded)
        run_s = time.perf_counter() - began_s
    (tmp_path / "rows.jsonl").unlink()
    took = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        replayed = start_replay(server, recorded.run_id)
        ended(replayed)
        took.append(time.perf_counter() - began_s)
    replay_s = min(took)
    show("200 groups of 8", ["run, s", "replay, s", "times"], [(run_s, replay_s, run_s / replay_s)])
    again = read_rows(replayed)
    assert [plain(row) for row in again] == read_rows(recorded)
    assert {row["replayed_from"]["run_id"] for row in again} <= {recorded.run_id}
    assert groups_of(replayed) == groups_of(recorded)
    assert replayed.view()["counts"]["replay_hits"] == NUM_ROWS * GROUP_SIZE
    assert run_s / replay_s >= MIN_TIMES_FASTER


@pytest.mark.parametrize(("num_groups", "num_bytes"), [(1_000, 4 << 10), (120, 128 << 10)])
def test_a_replay_costs_about_what_a_writer_does(make_server: MakeServer, num_groups: int, num_bytes: int) -> None:
    server = make_server()
    samples = [
        {
            "uid": f"{n}/{slot}",
            "instance_id": n,
            "epoch": 0,
            "slot": slot,
            "reward": slot / GROUP_SIZE,
            "messages": [{"role": "user", "content": "x" * num_bytes}],
            "response_length": 100,
        }
        for n in range(num_groups)
        for slot in range(GROUP_SIZE)
    ]
    took: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        run = server.start_run("idle", GROUP_SIZE)
        writer_s = write_all(server, run, samples)
        run.stop()
        began_s = time.perf_counter()
        replayed = start_replay(server, run.run_id)
        until_ended(replayed)
        replay_s = time.perf_counter() - began_s
        assert replayed.view()["counts"]["replay_hits"] == len(samples)
        took.append((writer_s, replay_s))
    show(f"{len(samples)} samples of {num_bytes} bytes", ["writer, s", "replay, s"], took)
    # The best of each: whatever else the machine does, it does not make either of them faster.
    assert min(replay_s for _, replay_s in took) <= MAX_WRITER_RATIO * min(writer_s for writer_s, _ in took)


def write_all(server: ServerProcess, run: NativeRun, samples: list[Json]) -> float:
    began_s = time.perf_counter()
    with SampleWriter(server.url, run.run_id) as writer:
        for sample in samples:
            writer.write(sample)
    return time.perf_counter() - began_s
