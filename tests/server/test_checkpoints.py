"""Checkpoints and rewinds over HTTP, through ``kill -9`` at every step."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.conftest import MakeServer
from tests.kit import TIME_LIMIT_S, Json, NativeRun, ServerProcess, assert_error, make_group, make_sample, poll_until
from tests.server.test_batches import fill, instances, post, states

RUN = {"group_size": 2}


def test_a_checkpoint_acknowledges_what_it_names_and_holds_it(run: NativeRun) -> None:
    fill(run, 1, 2, 3)
    first, second, third = (run.read(num_groups=1) for _ in range(3))
    for _ in range(2):
        told = run.checkpoint(1, first, second)
        assert told == {"step": 1, "batch_ids": [first["batch_id"], second["batch_id"]], "checkpoints": [1]}
    assert states(run) == {1: "acked", 2: "acked", 3: "leased"}
    assert run.checkpoint(1, third)["batch_ids"] == [b["batch_id"] for b in (first, second, third)], "another rank"
    [held] = run.client.get(f"{run.path}/checkpoints").json()["checkpoints"]
    assert held.pop("at_s") > 1_000_000_000
    assert held == {"step": 1, "batch_ids": [b["batch_id"] for b in (first, second, third)], "num_groups": 3}
    assert run.view()["checkpoints"] == [1]


def test_without_names_it_holds_what_is_acknowledged_and_held_by_none(run: NativeRun) -> None:
    fill(run, 1, 2, 3)
    first = run.take(num_groups=1)
    leased = run.read(num_groups=1)
    assert run.checkpoint(5)["batch_ids"] == [first["batch_id"]]
    assert run.checkpoint(6) == {"step": 6, "batch_ids": [], "checkpoints": [5, 6]}
    assert states(run)[2] == "leased"
    run.ack(leased)
    assert run.checkpoint(7)["batch_ids"] == [leased["batch_id"]]


def test_a_checkpoint_is_all_or_nothing(run: NativeRun) -> None:
    fill(run, 1, 2)
    good, lost = run.read(num_groups=1), run.read(num_groups=1)
    run.release(lost)
    answer = post(run, "checkpoints", step=1, batch_ids=[good["batch_id"], lost["batch_id"]])
    assert_error(answer, 409, "lease_lost")
    answer = post(run, "checkpoints", step=1, batch_ids=[good["batch_id"], "batch-none"])
    assert_error(answer, 404, "batch_not_found")
    assert states(run) == {1: "leased", 2: "ready"}
    assert run.client.get(f"{run.path}/checkpoints").json() == {"checkpoints": []}


def test_steps_go_up_and_a_batch_stays_with_its_step(run: NativeRun) -> None:
    fill(run, 1, 2)
    first, second = run.take(num_groups=1), run.read(num_groups=1)
    run.checkpoint(5)
    told = assert_error(post(run, "checkpoints", step=6, batch_ids=[first["batch_id"]]), 409, "checkpoint_conflict")
    assert "step 5" in told["message"]
    told = assert_error(post(run, "checkpoints", step=4, batch_ids=[second["batch_id"]]), 409, "checkpoint_conflict")
    assert "step 5" in told["message"]
    assert states(run)[2] == "leased"
    assert run.checkpoint(5) == {"step": 5, "batch_ids": [first["batch_id"]], "checkpoints": [5]}


def test_a_rewind_brings_back_what_the_checkpoint_does_not_hold_in_the_old_order(run: NativeRun) -> None:
    run.write(*make_group("bad", [0.5, 0.5]))
    fill(run, 1, 2, 3, 4, 5)
    run.take(num_groups=1)
    run.checkpoint(1)
    later, acked, leased = run.take(num_groups=1), run.take(num_groups=1), run.read(num_groups=1)
    run.checkpoint(2, later)
    told = run.rewind(1)
    assert told == {"step": 1, "num_batches": 3, "num_groups": 3, "checkpoints": [1]}
    assert run.rewind(1) | {"num_batches": 3, "num_groups": 3} == told
    assert states(run) == {"bad": "discarded", 1: "acked", 2: "ready", 3: "ready", 4: "ready", 5: "ready"}
    for batch in (later, acked, leased):
        assert "rewind" in assert_error(post(run, f"batches/{batch['batch_id']}/ack"), 409, "lease_lost")["message"]
    again = run.read(num_groups=4)
    assert instances(again) == [2, 3, 4, 5]
    assert [row["uid"] for row in again["data"][:2]] == [row["uid"] for row in later["data"]]
    assert [row["reward"] for row in again["data"][:2]] == [row["reward"] for row in later["data"]]
    assert {g["instance_id"]: g["num_deliveries"] for g in run.groups()} == {"bad": 0, 1: 1, 2: 2, 3: 2, 4: 2, 5: 1}
    assert run.checkpoint(2, again)["checkpoints"] == [1, 2]


def test_a_rewind_to_before_the_first_checkpoint_undoes_everything(run: NativeRun) -> None:
    run.write(*make_group("bad", [0.5, 0.5]))
    fill(run, 1)
    first = run.take(num_groups=1)
    run.checkpoint(1)
    assert run.rewind(None) == {"step": None, "num_batches": 1, "num_groups": 1, "checkpoints": []}
    assert run.read(num_groups=1)["meta_info"]["finished_groups"] == first["meta_info"]["finished_groups"] == [1, "bad"]


def test_an_unknown_step_lists_the_known_ones(run: NativeRun) -> None:
    for step in (2, 4):
        run.checkpoint(step)
    told = assert_error(post(run, "rewind", step=3), 404, "checkpoint_not_found")
    assert "2, 4" in told["message"]
    run.rewind(2)
    assert "known steps: 2" in assert_error(post(run, "rewind", step=4), 404, "checkpoint_not_found")["message"]


def test_a_rewind_wakes_a_waiting_reader(run: NativeRun) -> None:
    fill(run, 1)
    run.take(num_groups=1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run.read, num_groups=1, wait_s=TIME_LIMIT_S)
        assert not waiting.done()
        run.rewind(None)
        assert instances(waiting.result(TIME_LIMIT_S)) == [1]


def test_a_run_that_has_ended_gives_its_data_again_after_a_rewind(run: NativeRun) -> None:
    fill(run, 1)
    run.take(num_groups=1)
    run.stop()
    poll_until(lambda: run.view()["has_ended"])
    assert_error(post(run, "batches", num_groups=1), 410, "run_ended")
    run.rewind(None)
    assert instances(run.read(num_groups=1, lease_s=0.05)) == [1]
    poll_until(lambda: states(run)[1] == "ready")
    assert instances(run.take(num_groups=1)) == [1]
    assert_error(post(run, "batches", num_groups=1), 410, "run_ended")


def test_attaching_to_a_run_leaves_batches_and_checkpoints_as_they_are(run: NativeRun) -> None:
    fill(run, 1, 2, 3)
    first, second = run.read(num_groups=1), run.read(num_groups=1)
    run.checkpoint(4, first)
    run.stop()
    body = {"task_type": "idle", "group_size": 2, "run_id": run.run_id}
    answer = run.client.post("/v1/runs", json=body)
    assert (answer.status_code, answer.json()["run_id"]) == (201, run.run_id)
    run.wait_for_state("running")
    assert states(run) == {1: "acked", 2: "leased", 3: "ready"}
    assert run.checkpoint(5, second)["checkpoints"] == [4, 5]
    ids = run.client.get(f"{run.path}/skip_instance_ids").json()["skip_instance_ids"]
    assert sorted(ids) == [1, 2, 3], "in any order: what was read long ago may be told last"


def test_a_batch_keeps_its_advantages_until_its_groups_are_back(server: ServerProcess) -> None:
    """Those of two normalisers are not to be mixed."""
    run = server.start_run(group_size=2, normaliser="grpo")
    fill(run, 1, 2)
    asked = {"num_groups": 1, "request_id": "a", "lease_s": 50}
    first = run.read(**asked)
    assert rewards(first) == pytest.approx([-1, 1])
    body = {"task_type": "idle", "group_size": 2, "normaliser": "dr_grpo", "run_id": run.run_id}
    assert run.client.post("/v1/runs", json=body).status_code == 201
    assert run.read(**asked) == first
    run.release(first)
    assert rewards(run.read(num_groups=2)) == [-0.5, 0.5] * 2
    run.stop()


def rewards(batch: Json) -> list[float]:
    return [row["reward"] for row in batch["data"]]


def test_what_slimes_route_delivered_comes_back_as_well(server: ServerProcess) -> None:
    run = server.start_slime("rewound", group_size=2)
    fill(run, 1, 2)
    assert len(run.fetch(batch_size=2)["data"]["data"]) == 2
    assert [(batch["state"], batch["lease_s"]) for batch in run.batches()] == [("acked", None)]
    assert run.checkpoint(1)["batch_ids"] == [run.batches()[0]["batch_id"]]
    assert len(run.fetch(batch_size=2)["data"]["data"]) == 2
    run.rewind(1)
    assert states(run) == {1: "acked", 2: "ready"}
    assert [row["instance_id"] for row in run.fetch()["data"]["data"]] == [2, 2]
    run.stop()


# --- kill -9


@pytest.mark.soak
def test_kill_9_between_any_two_steps_changes_nothing_that_was_told(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run(group_size=2)
    run.write(*make_group("bad", [0.5, 0.5]))
    fill(run, 1, 2, 3, 4)

    def killed(do: Callable[..., Json], *args: Any, **kwargs: Any) -> Json:
        """Do it, kill the server, and find everything as it was told."""
        answer = do(*args, **kwargs)
        before = _shown(run)
        server.kill9()
        server.restart()
        assert _shown(run) == before
        return answer

    first = killed(run.read, num_groups=1, request_id="r1", step=1)
    assert killed(run.read, num_groups=1, request_id="r1", step=1) == first
    killed(run.ack, first)
    assert run.ack(first)["state"] == "acked"
    killed(run.checkpoint, 1)
    second = killed(run.read, num_groups=2)
    killed(run.checkpoint, 2, second)
    third = run.read(num_groups=1)
    assert killed(run.rewind, 1)["num_batches"] == 2
    assert_error(post(run, f"batches/{third['batch_id']}/ack"), 409, "lease_lost")
    fourth = killed(run.read, num_groups=3, lease_s=1_000)
    assert instances(fourth) == [2, 3, 4]
    assert [row["uid"] for row in fourth["data"][:4]] == [row["uid"] for row in second["data"]]
    killed(run.release, fourth)
    assert instances(killed(run.take, num_groups=3)) == [2, 3, 4]


def _shown(run: NativeRun) -> Json:
    def of(path: str) -> Any:
        return run.client.get(f"{run.path}/{path}").json()

    groups = [{key: g[key] for key in ("group_id", "state", "batch_id", "num_deliveries")} for g in run.groups()]
    batches = [batch | {"leased_at_s": 0} for batch in run.batches()]  # a lease begins anew at the restart
    return {"batches": batches, "checkpoints": of("checkpoints"), "groups": groups}


@pytest.mark.soak
def test_a_lease_of_before_a_crash_still_ends(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run(group_size=2)
    fill(run, 1)
    run.read(num_groups=1, lease_s=6)
    server.kill9()
    server.restart()
    assert [batch["state"] for batch in run.batches()] == ["leased"]
    poll_until(lambda: states(run)[1] == "ready")
    assert instances(run.take(num_groups=1)) == [1]


@pytest.mark.soak
def test_a_full_life_is_trained_once_by_the_surviving_checkpoints(make_server: MakeServer) -> None:
    """A trainer that is killed after each step of its loop, and goes back to the checkpoint that it has."""
    server = make_server()
    run = server.start_run(group_size=2)
    fill(run, *range(12))
    run.write(make_sample(instance_id="half", uid="half"))
    saved: list[list[str | int]] = []
    for turn in range(6):
        run.rewind(len(saved) or None)
        first, second = run.read(num_groups=2), run.read(num_groups=2)
        if turn % 3 == 0:
            run.ack(first)  # killed before the checkpoint
            continue
        run.checkpoint(len(saved) + 1, first)
        saved.append(instances(first))  # killed with the second batch prefetched
        if turn % 3 == 1:
            server.kill9()
            server.restart()
        assert second["batch_id"]
    assert [number for step in saved for number in step] == list(range(8))


def test_the_routes_of_an_unknown_run_are_404(server: ServerProcess) -> None:
    calls: list[tuple[str, str, Json | None]] = [
        ("GET", "batches", None),
        ("GET", "checkpoints", None),
        ("POST", "checkpoints", {"step": 1}),
        ("POST", "rewind", {"step": None}),
        ("PUT", "weight_version", {"weight_version": 1}),
    ]
    for method, path, body in calls:
        answer: httpx.Response = server.client.request(method, f"/v1/runs/run-none/{path}", json=body)
        assert_error(answer, 404, "run_not_found")
