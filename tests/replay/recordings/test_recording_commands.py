"""`forebay recording show`, `verify` and `diff`."""

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from forebay.replay.recording import Recording
from forebay.replay.replayed_bodies import splice
from tests.cli.conftest import Forebay, forebay
from tests.conftest import MakeServer
from tests.kit import NativeRun, ServerProcess, assert_error, make_group
from tests.replay.recordings.recording_kit import (
    RecordingWriter,
    damage_body,
    flip_bit,
    group_record,
    with_reward_place,
    write_recording,
)

__all__ = ["forebay"]

RecordT = TypeVar("RecordT", bound=msgspec.Struct)


Changes = dict[str, Any]


def changed(record: RecordT, changes: Changes, *, applies: bool = True) -> RecordT:
    return msgspec.structs.replace(record, **changes) if applies else record


def copied(source: Path, target: Path, *, replayed: bool = False, **changes: Any) -> Path:
    """The same recording once more, with changes: to the run, to group 2, to sample 4, to its body."""
    with Recording.open(source) as old, RecordingWriter(target, changed(old.run, changes.get("run", {}))) as writer:
        for group in old.groups():
            for number, stored in enumerate(old.samples(group.group_id)):
                sample, body, is_meant = stored.row, old.body(stored), (group.number, number) == (2, 1)
                body = body.replace(*changes.get("body", (b"", b""))) if is_meant else body
                other = with_reward_place(changed(sample, changes.get("sample", {}), applies=is_meant), body)
                writer.add_sample(other, splice(body, "run-1", sample.uid) if replayed else body)
            writer.add_group(changed(group, changes.get("group", {}), applies=group.number == 2))
    return target


def test_show_tells_what_a_file_has(forebay: Forebay, tmp_path: Path) -> None:
    write_recording(tmp_path / "a.fbr")
    outcome = forebay("recording", "show", tmp_path / "a.fbr")
    assert outcome.code == 0
    for text in ("run-0123456789ab sums", "finished", "3: acked 3", "6 (", "11-13"):
        assert text in outcome.out
    found = json.loads(forebay("recording", "show", tmp_path / "a.fbr", "--json").out)
    assert (found["num_groups"], found["num_samples"], found["num_batches"], found["num_calls"]) == (3, 6, 3, 0)
    assert (found["states"], found["reasons"], found["steps"]) == ({"acked": 3}, {}, "11-13")
    assert found["run"]["payload"]["temperature"] == 1.0


def test_verify_names_each_damage(forebay: Forebay, tmp_path: Path) -> None:
    path = tmp_path / "a.fbr"
    write_recording(path)
    outcome = forebay("recording", "verify", path)
    assert (outcome.code, "is undamaged" in outcome.out) == (0, True)
    group = group_record(2).group_id
    damage_body(path, group)
    outcome = forebay("recording", "verify", path)
    assert (outcome.code, outcome.out.count("\n")) == (1, 1)
    assert f"group {group}: its bodies at byte " in outcome.out
    (told,) = json.loads(forebay("recording", "verify", path, "--json").out)["damage"]
    assert (told["place"], "checksum" in told["reason"]) == (f"group {group}", True)
    flip_bit(path, path.stat().st_size // 2)
    (told,) = json.loads(forebay("recording", "verify", path, "--json").out)["damage"]
    assert told["place"].partition(" ")[0] in ("byte", "group")


def test_a_replay_tells_the_same_as_its_source(forebay: Forebay, tmp_path: Path) -> None:
    write_recording(tmp_path / "a.fbr")
    copied(
        tmp_path / "a.fbr",
        tmp_path / "b.fbr",
        replayed=True,
        run={"run_id": "run-1", "name": "again", "created_at_s": 1.0, "state": "running"},
        group={"state": "ready", "opened_s": 7.0, "closed_s": 8.0},
        sample={"at_s": 7.5},
    )
    outcome = forebay("recording", "diff", tmp_path / "a.fbr", tmp_path / "b.fbr")
    assert (outcome.code, outcome.out) == (0, "no difference in 3 groups and 6 samples\n")
    assert json.loads(forebay("recording", "diff", tmp_path / "a.fbr", tmp_path / "b.fbr", "--json").out)["is_equal"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"run": {"payload": {"task_type": "idle", "group_size": 2, "temperature": 0.5}}},
            "the run: payload.temperature",
        ),
        ({"group": {"state": "discarded", "reason": "filtered"}}, "of instance 'task-2': state"),
        (
            {"sample": {"reward": 0.25}, "body": (b'"reward":1.0', b'"reward":0.25')},
            f"sample {group_record(2).group_id}-1: reward",
        ),
        (
            {"sample": {"uid": "other"}, "body": (f'"{group_record(2).group_id}-1"'.encode(), b'"other"')},
            f"sample {group_record(2).group_id}-1: uid differs",
        ),
        ({"body": (bytes(range(8)), bytes(range(4, 12)))}, f"the tokens of sample {group_record(2).group_id}-1: [0]"),
        ({"body": ("é é".encode(), "é è".encode())}, f"the body of sample {group_record(2).group_id}-1: text differs"),
    ],
)
def test_the_first_difference_is_told_in_words(forebay: Forebay, tmp_path: Path, changes: Changes, text: str) -> None:
    one, other = tmp_path / "a.fbr", tmp_path / "b.fbr"
    write_recording(one)
    copied(one, other, **changes)
    outcome = forebay("recording", "diff", one, other)
    assert outcome.code == 1
    assert text in outcome.out
    assert str(one) in outcome.out
    (line,) = json.loads(forebay("recording", "diff", one, other, "--json").out)["first"].values()
    assert text in line


def test_a_run_is_compared_with_a_file(
    make_server: MakeServer, forebay: Forebay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server()
    monkeypatch.setenv("FOREBAY_URL", server.url)
    run = server.start_run(group_size=2)
    run.write(*make_group("one", [0.0, 1.0]))
    assert forebay("recording", "export", run.run_id, tmp_path / "a.fbr").code == 0
    assert forebay("recording", "diff", run.run_id, tmp_path / "a.fbr").code == 0
    run.write(*make_group("two", [0.0, 1.0]))
    outcome = forebay("recording", "diff", tmp_path / "a.fbr", run.run_id)
    assert outcome.code == 1
    assert "differ: groups 1 of 2, samples 0 of 2, tokens 0, rewards 0" in outcome.out
    assert f"of instance 'two': instance_id: {tmp_path / 'a.fbr'} nothing" in outcome.out
    run.stop()


def test_a_replay_by_the_server_tells_the_same_as_its_source(
    make_server: MakeServer, forebay: Forebay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server()
    monkeypatch.setenv("FOREBAY_URL", server.url)
    run = server.start_run(group_size=2)
    run.write(*make_group("lost", [..., ...], status="failed", error="lost"))
    run.write(*make_group("one", [0.0, 1.0]), *make_group("two", [1.0, 0.0]))
    run.take(num_groups=2, step=1)
    run.closed(3)
    run.stop()
    path = tmp_path / "a.fbr"
    assert forebay("recording", "export", run.run_id, path).code == 0
    for source in (run.run_id, str(path)):
        started = server.client.post("/v1/runs", json={"replay": source})
        assert started.status_code == 201, started.text
        replay = NativeRun(server, started.json()["run_id"])
        replay.take(num_groups=2, wait_s=20)
        replay.closed(3)
        outcome = forebay("recording", "diff", path, replay.run_id)
        assert outcome.out == "no difference in 3 groups and 6 samples\n", outcome


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_a_file_cut_short_is_called_cut_off(
    server: ServerProcess, forebay: Forebay, tmp_path: Path, share: float
) -> None:
    whole, path = tmp_path / "whole.fbr", tmp_path / "a.fbr"
    write_recording(whole)
    content = whole.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    for command in (["show", path], ["verify", path], ["diff", whole, path]):
        outcome = forebay("recording", *command)
        assert (outcome.code, "cut off" in outcome.err + outcome.out or "is missing after" in outcome.out) == (1, True)
    error = assert_error(server.client.post("/v1/runs", json={"replay": str(path)}), 507, "recording_damaged")
    assert "a.fbr is cut off" in error["message"]
