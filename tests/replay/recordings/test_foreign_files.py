"""Files that somebody else made, to do harm: none of them is believed, and none of them is run."""

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from forebay.core.errors import StorageFailed
from forebay.core.ids import group_id
from forebay.core.records.record_file import encode_record
from forebay.core.records.recording_rows import CallRow, EndRow, FileRow, RecordedRun
from forebay.core.records.rows import ColumnsRow, GroupRow
from forebay.replay import RecordedEngine, Recording
from forebay.replay.errors import RecordingDamaged
from tests.cli.conftest import Forebay, forebay
from tests.replay.recordings.recording_kit import group_record, rewrite, write_recording

__all__ = ["forebay"]

HUGE = 100 << 30


def bomb(num_bytes: int) -> bytes:
    """A zstd frame that is to unfold to so many zeros, with a checksum: its head, and the first of its blocks."""
    head = b"\x28\xb5\x2f\xfd" + bytes([0b11000100, 10 << 3]) + num_bytes.to_bytes(8, "little")
    return head + (1 << 17 << 3 | 1 << 1).to_bytes(3, "little") + b"\0"


def test_a_frame_that_unfolds_to_more_than_there_is_room_for_is_not_unfolded(tmp_path: Path) -> None:
    path = tmp_path / "a.fbr"
    write_recording(path)

    def inflated(row: FileRow, body: bytes) -> tuple[FileRow, bytes]:
        if not isinstance(row, ColumnsRow) or row.group_id != group_record(2).group_id:
            return row, body
        return replace(row, samples=[replace(row.samples[0], length=HUGE)]), bomb(HUGE)

    rewrite(path, inflated)
    with Recording.open(path) as recording:
        assert recording.bodies(recording.samples(group_record(1).group_id))
        with pytest.raises(RecordingDamaged, match=r"it claims 107,374,182,400 bytes: more than .* are never written"):
            recording.bodies(recording.samples(group_record(2).group_id))
        assert [each.place for each in recording.verify()] == [f"group {group_record(2).group_id}"]


def test_a_recorded_call_is_not_unfolded_either(tmp_path: Path) -> None:
    path = tmp_path / "calls.fbr"
    call = CallRow(
        seq=1,
        began_s=1.0,
        method="POST",
        path="/generate",
        request_bytes=2,
        status=200,
        content_type="",
        parts=[(HUGE, 0.0)],
        is_whole=True,
    )
    path.write_bytes(encode_record(call, bomb(HUGE), 0))
    with pytest.raises(RecordingDamaged, match="are never written"), RecordedEngine(path).in_thread():
        pass


def _other_group(row: FileRow) -> FileRow:
    is_meant = isinstance(row, ColumnsRow) and row.group_id == group_record(1).group_id
    return replace(row, group_id=group_record(2).group_id) if is_meant else row


def _twice(row: FileRow) -> FileRow:
    return group_record(1) if isinstance(row, GroupRow) else row


def _deep(row: FileRow) -> FileRow:
    deep: Any = "x"
    for _ in range(700):
        deep = {"x": deep}
    return replace(row, payload={"deep": deep}) if isinstance(row, RecordedRun) else row


def _any_epoch(row: FileRow) -> FileRow:
    return (
        replace(row, epoch=1 << 63, group_id=group_id(row.instance_id, 1 << 63)) if isinstance(row, GroupRow) else row
    )


def _more_groups(row: FileRow) -> FileRow:
    return replace(row, num_groups=17) if isinstance(row, EndRow) else row


@pytest.mark.parametrize("change", [_other_group, _twice, _deep, _any_epoch, _more_groups])
def test_rows_that_no_export_makes_are_refused(tmp_path: Path, change: Callable[[FileRow], FileRow]) -> None:
    path = tmp_path / "a.fbr"
    write_recording(path, 4)
    rewrite(path, lambda row, body: (change(row), body))
    with pytest.raises(RecordingDamaged):
        Recording.open(path)


def test_places_outside_of_the_bodies_of_a_record_are_no_places(tmp_path: Path) -> None:
    path = tmp_path / "a.fbr"
    write_recording(path)

    def moved(row: FileRow, body: bytes) -> tuple[FileRow, bytes]:
        if isinstance(row, ColumnsRow):
            row = replace(row, samples=[replace(each, offset=each.offset - 7) for each in row.samples])
        return row, body

    rewrite(path, moved)
    with Recording.open(path) as recording:
        assert len(recording.verify()) == 3


def test_a_time_that_no_calendar_has_is_shown(tmp_path: Path, forebay: Forebay) -> None:
    path = tmp_path / "a.fbr"
    write_recording(path, created_at_s=1e300, name="\x1b]0;mine\x07")
    shown = forebay("recording", "show", path)
    assert (shown.code, "1e+300 s" in shown.out, "\x1b" in shown.out) == (0, True, False)


def test_a_file_system_without_links_has_a_recording_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refused)
    write_recording(tmp_path / "a.fbr")
    assert os.listdir(tmp_path) == ["a.fbr"]
    with Recording.open(tmp_path / "a.fbr") as recording:
        assert recording.verify() == []


def test_a_disk_that_is_full_from_the_beginning_has_nothing_left_on_it(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, limits[1]))
    try:
        with pytest.raises(StorageFailed, match="cannot be written"):
            write_recording(tmp_path / "a.fbr")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []
