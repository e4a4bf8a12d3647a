"""``rewards: "again"``: the rollouts are those that were recorded, and the reward function of today is asked."""

import asyncio
import json
import threading
from pathlib import Path

import pytest

from forebay.core.task_row import TaskRow
from forebay.engines.scripted import ScriptedCall
from forebay.generators.rewards import Rewarder
from forebay.generators.rollouts.rejudging import Rejudge
from forebay.generators.rollouts.replayed_samples import ReplayedRollout, ReplayedSample
from forebay.replay.group_frames import GroupHead
from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, ServerProcess, assert_error, poll_until, write_generator
from tests.replay.modes_kit import (
    GROUP_SIZE,
    Answers,
    as_recorded,
    counts,
    finished,
    rows_of,
    scripted,
    slots,
    start,
    write_rows,
    write_words,
)
from tests.replay.recordings.recording_kit import group_record, sample_record

VERIFIED = """
from forebay.generators.agent import AgentGenerator, Verifier
TASK_TYPE = "verified"
def run_rollout(data):
    judge = Verifier(["true"], reads="exit_status")
    AgentGenerator.from_payload(data).run_agent(data["input_file"], ["true"], judge)
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    write_words(tmp_path / "tasks")
    return tmp_path / "tasks"


@pytest.fixture
def server(make_server: MakeServer, tasks: Path) -> ServerProcess:
    return make_server(generators=tasks, start_wait_s=60, max_workers=4)


def record(server: ServerProcess, tmp_path: Path, answers: Answers, **changes: object) -> NativeRun:
    """A run of the rows a, b and c, which has finished; its engine has stopped."""
    rows = write_rows(tmp_path / "rows.jsonl", ["a", "b", "c"])
    with scripted(answers) as engine:
        recorded = start(server, rows, engine.url, **changes)
        finished(recorded)
    answers.forget()
    return recorded


@pytest.mark.parametrize("workers", [None, pytest.param(2, marks=pytest.mark.soak)])
def test_recorded_rollouts_get_the_rewards_of_another_function(server, tasks, tmp_path, workers) -> None:
    answers = Answers({"a": ["fine 1", "unjudged 2", "broken 3", "fine 4"]})
    recorded = record(server, tmp_path, answers)
    before, read_before = slots(recorded), rows_of(recorded, 3)
    failed = {slot["slot"]: slot["rollout_outcome"] for slot in before.values() if slot["reward"] is None}
    assert sorted(failed.values()) == ["agent_failure", "judge_failure"]
    write_words(tasks, shift=100.0, judges_all=True)
    replay = {"source": recorded.run_id, "rewards": "again"}
    run = server.start_run("words", GROUP_SIZE, replay=replay, **({"workers": workers} if workers else {}))
    view = finished(run)
    assert not answers.asked
    assert counts(view) == (3 * GROUP_SIZE, 0, 0)
    after = slots(run)
    assert after.keys() == before.keys()
    for key, sample in before.items():
        told = after[key]
        assert told["uid"] == sample["uid"]
        if sample["reward"] is not None:
            assert told["reward"] == sample["reward"] + 100
        elif sample["rollout_outcome"] == "judge_failure":  # its judge is another one by now
            assert (told["reward"], told["rollout_outcome"]) == (102.5, "ok")
        else:
            assert (told["reward"], told["rollout_outcome"]) == (None, "agent_failure")
    read = rows_of(run, 3)
    for uid, row in read_before.items():
        assert read[uid]["replayed_from"]["uid"] == uid
        assert as_recorded(read[uid]) == {**as_recorded(row), "reward": as_recorded(row)["reward"] + 100}


def test_rollouts_that_are_judged_again_have_the_new_parts_of_their_reward(server, tasks, tmp_path) -> None:
    def write_judge(returned: str) -> None:
        words = write_words(tasks)
        words.write_text(words.read_text().replace("return float", f"reward = {returned}\n    return reward or float"))

    def parts_of(run: NativeRun) -> dict[str, Json]:
        """Those of each slot, which are also in its row."""
        stored = {sample["uid"]: sample["reward_parts"] for sample in slots(run).values() if sample["reward_parts"]}
        rows = rows_of(run, 3).values()
        assert {row["uid"]: row["reward_parts"] for row in rows if "reward_parts" in row} == stored
        return stored

    write_judge('{"reward": float(answer[-2:]), "exact": True, "form": 0.25}')
    recorded = record(server, tmp_path, Answers({"a": ["fine 1", "unjudged 2"]}))
    parts = parts_of(recorded)
    assert list(parts.values()) == [{"exact": 1.0, "form": 0.25}] * (3 * GROUP_SIZE - 1)
    kept = server.start_run("words", GROUP_SIZE, replay={"source": recorded.run_id})
    finished(kept)
    assert parts_of(kept) == parts
    again: Json = {"source": recorded.run_id, "rewards": "again"}
    write_judge('{"reward": float(answer[-2:]), "length": float(answer[-2:])}')
    run = server.start_run("words", GROUP_SIZE, replay=again)
    assert finished(run)["reward_parts"].keys() == {"length"}
    assert {uid: {"length": sample["reward"]} for sample in slots(run).values() if (uid := sample["uid"]) in parts} == (
        parts_of(run)
    )
    write_judge("0")
    run = server.start_run("words", GROUP_SIZE, replay=again)
    assert finished(run)["reward_parts"] == parts_of(run) == {}


def test_a_judge_that_fails_now_is_no_reward_of_zero(server, tasks, tmp_path) -> None:
    answers = Answers({"a": ["fine 1", "later 2", "fine 3", "fine 4"]})
    recorded = record(server, tmp_path, answers)
    words = write_words(tasks)
    words.write_text(words.read_text().replace("unjudged", "later"))
    replay = {"source": recorded.run_id, "rewards": "again"}
    run = server.start_run("words", GROUP_SIZE, replay=replay, max_attempts=1)
    finished(run)
    (failed,) = [sample for sample in slots(run).values() if sample["reward"] is None]
    assert failed["rollout_outcome"] == "judge_failure"
    assert "no judgement" in failed["error"]
    # With mode cache, what has failed then is judged again, and what is missing is generated.
    rows = write_rows(tmp_path / "rows.jsonl", ["a", "b", "c", "d"])
    replay |= {"mode": "cache", "ignore": ["input_file"]}
    with scripted(answers) as engine:
        run = start(server, rows, engine.url, replay=replay)
        view = finished(run)
    assert answers.counted == {"d": GROUP_SIZE}
    assert counts(view) == (3 * GROUP_SIZE, GROUP_SIZE, 0)


def test_steps_come_in_the_batches_of_then(server, tasks, tmp_path) -> None:
    recorded = record(server, tmp_path, Answers(), num_epoch=2)
    batches = [recorded.take(num_groups=2, wait_s=30, step=step)["data"] for step in (1, 2, 3)]
    write_words(tasks, shift=1.0)
    replay = {"source": recorded.run_id, "rewards": "again", "steps": "2-3"}
    run = server.start_run("words", GROUP_SIZE, replay=replay)
    view = finished(run)
    assert view["num_groups_total"] == 4
    again = [run.take(num_groups=2, wait_s=30)["data"] for _ in range(2)]
    for then, now in zip(batches[1:], again, strict=True):
        assert [row["uid"] for row in now] == [row["uid"] for row in then]
        assert [as_recorded(row)["reward"] - 1 for row in now] == [as_recorded(row)["reward"] for row in then]
    # The recorded code gives the recorded rewards.
    run = server.start_run("words", GROUP_SIZE, replay={**replay, "code": "recorded"})
    finished(run)
    for rows in batches[1:]:
        again = run.take(num_groups=2, wait_s=30)["data"]
        assert [as_recorded(row) for row in again] == [as_recorded(row) for row in rows]


def test_a_group_that_was_short_is_closed_with_what_it_has(server, tasks, tmp_path) -> None:
    """The source was stopped in its midst; its replay waits for no time-out."""
    answers = Answers()
    gate = threading.Event()

    async def two_and_no_more(call: ScriptedCall) -> str:
        if len(answers.asked) >= 2:
            await asyncio.to_thread(gate.wait, 60)
        return answers(call)

    rows = write_rows(tmp_path / "rows.jsonl", ["a"])
    with scripted(two_and_no_more) as engine:
        recorded = start(server, rows, engine.url)
        poll_until(lambda: recorded.view()["samples"].get("member") == 2)
        recorded.stop()
        gate.set()
    replay = {"source": recorded.run_id, "rewards": "again"}
    run = server.start_run("words", GROUP_SIZE, replay=replay, min_timeout_group_size_ratio=0.5)
    finished(run)
    (group,) = run.closed()
    assert group["state"] == "ready"
    assert len(slots(run)) == 2
    assert counts(run.view()) == (2, 2, 0)


def test_a_row_that_has_changed_is_generated_anew(server, tmp_path) -> None:
    answers = Answers()
    recorded = record(server, tmp_path, answers)
    rows = write_rows(tmp_path / "rows.jsonl", ["a", "b", "c"], lambda name: "b more" if name == "b" else name)
    replay = {"source": recorded.run_id, "mode": "cache"}
    with scripted(answers) as engine:
        refused = server.client.post("/v1/runs", json=body_of(rows, engine.url, replay))
        assert_error(refused, 409, "replay_differs", "replay")
        run = start(server, rows, engine.url, replay={**replay, "ignore": ["input_file"]})
        assert counts(finished(run)) == (2 * GROUP_SIZE, GROUP_SIZE, 0)
    assert answers.counted == {"more": GROUP_SIZE}
    log = "\n".join(server.client.get(f"{run.path}/log").json()["lines"])
    assert log.count("has changed since it was recorded") == 1


def test_a_verifier_has_no_folder_to_look_into(server, tasks, tmp_path) -> None:
    write_generator(tasks, VERIFIED, "verified_generator.py")
    recorded = record(server, tmp_path, Answers())
    body = {"group_size": GROUP_SIZE, "replay": {"source": recorded.run_id, "rewards": "again"}}
    run = server.start_run("verified", **body)
    reason = run.wait_for_state("failed")["reason"]
    assert "the verifier reads the agent's folder" in reason
    assert "replay with the recorded rewards" in reason
    assert run.groups() == []


def body_of(rows: Path, url: str, replay: dict[str, object]) -> dict[str, object]:
    run = {"task_type": "words", "group_size": GROUP_SIZE, "input_file": str(rows), "remote_engine_url": url}
    return {**run, "replay": replay}


@pytest.mark.parametrize(
    ("replay", "field"),
    [
        ({"mode": "cache"}, "replay.mode"),
        ({"mode": "repeat"}, "replay.mode"),
        ({"rewards": "again"}, "replay.rewards"),
    ],
)
def test_what_only_our_base_can_do_is_refused_for_others(server, replay, field) -> None:
    recorded = server.start_run("idle", 2)
    recorded.write({"uid": "1", "instance_id": "a", "messages": [], "reward": 1.0})
    body = {"task_type": "idle", "group_size": 2, "replay": {"source": recorded.run_id, **replay}}
    error = assert_error(server.client.post("/v1/runs", json=body), 422, "invalid_input", field)
    assert error["hint"]


def test_as_many_judges_are_asked_at_once_as_may_be(server, tasks, tmp_path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [f"row-{n}" for n in range(12)])
    with scripted(Answers()) as engine:
        recorded = start(server, rows, engine.url, group_size=1, num_process=12)
        finished(recorded)
    words = write_words(tasks)
    judge = """
import asyncio
ALL = asyncio.Barrier(12)
async def reward_func(item):
    await ALL.wait()
    return 7.0
async def rollout_func("""
    words.write_text(words.read_text().replace("async def rollout_func(", judge))
    run = server.start_run("words", 1, replay={"source": recorded.run_id, "rewards": "again"}, reward_timeout_s=20)
    finished(run)
    assert {key: sample["reward"] for key, sample in slots(run).items()} == dict.fromkeys(slots(recorded), 7.0)


MESSAGES = [{"role": "assistant", "content": "8"}]
DIGEST = "0123456789abcdef"


@pytest.mark.parametrize(
    ("body", "given"),
    [
        pytest.param({"extra_info": {"row": DIGEST}}, None, id="no messages"),
        pytest.param({"messages": MESSAGES}, None, id="neither what was given nor the row"),
        pytest.param({"messages": MESSAGES, "extra_info": {"level": 3}}, None, id="older data"),
        pytest.param({"messages": MESSAGES, "extra_info": {"row": DIGEST, "agent": {}}}, None, id="an older agent"),
        pytest.param({"messages": MESSAGES, "extra_info": {"row": DIGEST}, "for_reward": None}, None, id="too large"),
        pytest.param({"messages": MESSAGES, "extra_info": {"row": DIGEST}}, {"level": 5}, id="nothing was given"),
        # What the row itself calls so stands in the place of its digest.
        pytest.param({"messages": MESSAGES, "extra_info": {"row": 17}}, {"level": 5}, id="a field of the row"),
        pytest.param({"messages": MESSAGES, "for_reward": {"more": 1}}, {"level": 5, "more": 1}, id="what was given"),
    ],
)
async def test_only_what_was_recorded_is_judged(body: Json, given: Json | None) -> None:
    sample = sample_record(group_record(1), 0, reward=1.0, reward_start=0, reward_end=0)
    head = GroupHead(run_id="run-1", group_id=sample.group_id, epoch=0, samples=[sample])
    body = {"uid": sample.uid, "reward": 1, **body}
    rollout = ReplayedRollout(head, (ReplayedSample(sample, json.dumps(body).encode()),))
    asked: list[Json] = []

    async def full_marks(item: Json) -> float:
        asked.append(item)
        return 2.0

    async with Rewarder(full_marks, timeout_s=30.0, num_workers=1) as rewarder:
        rejudge = Rejudge(rewarder, num_retries=0, at_once=1)
        judged = await rejudge.judged(rollout, TaskRow(0, sample.instance_id, [], {"level": 5}))
    if given is None:
        assert (asked, judged.main.record.reward) == ([], None)
        assert json.loads(judged.main.body)["error"]["type"] == "not_recorded"
    else:
        assert [{name: item[name] for name in item.keys() & {"level", "more"}} for item in asked] == [given]
        assert (judged.main.record.reward, json.loads(judged.main.body)["reward"]) == (2.0, 2.0)
