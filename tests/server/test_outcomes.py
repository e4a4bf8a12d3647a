"""Outcomes and forks over HTTP: what is refused, what is shown, what is delivered, and what a kill leaves."""

import re
from typing import Any

import pytest

from forebay.core.outcome import RolloutOutcome
from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, ServerProcess, assert_error, make_sample, poll_until

FAILED = {"reward": ..., "status": "failed", "error": {"type": "JudgeFailed", "message": "no verdict"}}
RUN = {"group_size": 2}


def rollout(slot: int, *, forks: int = 0, **changes: Any) -> list[Json]:
    """The samples of one rollout, forks first."""
    told = {"instance_id": "a", "epoch": 0, "slot": slot, "rollout_id": f"r{slot}", "reward": float(slot), **changes}
    uids = {fork: f"r{slot}-f{fork}" for fork in range(1, forks + 1)}
    return [
        *(make_sample(uid=uid, fork=fork, **told) for fork, uid in uids.items()),
        make_sample(uid=f"r{slot}", **told),
    ]


def test_an_unknown_outcome_is_refused_with_the_list(run: NativeRun) -> None:
    response = run.client.post(f"{run.path}/samples", json=make_sample(outcome="won"))
    error = assert_error(response, 422, "invalid_input", "outcome")
    assert all(outcome.value in error["message"] for outcome in RolloutOutcome)
    good, bad = run.write(make_sample(outcome="truncated"), make_sample(outcome="ok", **FAILED))
    assert (good["status"], bad["status"], bad["error"]["field"]) == (200, 422, "outcome")


def test_a_fork_without_its_place_is_refused(run: NativeRun) -> None:
    response = run.client.post(f"{run.path}/samples", json=make_sample(fork=1, epoch=0, slot=0))
    error = assert_error(response, 422, "invalid_input", "fork")
    assert "rollout_id" in error["message"]


def test_outcomes_are_counted_and_shown_with_group_and_sample(run: NativeRun) -> None:
    before = _rollouts(run)
    run.write(*rollout(0, **FAILED, outcome="judge_failure"), *rollout(1, **FAILED, outcome="engine_failure"))
    assert run.read(num_groups=1)["data"] == []
    [group] = run.closed()
    view = run.group(group["group_id"])
    assert (view["reason"], view["num_failed"]) == ("failed", 2)
    assert view["detail"] == "all 2 samples failed: 1 judge_failure, 1 engine_failure"
    assert [sample["rollout_outcome"] for sample in view["samples"]] == ["judge_failure", "engine_failure"]
    outcomes = run.view()["outcomes"]
    assert set(outcomes) == set(RolloutOutcome)
    assert {name: number for name, number in outcomes.items() if number} == {"judge_failure": 1, "engine_failure": 1}
    after = _rollouts(run)
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {
        "judge_failure": 1,
        "engine_failure": 1,
    }


def _rollouts(run: NativeRun) -> dict[str, float]:
    page = run.client.get("/metrics").text
    found = re.findall(r'^forebay_rollouts_total\{outcome="(\w+)"\} (\S+)$', page, re.MULTILINE)
    return {outcome: float(number) for outcome, number in found}


def test_a_slime_writer_may_call_its_own_things_outcome_and_fork(server: ServerProcess) -> None:
    run = server.start_slime("own-words", group_size=2)
    for uid, reward in (("x", 0.0), ("y", 1.0)):
        assert run.send(make_sample(uid=uid, reward=reward, outcome="won", fork="knife")).status_code == 200
    rows = run.fetch()["data"]["data"]
    assert [(row["outcome"], row["fork"]) for row in rows] == [("won", "knife")] * 2
    run.stop()


def test_native_reads_have_forks_and_slime_reads_have_groups_of_one_size(server: ServerProcess) -> None:
    run = server.start_slime("forks", group_size=2)
    run.write(*rollout(1, forks=2), *rollout(0))
    batch = run.read(num_groups=1)
    assert [(row["uid"], row["reward"] > 0) for row in batch["data"]] == [
        ("r1", True),
        ("r1-f1", True),
        ("r1-f2", True),
        ("r0", False),
    ]
    run.release(batch)
    assert [row["uid"] for row in run.fetch(batch_size=2)["data"]["data"]] == ["r1", "r0"]
    run.stop()


@pytest.mark.soak
def test_forks_outlast_a_kill_in_the_middle_of_their_rollout(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run(group_size=2)
    *forks, main = rollout(1, forks=2)
    run.write(*forks)
    server.kill9()
    server.restart()
    [group] = run.groups()
    assert (group["num_samples"], group["num_forks"]) == (0, 2)
    assert [verdict["duplicate"] for verdict in run.write(*forks, main)] == [True, True, False]
    run.write(*rollout(0))
    assert [row["uid"] for row in run.take(num_groups=1)["data"]] == ["r1", "r1-f1", "r1-f2", "r0"]


def test_a_run_that_has_ended_shows_the_same_numbers_after_a_restart(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run(group_size=2)
    failed = {"instance_id": "b", "outcome": "engine_failure", **FAILED}
    run.write(*rollout(0, forks=1), *rollout(1), *(make_sample(uid=uid, **failed) for uid in ("b0", "b1")))
    run.write(*rollout(0))  # a duplicate
    run.stop()
    poll_until(lambda: run.view()["has_ended"])
    at_end = numbers(run)
    server.kill9()
    server.restart()
    assert numbers(run) == at_end
    assert at_end["outcomes"] | {"ok": 2, "engine_failure": 2} == at_end["outcomes"]
    assert at_end["rewards"] == {"num": 2, "mean": 0.5, "min": 0.0, "max": 1.0}
    assert (at_end["samples"]["member"], at_end["samples"]["failed"], at_end["samples"]["duplicate"]) == (3, 2, 1)
    run.take(num_groups=1)  # what it has left is delivered later
    delivered = numbers(run)
    assert delivered["samples"]["rows_delivered"] == 3
    server.stop()
    server.restart()
    assert numbers(run) == delivered


def numbers(run: NativeRun) -> Json:
    """What the run's view counts of its samples and rollouts."""
    view = run.view()
    return {name: view[name] for name in ("outcomes", "rewards", "samples")}


def test_writers_send_forks_and_outcomes_with_token_arrays(run: NativeRun) -> None:
    tokens = {"tokens": [5, 6], "loss_mask": [0, 1], "logprobs": [0.0, -0.5]}
    run.send([*rollout(1, forks=1, outcome="truncated", **tokens), *rollout(0, **tokens)])
    rows = run.take(num_groups=1)["data"]
    assert [(row["uid"], row.get("fork"), row.get("outcome")) for row in rows] == [
        ("r1", None, "truncated"),
        ("r1-f1", 1, "truncated"),
        ("r0", None, None),
    ]
