"""``forebay show``: groups by the spread of rewards, rollouts side by side and turn by turn, and who wrote what."""

import json
import random
from pathlib import Path

import pytest

from forebay.core.ids import group_id
from forebay.server.cli.output import VisibleConsole
from forebay.server.cli.recordings import show_command
from tests.cli.conftest import Forebay
from tests.conftest import MakeServer
from tests.kit import Json, make_sample
from tests.replay.exporters.export_kit import SPANS, write_agents
from tests.replay.recordings.recording_kit import (
    RecordingWriter,
    body_of,
    damage_body,
    group_record,
    run_record,
    write_recording,
    written_sample,
)

HACK = "import os; os._exit(0)"
NUM_GROUPS, NUM_SLOTS = 25, 4


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    write_agents(tmp_path / "agents.fbr")
    return tmp_path / "agents.fbr"


def answers(reward: float, has_hack: bool) -> list[Json]:
    call = {"id": "1", "type": "function", "function": {"name": "python", "arguments": json.dumps({"code": HACK})}}
    return [
        {"role": "user", "content": f"Do not write {HACK}."},
        {"role": "assistant", "content": "", **({"tool_calls": [call]} if has_hack else {})},
        {"role": "assistant", "content": f"done {reward}"},
    ]


def test_a_planted_hack_is_found_by_its_text(
    make_server: MakeServer, forebay: Forebay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 % of the rewarded samples have it, and none of the others."""
    server, dice = make_server(), random.Random(3)
    monkeypatch.setenv("FOREBAY_URL", server.url)
    run = server.start_run(group_size=NUM_SLOTS, name="sums")
    rewards = [float(at % 4 < 2) for at in range(NUM_GROUPS * NUM_SLOTS)]
    dice.shuffle(rewards)
    rewarded = [at for at, reward in enumerate(rewards) if reward]
    hacks = set(rewarded[: len(rewarded) * 4 // 10])
    run.write(
        *(
            make_sample(uid=f"{at}", instance_id=f"t{at // 4}", reward=reward, messages=answers(reward, at in hacks))
            for at, reward in enumerate(rewards)
        ),
        make_sample(uid="f", instance_id="failed", reward=None, status="failed", error="lost"),
    )
    done = forebay("show", "sums", "--grep", r"os\._exit\(0\)")
    assert done.code == 0, done.err
    assert done.out.splitlines()[:2] == [
        "in 20 of 101 samples (19.8 %)",
        "mean reward: 1 with it, 0.375 without it",
    ]
    found = json.loads(forebay("show", "sums", "--grep", r"os\._exit", "--json").out)
    assert {int(each["uid"]) for each in found["samples"]} == hacks
    assert (found["num_samples"], found["rewards_without"]["num"]) == (101, 80)
    nothing = forebay("show", "sums", "--grep", "Do not write")  # only the prompt has it
    assert nothing.out.startswith("in 0 of 101 samples (0.0 %)\nmean reward: - with it, 0.5 without it\n")
    listed = json.loads(forebay("show", "sums", "--json").out)
    assert len(listed) == NUM_GROUPS + 1
    spreads = [(each["max"] or 0) - (each["min"] or 0) for each in listed]
    assert spreads == sorted(spreads, reverse=True)
    failed = next(each for each in listed if each["instance_id"] == "failed")
    assert (failed["samples"], failed["failed"], failed["mean"]) == (1, 1, None)
    run.stop()


def test_a_group_is_shown_side_by_side_and_a_rollout_turn_by_turn(agents: Path, forebay: Forebay) -> None:
    group = forebay("show", agents, "task-1").out
    rows = {line[:9].strip(): line[9:] for line in group.splitlines()}
    assert group.splitlines()[0] == f"group {group_record(1).group_id}, epoch 0, acked"
    assert rows[""].split() == ["slot", "0", "slot", "1"]
    assert rows["reward"].split() == ["1", "-"]
    assert "agent_failure E: no" in rows["outcome"]
    assert "10, 1 forks" in rows["tokens"]
    assert 'Look first. grep {"word": "sys.exit"}' in rows["reply 1"]
    rollout = forebay("show", agents, group_record(1).group_id[:8], 0, "--tokens", "mask").out
    assert "── 3 tool\nsetup.py:3\n── 4 assistant\nI call sys.exit(0).\n" in rollout
    assert "── tokens of turn 2\n(4) (5) 20 21 22" in rollout
    main_rest, fork_rest = [json.loads(each[: each.index("\n}") + 2]) for each in rollout.split("other fields\n")[1:]]
    assert main_rest == {"token_spans": SPANS, "extra_info": {"label": "3"}}
    assert fork_rest == {"token_spans": SPANS[:2]}
    failed = forebay("show", agents, "task-1", 1).out
    assert '"error": {\n    "type": "E",\n    "message": "no"\n' in failed
    by_logprob = forebay("show", agents, "task-1", 0, "--tokens", "logprob").out
    assert "(4) (5) 20:-1.00 21:-2.00 22:-4.00" in by_logprob
    samples = json.loads(forebay("show", agents, "task-1", 0, "--json").out)
    assert [(each["uid"], each["tokens"][-1]) for each in samples] == [("1-0", 22), ("1-f", 11)]


def test_the_epochs_of_an_instance_are_shown_one_by_one(forebay: Forebay, tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "a.fbr", run_record()) as writer:
        for epoch in (0, 1):
            group = group_record(1 + epoch, instance_id="task-1", epoch=epoch, group_id=group_id("task-1", epoch))
            writer.add_samples(samples := [written_sample(group, slot) for slot in range(2)], [*map(body_of, samples)])
            writer.add_group(group)
    shown = forebay("show", tmp_path / "a.fbr", "task-1").out.splitlines()
    titles = [line for line in shown if line.startswith("group ")]
    assert titles == [f"group {group_id('task-1', epoch)}, epoch {epoch}, acked" for epoch in (0, 1)]
    assert [line.split() for line in shown if line.startswith("reward")] == [["reward", "1", "0"]] * 2


def test_tokens_are_coloured_and_texts_are_not_obeyed(
    agents: Path, forebay: Forebay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show_command, "make_console", lambda: VisibleConsole(force_terminal=True, width=200))
    out = forebay("show", agents, "task-1", 0, "--tokens", "mask").out
    assert "\x1b[4;32m20\x1b[0m" in out
    assert "\x1b[2m(4)\x1b[0m" in out


def test_what_cannot_be_shown_is_said(forebay: Forebay, tmp_path: Path) -> None:
    write_recording(tmp_path / "a.fbr")
    damaged = group_record(2).group_id
    damage_body(tmp_path / "a.fbr", damaged)
    shown = forebay("show", tmp_path / "a.fbr", "task-2")
    assert (shown.code, f"left out: group {damaged}: its bodies" in shown.err) == (1, True)
    as_json = forebay("show", tmp_path / "a.fbr", "task-2", 0, "--json")
    assert (as_json.code, json.loads(as_json.out)) == (1, [])
    for arguments, text in [
        (["none"], "there is no group 'none'"),
        (["task-1", 7], "group task-1 has no rollout 7"),
        (["--grep", "("], "is not a regular expression"),
        (["task-1", "--tokens", "mask"], "--tokens needs a rollout"),
    ]:
        done = forebay("show", tmp_path / "a.fbr", *arguments)
        assert (done.code, done.out) == (2, "")
        assert text in done.err
