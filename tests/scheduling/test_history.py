"""What policies learn of earlier epochs and runs: read from traces, newest first, and whatever is broken left out."""

import logging
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.telemetry.tracing.records import VERSION, Head, RolloutSummary, Span
from forebay.workers.scheduling.history import RecordedHistory

S = 1_000_000_000
HEAD = Head(version=VERSION, run_id="run-1", process="run", start=1, pid=7, wall_ns=1, mono_ns=1)


def summary(instance: Any = "a", sampled: int = 100, **changes: Any) -> RolloutSummary:
    given = {"t": 5 * S, "d": 4 * S, "started": 6 * S, "id": "0", "uid": "u", "group": "g", "ending": "finished"}
    return RolloutSummary(instance=instance, sampled=sampled, **{**given, **changes})


def write(folder: Path, number: int, *records: Any, age_s: int = 0, head: Any = HEAD, rest: bytes = b"") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"run-1-7.{number}.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in (head, *records)) + rest)
    os.utime(path, (1_000_000_000 - age_s,) * 2)
    return path


def test_finished_rollouts_are_known_with_what_they_took(tmp_path: Path) -> None:
    records = [
        Span(name="decode", t=1, d=1, id="1"),
        summary(epoch=2, number=3, prompt=17),
        summary("aborted", ending="aborted"),
        summary("broken", ending="broken"),
        summary("retried", ending="retried"),
        summary(1, 50, started=0),
    ]
    write(tmp_path / "own", 1, *records)
    first, second = RecordedHistory(tmp_path / "own", [])
    assert (first.instance_id, first.epoch, first.number, first.tokens, first.prompt_tokens) == ("a", 2, 3, 100, 17)
    assert (first.seconds, first.is_of_this_run) == (3.0, True)
    assert (second.instance_id, second.tokens, second.seconds) == (1, 50, 4.0)


def test_earlier_runs_come_before_the_run_itself_and_older_files_before_newer_ones(tmp_path: Path) -> None:
    write(tmp_path / "own", 1, summary("own-old"), age_s=1)
    write(tmp_path / "own", 2, summary("own-new"))
    write(tmp_path / "newest", 1, summary("newest"))
    write(tmp_path / "older", 1, summary("older"))
    history = RecordedHistory(tmp_path / "own", [tmp_path / "newest", tmp_path / "older"])
    assert [past.instance_id for past in history] == ["older", "newest", "own-old", "own-new"]
    assert [past.is_of_this_run for past in history] == [False, False, True, True]
    assert (len(history), history[0].instance_id, len(history[1:])) == (4, "older", 3)


def test_only_the_newest_records_are_used(tmp_path: Path) -> None:
    write(tmp_path / "own", 1, summary("1"), summary("2"), age_s=1)
    write(tmp_path / "own", 2, summary("3"), summary("4"))
    write(tmp_path / "earlier", 1, summary("5"))
    history = RecordedHistory(tmp_path / "own", [tmp_path / "earlier"], max_records=3)
    assert [past.instance_id for past in history] == ["2", "3", "4"]


@pytest.mark.parametrize(
    ("head", "rest", "message"),
    [
        (HEAD, b'{"kind":"rollout","t":1\n', "skipping 1 lines of "),
        (HEAD, b'{"kind":"rollout","t":"soon"}\n', "skipping 1 lines of "),
        ({"kind": "none"}, b"", "skipping the recorded rollouts in "),
        (msgspec.structs.replace(HEAD, version=VERSION + 1), b"", "is not supported (the newest supported is"),
    ],
)
def test_what_is_broken_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, head: Any, rest: bytes, message: str
) -> None:
    write(tmp_path / "own", 1, summary("good"))
    write(tmp_path / "own", 2, head=head, rest=rest)
    with caplog.at_level(logging.WARNING):
        assert [past.instance_id for past in RecordedHistory(tmp_path / "own", [])] == ["good"]
    assert [message in each.getMessage() for each in caplog.records] == [True]


def test_half_a_line_at_the_end_and_folders_that_are_not_there_are_nothing_to_speak_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "own", 1, summary("good"), rest=b'{"kind":"rollout","t":1')
    with caplog.at_level(logging.WARNING):
        history = RecordedHistory(tmp_path / "own", [tmp_path / "never"])
        assert [past.instance_id for past in history] == ["good"]
        assert list(RecordedHistory(None, [])) == []
    assert caplog.records == []


def test_nothing_is_read_before_somebody_looks(tmp_path: Path) -> None:
    path = write(tmp_path / "own", 1, summary())
    history = RecordedHistory(tmp_path / "own", [])
    path.unlink()
    assert len(history) == 0
