"""A run that has ended can be removed: it is gone from every list, and no restart brings it back."""

import json
import sqlite3
from contextlib import closing

import httpx
import pytest

from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, ServerProcess, assert_error, make_group, make_sample, poll_until

TEXT = "x" * 8_000
SEGMENT_BYTES = 65_536


def ended(server: ServerProcess, name: str = "", num_groups: int = 20) -> NativeRun:
    """A run with delivered, ready and open groups, a checkpoint, and a lease."""
    run = server.start_run(group_size=2, name=name)
    run.wait_for_state("running")
    for number in range(num_groups):
        run.write(*make_group(f"{name}-{number}", [1.0, 0.0], text=TEXT))
    run.checkpoint(1, run.read(num_groups=num_groups // 2))
    run.read(num_groups=1)
    run.stop()
    poll_until(lambda: run.view()["has_ended"])
    return run


def key_of(run: NativeRun) -> str:
    """The run's own key, which no route shows."""
    with closing(sqlite3.connect(run.server.data_dir / "index.sqlite")) as index:
        [(document,)] = index.execute("SELECT document FROM runs WHERE run_id = ?", (run.run_id,))
    key: str = json.loads(document)["run_key"]
    return key


def delete(run: NativeRun) -> httpx.Response:
    return run.client.delete(run.path)


def listed(server: ServerProcess) -> set[str]:
    return {run["run_id"] for run in server.client.get("/v1/runs").json()["runs"]}


def stored(run: NativeRun) -> tuple[list[Json], list[tuple[str, str]], Json]:
    """What the removal of another run must not change; a restart lets leases begin again."""
    group_id = run.groups()[-1]["group_id"]
    sample = run.client.get(f"{run.path}/groups/{group_id}", params={"bodies": True}).json()
    return run.groups(), [(batch["batch_id"], batch["state"]) for batch in run.batches()], sample


def assert_gone(run: NativeRun, key: str) -> None:
    server = run.server
    assert run.run_id not in listed(server)
    for path in ("", "/groups", "/batches", "/checkpoints", "/log", "/trace", "/skip_instance_ids"):
        assert_error(run.client.get(run.path + path), 404, "run_not_found")
    assert_error(run.client.post(f"{run.path}/samples", json=[make_sample()]), 404, "run_not_found")
    assert_error(run.client.post(f"/w/{key}/samples", json=[make_sample()]), 404, "run_not_found")
    assert_error(delete(run), 404, "run_not_found")
    assert not (server.data_dir / "runs" / run.run_id).exists()


def test_a_removed_run_never_comes_back(make_server: MakeServer) -> None:
    server = make_server(segment_bytes=SEGMENT_BYTES, max_trace_bytes=1 << 20)
    removed, kept = ended(server, "removed"), ended(server, "kept")
    key = key_of(removed)
    assert removed.client.get(f"/w/{key}/plan").status_code == 200
    before = stored(kept)
    assert delete(removed).json() == {"run_id": removed.run_id}
    assert_gone(removed, key)
    freed = server.client.post("/v1/gc").json()
    assert freed["num_segments_freed"] >= 2
    server.kill9()
    server.restart()
    assert_gone(removed, key)
    server.stop()
    for index in server.data_dir.glob("index.sqlite*"):
        index.unlink()
    server.restart()
    assert_gone(removed, key)
    assert stored(kept) == before
    assert listed(server) == {kept.run_id}
    assert delete(kept).status_code == 200
    assert server.client.post("/v1/gc").json()["num_segments"] <= 2


def test_a_run_that_has_not_ended_is_not_removed(server: ServerProcess) -> None:
    run = server.start_run(group_size=2)
    run.wait_for_state("running")
    error = assert_error(delete(run), 409, "conflict")
    assert "stop" in error["hint"]
    run.write(*make_group("task", [1.0, 0.0]))
    assert len(run.take(num_groups=1)["data"]) == 2
    run.stop()


@pytest.mark.parametrize("store", ["journal", "memory"])
def test_a_server_without_runs_is_as_it_was(make_server: MakeServer, store: str) -> None:
    server = make_server(store=store)
    run = ended(server)
    assert delete(run).status_code == 200
    assert listed(server) == set()
    assert server.client.get("/metrics").status_code == 200
    other = ended(server)
    assert listed(server) == {other.run_id}
