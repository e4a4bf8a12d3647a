"""Groups whose weights are too old, and runs of which nothing comes, over HTTP."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.conftest import MakeServer
from tests.kit import TIME_LIMIT_S, Json, NativeRun, ServerProcess, assert_error, make_group, poll_until
from tests.server.test_batches import instances, states

GOOD = [0.0, 1.0]
RUN = {"group_size": 2}


def write(run: NativeRun, instance_id: str | int, **changes: Any) -> None:
    run.write(*make_group(instance_id, GOOD, **changes))


def announce(run: NativeRun, version: int) -> None:
    answer = run.client.put(f"{run.path}/weight_version", json={"weight_version": version})
    assert answer.json() == {"weight_version": version}


def test_a_read_with_a_bound_discards_what_is_older(run: NativeRun) -> None:
    for version in range(5):
        write(run, version, weight_version=version)
    write(run, "unknown")
    announce(run, 4)
    batch = run.read(num_groups=3, max_staleness=1)
    assert instances(batch) == [3, 4, "unknown"]
    assert batch["meta_info"]["staleness"] == {"0": 2, "1": 2, "unknown": 2}
    assert states(run) == {
        0: "discarded",
        1: "discarded",
        2: "discarded",
        3: "leased",
        4: "leased",
        "unknown": "leased",
    }
    [stale] = [group for group in run.groups() if group["instance_id"] == 2]
    assert stale["reason"] == "stale"
    assert "weight version 2; the current version is 4" in stale["detail"]
    assert run.view()["discarded"] == {"stale": 3}


def test_the_oldest_version_of_the_oldest_sample_counts(run: NativeRun) -> None:
    first, second = make_group("mixed", GOOD, weight_versions=[7, 5])
    run.write(first, second | {"weight_versions": [6, 9]})
    announce(run, 9)
    batch = run.read(num_groups=1, max_staleness=4)
    assert batch["meta_info"]["staleness"] == {"3": 1, "4": 1}
    run.release(batch)
    assert run.read(num_groups=1, max_staleness=3)["batch_id"] is None
    assert states(run) == {"mixed": "discarded"}


def test_the_runs_bound_holds_for_every_route(server: ServerProcess) -> None:
    run = server.start_slime("bounded", group_size=2, max_staleness="1")
    write(run, 1, weight_version=1)
    write(run, 2, weight_version=2)
    announce(run, 3)
    answer = run.fetch()["data"]
    assert [row["instance_id"] for row in answer["data"]] == [2, 2]
    assert answer["meta_info"]["finished_groups"] == [2, 1]
    run.stop()


def test_without_an_announced_version_nothing_is_stale(server: ServerProcess) -> None:
    run = server.start_run(group_size=2, max_staleness=0)
    write(run, 1, weight_version=1)
    batch = run.read(num_groups=1)
    assert batch["meta_info"]["staleness"] == {"unknown": 2}
    run.stop()


def test_kept_groups_go_out_with_a_mark(server: ServerProcess) -> None:
    run = server.start_run(group_size=2, max_staleness=1, stale_groups="keep")
    write(run, "old", weight_version=1)
    write(run, "new", weight_version=5)
    announce(run, 5)
    batch = run.read(num_groups=2, request_id="r")
    marks: Json = {row["uid"]: row.get("is_stale") for row in batch["data"]}
    assert marks == {"old/0": True, "old/1": True, "new/0": None, "new/1": None}
    announce(run, 9)
    assert run.read(num_groups=2, request_id="r") == batch, "a batch does not change"
    run.stop()


def test_stale_groups_do_not_fill_the_buffer_while_a_reader_wants_more(server: ServerProcess) -> None:
    run = server.start_run(group_size=2, max_staleness=0, max_buffer_size=4)
    announce(run, 1)
    write(run, 1, weight_version=0)
    write(run, 2, weight_version=0)
    assert run.write(*make_group(3, GOOD))[0]["status"] == 429
    assert run.read(num_groups=3)["batch_id"] is None
    assert run.write(*make_group(3, GOOD))[0]["status"] == 200
    run.stop()


def train(run: NativeRun, *steps: int) -> None:
    """For each step, a group of its weights that its checkpoint holds."""
    for step in steps:
        announce(run, step)
        write(run, f"of {step}", weight_version=step)
        run.checkpoint(step, run.read(num_groups=1, step=step))


def test_what_a_rewind_brings_back_is_no_older_than_it_was(server: ServerProcess) -> None:
    run = server.start_run(group_size=2, max_staleness=1)
    train(run, 1, 2, 3, 4)
    announce(run, 5)
    for _ in range(2):
        run.rewind(1)
        assert run.view()["weight_version"] == 1
    assert instances(run.read(num_groups=3)) == ["of 2", "of 3", "of 4"]
    run.stop()


def test_another_ranks_reader_that_waits_for_a_rewind_gets_what_comes_back(server: ServerProcess) -> None:
    run = server.start_run(group_size=2, max_staleness=1)
    train(run, 1, 2)
    announce(run, 5)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run.read, num_groups=1, wait_s=TIME_LIMIT_S)
        run.rewind(1)
        assert instances(waiting.result(TIME_LIMIT_S)) == ["of 2"]
    run.stop()


def test_before_the_first_checkpoint_and_for_a_list_the_version_is_not_known(server: ServerProcess) -> None:
    run = server.start_run(group_size=2, max_staleness=0)
    train(run, 1, 2)
    run.rewind(None)
    assert run.view()["weight_version"] is None
    assert run.take(num_groups=2)["meta_info"]["staleness"] == {"unknown": 4}
    announce(run, 9)
    body = {"task_type": "idle", "group_size": 2, "run_id": run.run_id, "max_staleness": 0}
    assert run.client.post("/v1/runs", json=body | {"skip_instance_ids": ["of 1", "of 2"]}).status_code == 201
    assert run.view()["weight_version"] == 9, "its trainer has all that it was given"
    assert run.client.post("/v1/runs", json=body | {"skip_instance_ids": ["of 1"]}).status_code == 201
    assert run.view()["weight_version"] is None
    assert instances(run.read(num_groups=1)) == ["of 2"]
    run.stop()


@pytest.mark.soak
def test_a_rewind_and_its_weight_version_survive_a_kill_together(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run(group_size=2, max_staleness=1)
    train(run, 1, 2, 3)
    announce(run, 5)
    server.kill9()
    server.restart()
    run.rewind(1)
    server.kill9()
    server.restart()
    assert run.view()["weight_version"] == 1
    assert instances(run.read(num_groups=2)) == ["of 2", "of 3"]


@pytest.mark.soak
def test_the_weight_version_survives_a_kill(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run(group_size=2, max_staleness=1)
    write(run, 1, weight_version=1)
    announce(run, 3)
    server.kill9()
    server.restart()
    assert run.view()["weight_version"] == 3
    assert run.read(num_groups=1)["batch_id"] is None
    assert states(run) == {1: "discarded"}


@pytest.mark.parametrize(
    ("setting", "value"), [("max_staleness", -1), ("stale_groups", "drop"), ("alarm_after_groups", 0)]
)
def test_a_wrong_setting_is_named(server: ServerProcess, setting: str, value: object) -> None:
    body = {"task_type": "idle", "group_size": 2, setting: value}
    assert_error(server.client.post("/v1/runs", json=body), 422, "invalid_input", setting)


def test_a_run_of_which_nothing_comes_raises_an_alarm(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run(group_size=2, alarm_after_groups=3)
    run.wait_for_state("running")

    def read_and_look() -> list[Json]:
        run.read(num_groups=1)
        ready = server.client.get("/readyz")
        assert ready.status_code == 200
        assert (ready.json()["ready"], run.view()["alarm"] is not None) == (True, bool(ready.json()["alarms"]))
        alarms: list[Json] = ready.json()["alarms"]
        return alarms

    run.write(*make_group(1, [0.5, 0.5]), *make_group(2, [1.0, 1.0]))
    assert read_and_look() == []
    run.write(*[sample | {"status": "failed"} for sample in make_group(3, [None, None])])
    told = "3 groups in a row ended undelivered: 2 invalid, 1 failed"
    assert read_and_look() == [{"run_id": run.run_id, "message": told, "reasons": {"invalid": 2, "failed": 1}}]
    assert "forebay_runs_alarmed 1.0" in server.client.get("/metrics").text
    poll_until(lambda: told in server.log())
    server.kill9()
    server.restart()
    assert read_and_look()[0]["reasons"] == {"invalid": 2, "failed": 1}
    write(run, 4)
    run.take(num_groups=1)
    assert read_and_look() == []
    assert "forebay_runs_alarmed 0.0" in server.client.get("/metrics").text
