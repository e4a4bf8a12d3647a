"""A body that is damaged on the server's disk costs its group, and no more of an export, nor of what is made of it."""

import json
from pathlib import Path

import pytest

from forebay.replay.errors import RecordingDamaged
from forebay.replay.recording import Recording
from tests.cli.conftest import Forebay, forebay
from tests.conftest import MakeServer
from tests.kit import NativeRun, ServerProcess, damage, make_group
from tests.replay.recordings.recording_kit import (
    RecordingWriter,
    batch_record,
    body_of,
    group_record,
    run_record,
    written_sample,
)
from tests.replay.replay_kit import read_all, start_replay, until_ended

__all__ = ["forebay"]

LARGE = 1_500_000
"""Characters: each body of such a group is sent by itself."""


@pytest.fixture
def server(make_server: MakeServer, forebay: Forebay, monkeypatch: pytest.MonkeyPatch) -> ServerProcess:
    # `forebay` first: it takes the address away.
    server = make_server()
    monkeypatch.setenv("FOREBAY_URL", server.url)
    return server


def damaged_run(server: ServerProcess) -> NativeRun:
    """A stopped run of four groups in two batches; the third slots of `small-1` and of `large-1` are damaged."""
    run = server.start_run(group_size=3)
    for step in (0, 1):
        for kind, length in (("small", 20), ("large", LARGE)):
            samples = make_group(f"{kind}-{step}", [0.0, 1.0, 0.5], epoch=0)
            for slot, sample in enumerate(samples):
                sample |= {"slot": slot, "text": f"of {kind}-{step}-{slot} " + "x" * length}
            assert all(verdict["status"] == 200 for verdict in run.write(*samples))
        run.take(num_groups=2, step=step + 1)
    run.stop()
    for name in ("small", "large"):
        damage(server.data_dir, f"of {name}-1-2 ".encode())
    return run


def test_a_damaged_body_costs_its_group_and_no_more_of_an_export(
    server: ServerProcess, forebay: Forebay, tmp_path: Path
) -> None:
    run, path = damaged_run(server), tmp_path / "a.fbr"
    ids = {group["instance_id"]: group["group_id"] for group in run.groups()}
    lost = {ids["small-1"]: "small-1", ids["large-1"]: "large-1"}

    outcome = forebay("recording", "export", run.run_id, path)
    assert (outcome.code, outcome.out.strip()) == (1, str(path))
    for group_id, name in lost.items():
        assert f"left out: the samples of group {group_id} of instance '{name}', epoch 0: " in outcome.err
    assert "do not match their checksum" in outcome.err
    assert "a.fbr is complete except for the samples of 2 groups" in outcome.err
    assert f"run {run.run_id} was exported without the samples of 2 groups" in server.log()
    again = json.loads(forebay("recording", "export", run.run_id, tmp_path / "b.fbr", "--json").out)
    assert [each["group_id"] for each in again["left_out"]] == list(lost)
    assert (again["num_groups"], again["num_samples"], again["num_batches"]) == (4, 6, 2)

    assert forebay("recording", "verify", path).code == 0
    shown = forebay("recording", "show", path).out
    assert "the samples of 2 groups, which could not be read" in shown
    assert all(group_id in shown for group_id in lost)
    told = json.loads(forebay("recording", "show", path, "--json").out)
    assert told["left_out"] == again["left_out"]
    outcome = forebay("recording", "diff", path, run.run_id)
    assert (outcome.code, outcome.out) == (0, "no difference in 4 groups and 6 samples\n")
    assert outcome.err.count("not compared, since neither side has them: the samples of group") == 2
    with Recording.open(path) as recording:
        assert [len(recording.samples(ids[name])) for name in ("small-0", "large-0")] == [3, 3]
        for group_id in lost:
            with pytest.raises(RecordingDamaged, match="its samples were skipped by the export: a stored body"):
                recording.samples(group_id)

    judged = json.loads(forebay("compare", path, "--json").out)
    assert [each["group_id"] for each in judged["damaged"]] == list(lost)
    assert judged["self_check"]["num_groups"] == 2


def test_a_replay_of_such_a_file_tells_what_it_lacks_and_goes_on(
    server: ServerProcess, forebay: Forebay, tmp_path: Path
) -> None:
    run, path = damaged_run(server), tmp_path / "a.fbr"
    assert forebay("recording", "export", run.run_id, path).code == 1
    replay = start_replay(server, str(path))
    view = until_ended(replay)
    assert (view["state"], view["replay"]["left_out"]["num_groups"]) == ("finished", 2)
    assert any(each.startswith("2 groups of the recording have no samples") for each in view["warnings"])
    assert view["counts"]["replay_misses"] == 6
    states = {group["instance_id"]: (group["state"], group["reason"]) for group in replay.groups()}
    assert states == {
        "small-0": ("ready", ""),
        "large-0": ("ready", ""),
        "small-1": ("discarded", "unreadable"),
        "large-1": ("discarded", "unreadable"),
    }
    [rows] = read_all(replay)
    assert {row["instance_id"] for row in rows} == {"small-0", "large-0"}


def write_with_left_out(path: Path, *left_out: int) -> None:
    """Three groups of two samples; of those that are left out, one sample was written before that was known."""
    with RecordingWriter(path, run_record()) as writer:
        for number in (1, 2, 3):
            group = group_record(number)
            for slot in range(1 if number in left_out else 2):
                sample = written_sample(group, slot)
                writer.add_sample(sample, body_of(sample))
            writer.add_group(group, "the disk is worn" if number in left_out else "")
        writer.add_batch(batch_record(1, (1, 2, 3), step=7))


def test_what_was_written_of_such_a_group_is_dropped_and_a_whole_file_differs(tmp_path: Path, forebay: Forebay) -> None:
    write_with_left_out(tmp_path / "a.fbr")
    for number in (1, 2, 3):
        path = tmp_path / f"without-{number}.fbr"
        write_with_left_out(path, number)
        with Recording.open(path) as recording:
            assert recording.verify() == []
            assert list(recording.left_out) == [group_record(number).group_id]
            others = [group for group in recording.groups("7") if group.number != number]
            bodies = {s.row.uid: recording.body(s) for group in others for s in recording.samples(group.group_id)}
            assert bodies == {s.uid: body_of(s) for g in others for s in (written_sample(g, 0), written_sample(g, 1))}
            assert (recording.made.num_samples, recording.made.num_bytes) == (4, sum(map(len, bodies.values())))
        outcome = forebay("recording", "diff", tmp_path / "a.fbr", path)
        assert outcome.code == 1
        assert f"samples of group {group_record(number).group_id}" in outcome.out
        assert "left out: the disk is worn" in outcome.out
