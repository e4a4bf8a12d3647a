"""``forebay export``: each format has every rollout of a run or a file, and says what it lacks."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Forebay, forebay
from tests.conftest import MakeServer
from tests.kit import Json, make_group, poll_until
from tests.replay.exporters.export_kit import AGENT, LOGPROBS, MASK, ODD, PROMPT, TOKENS, stored, write_agents
from tests.replay.recordings.recording_kit import (
    RecordingWriter,
    damage_body,
    group_record,
    run_record,
    write_recording,
)

__all__ = ["forebay"]

IDS = [group_record(number).group_id for number in (1, 2, 3)]


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    write_agents(tmp_path / "agents.fbr")
    return tmp_path / "agents.fbr"


def lines(path: Path) -> list[Json]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_jsonl_has_a_line_per_sample_as_it_was_written(agents: Path, forebay: Forebay, tmp_path: Path) -> None:
    done = forebay("export", agents, tmp_path / "out.jsonl", "--to", "jsonl")
    assert (done.code, done.out) == (0, f"{tmp_path / 'out.jsonl'}\n")
    assert done.err == "rollouts: 6, samples: 7\n"
    made = lines(tmp_path / "out.jsonl")
    assert [each["uid"] for each in made] == ["1-0", "1-f", "1-1", "2-0", "2-1", "3-0", "3-1"]
    main, fork, failed, odd, surplus = made[:5]
    assert (main["tokens"], main["logprobs"], main["loss_mask"]) == (TOKENS, LOGPROBS, MASK)
    assert (main["messages"], main["step"], main["group_id"], main["reward"]) == (AGENT, 11, IDS[0], 1.0)
    assert (fork["fork"], fork["slot"], fork["tokens"]) == (1, 0, TOKENS[:5])
    assert (failed["reward"], failed["outcome"], failed["error"]) == (None, "agent_failure", "E: no")
    assert (odd["messages"], surplus["became"]) == (ODD, "surplus")
    assert b'"huge":1e999' in (tmp_path / "out.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("flags", "uids"),
    [
        (["--steps", "11,13"], ["1-0", "1-f", "1-1", "3-0", "3-1"]),
        (["--groups", f"task-2,{IDS[2][:6]}"], ["2-0", "2-1", "3-0", "3-1"]),
        (["--min-reward", "0.25"], ["1-0", "1-f", "2-0", "3-0"]),
        (["--min-reward", "0.25", "--steps", "11", "--groups", IDS[0]], ["1-0", "1-f"]),
    ],
)
def test_what_is_exported_can_be_selected(
    agents: Path, forebay: Forebay, tmp_path: Path, flags: list[str], uids: list[str]
) -> None:
    assert forebay("export", agents, tmp_path / "out", "--to", "jsonl", *flags).code == 0
    assert [each["uid"] for each in lines(tmp_path / "out")] == uids


def test_atif_has_a_trajectory_per_rollout_with_the_tokens_of_each_step(
    agents: Path, forebay: Forebay, tmp_path: Path
) -> None:
    assert forebay("export", agents, tmp_path / "out", "--to", "atif").code == 0
    names = [f"{IDS[0]}-0", f"{IDS[0]}-1", *(f"{each}-{what}" for each in IDS[1:] for what in ("0", "surplus"))]
    assert sorted(path.stem for path in (tmp_path / "out").iterdir()) == sorted(names)
    main = json.loads((tmp_path / "out" / f"{IDS[0]}-0.json").read_bytes())
    assert (main["schema_version"], main["agent"]["name"], main["agent"]["model_name"]) == (
        "ATIF-v1.7",
        "agents",
        "policy",
    )
    assert [step["source"] for step in main["steps"]] == ["system", "user", "agent", "agent"]
    first, last = main["steps"][2:]
    assert first["reasoning_content"] == "Look first."
    assert first["tool_calls"][0]["arguments"] == {"word": "sys.exit"}
    assert first["observation"]["results"] == [{"source_call_id": "call-1", "content": "setup.py:3"}]
    assert first["metrics"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "prompt_token_ids": [1, 2, 3],
        "completion_token_ids": [10, 11],
        "logprobs": [-0.5, -0.25],
        "extra": {"weight_versions": [7]},
    }
    assert last["metrics"]["completion_token_ids"] == [20, 21, 22]
    assert last["metrics"]["extra"] == {"weight_versions": [7, 8], "new_prompt_token_ids": [4, 5]}
    assert {name: main["extra"][name] for name in ("group_id", "reward", "step")} == {
        "group_id": IDS[0],
        "reward": 1.0,
        "step": 11,
    }
    [fork] = main["subagent_trajectories"]
    assert last["observation"]["results"] == [{"subagent_trajectory_ref": [{"trajectory_id": "1-f"}]}]
    assert [step["source"] for step in fork["steps"]] == ["system", "user", "agent"]
    failed = json.loads((tmp_path / "out" / f"{IDS[0]}-1.json").read_bytes())
    assert (failed["extra"]["reward"], len(failed["steps"])) == (None, len(PROMPT))
    odd = json.loads((tmp_path / "out" / f"{IDS[1]}-0.json").read_bytes())
    assert odd["extra"]["token_ids"] == [1, 2]  # which of them were sampled is unknown
    assert odd["steps"][2]["tool_calls"][0]["arguments"] == {"arguments": "not JSON"}


def test_parquet_has_a_row_per_sample(agents: Path, forebay: Forebay, tmp_path: Path) -> None:
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    assert forebay("export", agents, tmp_path / "out.parquet", "--to", "parquet").code == 0
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["uid"] for row in rows] == ["1-0", "1-f", "1-1", "2-0", "2-1", "3-0", "3-1"]
    main, _, failed, odd, _ = rows[:5]
    assert (main["tokens"], main["logprobs"], main["loss_mask"]) == (TOKENS, LOGPROBS, MASK)
    assert [message["role"] for message in main["messages"]] == [message["role"] for message in AGENT]
    assert main["messages"][2]["tool_calls"][0]["function"]["name"] == "grep"
    assert main["reward_parts"] == [{"name": "exact", "value": 1.0}]
    extra = json.loads(main["extra"])
    assert (extra["extra_info"], extra.keys() & {"messages", "uid", "reward_parts"}) == ({"label": "3"}, set())
    assert (failed["reward"], failed["reward_parts"], failed["tokens"], failed["error"]) == (None, None, None, "E: no")
    assert json.loads(odd["extra"])["messages"] == ODD
    assert [message and message["role"] for message in odd["messages"]] == [None, *(each["role"] for each in ODD[1:])]


@pytest.mark.parametrize("target", ["jsonl", "atif", "parquet"])
def test_what_is_wrong_changes_nothing(agents: Path, forebay: Forebay, tmp_path: Path, target: str) -> None:
    if target == "parquet":
        pytest.importorskip("pyarrow")
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for output, flags, text in [
        (mine, [], "mine already exists"),
        (tmp_path / "none" / "out", [], "there is no folder"),
        (tmp_path / "out", ["--min-reward", "2"], "there is nothing to write"),
        (tmp_path / "out", ["--steps", "9"], "step 9 is not recorded: recorded steps: 11-13"),
        (tmp_path / "out", ["--steps", "x"], "neither a step nor"),
        (tmp_path / "out", ["--groups", "task-9"], "there is no group 'task-9'"),
        (tmp_path / "out", ["--groups", ","], "--groups is empty"),
        (tmp_path / "out", ["--groups", ""], "--groups is empty"),
    ]:
        done = forebay("export", agents, output, "--to", target, *flags)
        assert (done.code, done.out) == (2, "")
        assert text in done.err
    assert mine.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agents.fbr", "mine"]
    unknown = forebay("export", agents, tmp_path / "out", "--to", "csv")
    assert unknown.code == 2
    assert "known exporters: atif, jsonl, parquet" in unknown.err


def test_a_damaged_body_is_counted_and_the_rest_is_exported(forebay: Forebay, tmp_path: Path) -> None:
    write_recording(tmp_path / "a.fbr")
    damage_body(tmp_path / "a.fbr", IDS[1])
    done = forebay("export", tmp_path / "a.fbr", tmp_path / "out", "--to", "jsonl", "--json")
    assert done.code == 1
    assert json.loads(done.out)["num_samples"] == len(lines(tmp_path / "out")) == 4
    assert list(json.loads(done.out)["left_out"]) == [IDS[1]]
    assert f"left out: group {IDS[1]}" in done.err
    none = forebay("export", tmp_path / "a.fbr", tmp_path / "none", "--to", "jsonl", "--groups", IDS[1])
    assert (none.code, "what is selected cannot be read" in none.err, (tmp_path / "none").exists()) == (1, True, False)
    assert none.err.startswith(f"left out: group {IDS[1]}: its bodies")


def test_a_run_is_exported_without_what_retention_removed(
    make_server: MakeServer, forebay: Forebay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = make_server(segment_bytes=65_536, replay_bytes=0)
    monkeypatch.setenv("FOREBAY_URL", server.url)
    run = server.start_run(group_size=2, keep_checkpoints=1, name="sums")
    for step in range(1, 5):
        for number in range(8):
            run.write(*make_group(f"{step}.{number}", [0.0, 1.0], extra_info={"text": "x" * 8_000}))
        run.take(num_groups=8, step=step)
        run.checkpoint(step)
    first = run.groups()[0]["group_id"]

    def is_removed() -> bool:
        run.client.post("/v1/gc")
        samples = run.client.get(f"{run.path}/groups/{first}").json()["samples"]
        return not any(sample["has_body"] for sample in samples)

    poll_until(is_removed)
    done = forebay("export", "sums", tmp_path / "out", "--to", "jsonl", "--json")
    assert done.code == 1
    assert (
        json.loads(done.out)["left_out"][first]
        == "its samples were skipped by the export: retention has removed bodies of its samples"
    )
    made = lines(tmp_path / "out")
    assert {each["step"] for each in made} >= {4}
    assert len(made) == 2 * (32 - len(json.loads(done.out)["left_out"]))
    whole = forebay("export", "sums", tmp_path / "last", "--to", "jsonl", "--steps", "4", "--groups", "4.1,4.2")
    assert (whole.code, [each["instance_id"] for each in lines(tmp_path / "last")]) == (0, ["4.1", "4.1", "4.2", "4.2"])
    for flags, text in [(["--steps", "9"], "step 9 is not recorded"), (["--groups", "9.9"], "there is no group '9.9'")]:
        wrong = forebay("export", "sums", tmp_path / "wrong", "--to", "jsonl", *flags)
        assert (wrong.code, text in wrong.err) == (2, True), wrong.err
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name or "partial" in path.name) == ["out"]
    run.stop()


def test_without_the_extra_the_install_line_is_told(
    agents: Path, forebay: Forebay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("forebay.core.lazy_names.find_spec", lambda _name: None)
    monkeypatch.delitem(sys.modules, "forebay.replay.exporters.parquet", raising=False)
    done = forebay("export", agents, tmp_path / "out", "--to", "parquet")
    assert (done.code, "pip install 'forebay[export]'" in done.err) == (1, True), done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["jsonl", "atif", "parquet"])
def test_a_body_may_be_nested_deeply(forebay: Forebay, tmp_path: Path, target: str) -> None:
    if target == "parquet":
        pytest.importorskip("pyarrow")
    with RecordingWriter(tmp_path / "deep.fbr", run_record()) as writer:
        group, deep = group_record(1), "[" * 500 + "]" * 500
        own = '"uid": "1", "instance_id": "task-1", "epoch": 0, "slot": 0, "reward": 1.0'
        body = f'{{{own}, "messages": [{{"role": "assistant", "content": {deep}}}], "deep": {deep}}}'.encode()
        writer.add_sample(stored(group, 0, body), body)
        writer.add_group(group)
    assert forebay("export", tmp_path / "deep.fbr", tmp_path / "out", "--to", target).code == 0
    for arguments in (["--grep", "x"], ["task-1"], ["task-1", 0]):
        assert forebay("show", tmp_path / "deep.fbr", *arguments).code == 0
