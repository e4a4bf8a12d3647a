"""Starts that are large by mistake or malice: they cost themselves, and neither what is reported later nor others."""

import json
import time
from pathlib import Path
from statistics import median

from tests.attack.start_code import python_path_with
from tests.conftest import MakeServer
from tests.kit import NativeRun, ServerProcess, assert_error, make_group, poll_until, write_generator

SHOWS = """
import json, threading
from pathlib import Path
TASK_TYPE = "shows"
def run_rollout(data):
    told = {"url": data["remote_buffer_url"], "num_listed": len(data["skip_instance_ids"])}
    partial = Path(data["told_to"] + ".partial")
    partial.write_text(json.dumps(told))
    partial.rename(data["told_to"])
    threading.Event().wait()
"""
NUM_REPORTS = 25
SMALL_ENTRIES = """
import sys
if "serve" in sys.orig_argv:
    from forebay.core.records import log_records
    log_records.MAX_ROWS_BYTES = 1 << 20
"""
"""What the journal takes in one piece: a 128th of what it is, which takes a minute to send twice."""
LONG_IDS = [f"{n:0>1000}" for n in range(1_100)]
"""More than that."""


def start(server: ServerProcess, num_ids: int) -> tuple[NativeRun, dict[str, object]]:
    """A run that skips so many ids, and what its process was told."""
    path = server.directory / f"told-{num_ids}.json"
    run = server.start_run("shows", group_size=2, skip_instance_ids=list(range(num_ids)), told_to=str(path))
    run.wait_for_state("running")
    poll_until(path.exists)
    return run, json.loads(path.read_text())


def num_journal_bytes(server: ServerProcess) -> int:
    return sum(path.stat().st_size for path in (server.data_dir / "segments").iterdir())


def cost_of_reports(run: NativeRun, url: object) -> tuple[int, float]:
    """Bytes of the journal that the reports of a run's process and its trainer take, and seconds of most of them."""
    before, took_s = num_journal_bytes(run.server), list[float]()
    for n in range(NUM_REPORTS):
        began_s = time.perf_counter()
        body = {"process_id": "p", "counts": {"rollouts_finished": n + 1}, "opened": [[f"opened-{n}", 0]]}
        assert run.client.post(f"{url}/progress", json=body).json() == {"state": "running"}
        run.write(*make_group(f"whole-{n}", [0.5, 1.0]))
        run.take(num_groups=1)
        assert run.client.put(f"{run.path}/weight_version", json={"weight_version": n}).is_success
        run.checkpoint(n)
        assert run.view()["state"] == "running"
        took_s.append(time.perf_counter() - began_s)
    return num_journal_bytes(run.server) - before, median(took_s)


def test_a_report_costs_the_same_with_ten_ids_and_with_a_hundred_thousand(make_server: MakeServer) -> None:
    server = make_server(max_journal_bytes=0)
    write_generator(server.generators, SHOWS, "shows_generator.py")
    few, told_few = start(server, 10)
    many, told_many = start(server, 100_000)
    assert (told_few["num_listed"], told_many["num_listed"]) == (10, 100_000)
    few_bytes, few_s = cost_of_reports(few, told_few["url"])
    many_bytes, many_s = cost_of_reports(many, told_many["url"])
    print(f"{few_bytes} bytes and {few_s:.4f} s each with ten ids, {many_bytes} bytes and {many_s:.4f} s with 100 000")
    assert many_bytes < 1.1 * few_bytes
    # With the list in each report it is a hundred times as long; this leaves room for whatever else runs here.
    assert many_s < 5 * few_s
    assert len(many.client.get(many.path).content) < 10_000
    assert len(many.client.get(f"{many.path}/skip_instance_ids").json()["skip_instance_ids"]) == 100_000 + NUM_REPORTS


def test_the_list_of_a_start_is_stored_once_and_survives(make_server: MakeServer) -> None:
    server = make_server()
    write_generator(server.generators, SHOWS, "shows_generator.py")
    ids = [f"instance-{n:06}" for n in range(100_000)]
    before = num_journal_bytes(server)
    path = server.directory / "told.json"
    run = server.start_slime("listed", "shows", skip_instance_ids=ids, told_to=str(path))
    run.wait_for_state("running")
    num_bytes = len(json.dumps(ids))
    assert num_journal_bytes(server) - before < 1.2 * num_bytes
    server.kill9()
    server.restart()
    run.wait_for_state("running")
    assert run.client.get(f"{run.path}/skip_instance_ids").json()["skip_instance_ids"] == ids
    # The same start made again is the same run still, and a start with another list is none.
    payload = {"task_type": "shows", "num_repeat_per_sample": "4", "skip_instance_ids": ids, "told_to": str(path)}
    again = run.client.post("/s/listed/start_rollout", json=payload).json()
    assert again["run_id"] == run.run_id
    other = run.client.post("/s/listed/start_rollout", json=payload | {"skip_instance_ids": ["unknown"]}).json()
    assert other["run_id"] != run.run_id


def test_a_start_that_cannot_be_stored_is_refused_and_harms_nothing_else(
    make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server(env=python_path_with(tmp_path, SMALL_ENTRIES))
    run = server.start_run()
    body = {"task_type": "idle", "group_size": 2, "skip_instance_ids": LONG_IDS}
    assert_error(server.client.post("/v1/runs", json=body), 413, "entry_too_large")
    attached = server.client.post("/v1/runs", json=body | {"group_size": 4, "run_id": run.run_id})
    assert_error(attached, 413, "entry_too_large")
    assert [each["run_id"] for each in server.client.get("/v1/runs").json()["runs"]] == [run.run_id]
    assert sorted(path.name for path in (server.data_dir / "runs").iterdir()) == [run.run_id]
    run.write(*make_group("after", [0.1, 0.2, 0.3, 0.4]))
    assert server.client.get("/readyz").is_success
    server.kill9()
    server.restart()
    assert len(run.take(num_groups=1)["data"]) == 4
    assert server.start_run().view()["task_type"] == "idle"
