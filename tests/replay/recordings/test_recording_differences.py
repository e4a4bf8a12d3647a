"""``forebay recording diff``: a run beside its own replays, and counts of what differs."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.core.binary_sample import as_json
from tests.cli.conftest import Forebay, forebay
from tests.conftest import MakeServer
from tests.replay.modes_kit import Answers, finished, scripted, start, write_rows, write_words
from tests.replay.recordings.recording_kit import (
    RecordingWriter,
    body_of,
    group_record,
    run_record,
    with_reward_place,
    written_sample,
)
from tests.replay.replay_kit import start_replay, until_ended

__all__ = ["forebay"]

HOW_ITS_PROCESSES_WORK = {
    "num_process": 3,
    "workers": 2,
    "scheduler": {"policy": "longest-first"},
    "oversampling": {"rollouts_per_group": 5},
    "queue_size": 7,
}


def test_a_run_and_its_own_replays_have_no_difference(
    make_server: MakeServer, forebay: Forebay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_words(tmp_path / "tasks")
    server = make_server(generators=tmp_path / "tasks", start_wait_s=60, max_workers=4)
    monkeypatch.setenv("FOREBAY_URL", server.url)
    rows = write_rows(tmp_path / "rows.jsonl", ["a", "b", "c"])
    with scripted(Answers()) as engine:
        recorded = start(server, rows, engine.url, **HOW_ITS_PROCESSES_WORK)
        finished(recorded)
        recorded.take(num_groups=3)
        # Another order of the same rows, by other processes.
        replay = {"source": recorded.run_id, "mode": "cache"}
        cached = start(server, rows, engine.url, replay=replay, num_process=1, name="cached", workers=None)
        finished(cached)
    fed = start_replay(server, recorded.run_id)
    until_ended(fed)
    for other in (fed, cached):
        outcome = forebay("recording", "diff", recorded.run_id, other.run_id)
        assert outcome.code == 0, outcome
        assert outcome.out.startswith("no difference in 3 groups"), outcome


def write(path: Path, numbers: tuple[int, ...], old: bytes, new: bytes, **run: Any) -> Path:
    """A file with groups of these numbers, as ``write_recording`` makes them, with ``new`` bodies in group 2."""
    with RecordingWriter(path, run_record(**run)) as writer:
        for group in map(group_record, numbers):
            for slot in range(2):
                sample = written_sample(group, slot)
                body = body_of(sample).replace(old, new) if group.number == 2 else body_of(sample)
                reward = msgspec.json.decode(as_json(body))["reward"]
                writer.add_sample(with_reward_place(msgspec.structs.replace(sample, reward=reward), body), body)
            writer.add_group(group)
    return path


def test_what_differs_is_counted_and_the_first_of_each_kind_is_shown(forebay: Forebay, tmp_path: Path) -> None:
    payload = {"task_type": "idle", "group_size": 2, "temperature": 0.5, "num_process": 64}
    one = write(tmp_path / "a.fbr", (1, 2, 3), b"", b"", generator_files={"judge.py": "a1", "words.py": "w"})
    # In each body of group 2 another reward, and in the binary one two tokens.
    files = {"judge.py": "b2", "words.py": "w"}
    two = write(tmp_path / "b.fbr", (2, 1), b'"reward":1.0', b'"reward":0.5', payload=payload, generator_files=files)
    files = {"judge.py": "a1", "words.py": "w"}
    three = write(tmp_path / "c.fbr", (1, 2, 4), bytes(range(8)), bytes(range(1, 9)), generator_files=files)
    group = group_record(2).group_id

    outcome = forebay("recording", "diff", one, two)
    assert outcome.code == 1
    assert outcome.out.splitlines() == [
        "differ: groups 1 of 3, samples 1 of 4, tokens 0, rewards 1",
        f'the code: judge.py differs: {one} "a1", {two} "b2"',
        f"the run: payload.temperature: {one} 1.0, {two} 0.5",
        f"group {group_record(3).group_id} of instance 'task-3': state: {one} \"ready\", {two} nothing",
        f"sample {group}-1: reward: {one} 1.0, {two} 0.5",
    ]
    found = json.loads(forebay("recording", "diff", one, three, "--json").out)
    assert found["is_equal"] is False
    assert found["num_different"] == {"groups": 2, "samples": 1, "tokens": 2, "rewards": 0}
    assert found["num_compared"] == {"groups": 4, "samples": 4}
    assert list(found["first"]) == ["groups", "tokens"]
    assert found["first"]["tokens"].startswith(f"the tokens of sample {group}-1: [0]: {one} 50462976, {three} ")
