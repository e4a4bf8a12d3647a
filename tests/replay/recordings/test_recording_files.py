"""The file of a recording: what was written is read, and what is damaged is refused."""

import errno
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from forebay.core.binary_sample import pack
from forebay.core.errors import InvalidInput, StorageFailed
from forebay.core.records import log_records
from forebay.core.records.log_records import RECORD_VERSION
from forebay.replay.errors import NotRecorded, RecordingDamaged
from forebay.replay.recording import Recording
from forebay.replay.recording_file import RecordingFile
from tests.replay.recordings.recording_kit import (
    RecordingWriter,
    batch_record,
    flip_bit,
    group_record,
    json_of,
    run_record,
    sample_record,
    with_reward_place,
    write_recording,
    written_sample,
)


def bodies_of(recording: Recording) -> dict[str, bytes]:
    """Of all groups that can be read whole."""
    found = {}
    for group in recording.groups():
        try:
            found.update({sample.row.uid: recording.body(sample) for sample in recording.samples(group.group_id)})
        except RecordingDamaged:
            continue
    return found


def test_what_was_written_is_read_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.fbr"
    bodies = write_recording(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with Recording.open(path) as recording:
        assert recording.run == run_record()
        assert recording.groups() == [group_record(number) for number in (1, 2, 3)]
        assert recording.groups("12-13") == [group_record(2), group_record(3)]
        assert recording.batches() == [batch_record(n, [n], step=n + 10) for n in (1, 2, 3)]
        first = recording.samples(group_record(1).group_id)
        assert [each.row for each in first] == [written_sample(group_record(1), slot) for slot in range(2)]
        assert bodies_of(recording) == bodies
        assert (recording.made.num_samples, recording.made.num_bytes) == (6, sum(map(len, bodies.values())))
        assert recording.verify() == []
        with pytest.raises(NotRecorded, match="no group 'none'"):
            recording.samples("none")


async def test_a_file_is_a_source(tmp_path: Path) -> None:
    bodies = write_recording(tmp_path / "a.fbr")
    async with RecordingFile(tmp_path / "a.fbr") as source:
        groups = await source.groups()
        samples = await source.samples([group.group_id for group in groups])
        in_order = [each for group in groups for each in samples[group.group_id]]
        assert all(map(source.has_body, in_order))
        assert await source.bodies(in_order) == [bodies[each.row.uid] for each in in_order]
        assert [batch.step for batch in await source.batches()] == [11, 12, 13]
        assert source.run.name == "sums"


def test_several_threads_read_a_file_at_once(tmp_path: Path) -> None:
    """As a server does for the groups of a replay: what is whole must not look damaged."""
    path = tmp_path / "a.fbr"
    chance = random.Random(3)
    group = group_record(1)
    samples = [sample_record(group, slot) for slot in range(8)]
    tokens = [chance.randbytes(20_000) * 3 + bytes(range(256)) * 500 for _ in samples]
    bodies = [pack(json_of(sample), each) for sample, each in zip(samples, tokens, strict=True)]
    samples = [with_reward_place(*each) for each in zip(samples, bodies, strict=True)]
    with RecordingWriter(path, run_record()) as writer:
        for sample, body in zip(samples, bodies, strict=True):
            writer.add_sample(sample, body)
        writer.add_group(group)
    with Recording.open(path) as recording, ThreadPoolExecutor(4) as threads:
        places = recording.samples(group.group_id)

        def read(first: int) -> bool:
            return all(recording.body(places[n % 8]) == bodies[n % 8] for n in range(first, first + 300))

        assert all(threads.map(read, range(4)))


def test_any_flipped_bit_is_found(tmp_path: Path) -> None:
    """In a row it ends the recording, in the bodies of a group it costs that group alone."""
    path, damaged = tmp_path / "a.fbr", tmp_path / "b.fbr"
    bodies = write_recording(path, 10)
    content = path.read_bytes()
    rng = random.Random(16)
    num_opened = 0
    for at in range(0, len(content), 17):
        changed = bytearray(content)
        changed[at] ^= 1 << rng.randrange(8)
        damaged.write_bytes(changed)
        try:
            with Recording.open(damaged) as recording:
                (damage,) = recording.verify()
                found = bodies_of(recording)
        except RecordingDamaged:
            continue
        assert damage.place.startswith("group ")
        assert found.items() <= bodies.items()
        assert len(found) == len(bodies) - 2
        num_opened += 1
    assert num_opened > 10


def test_a_damaged_row_ends_the_recording_at_its_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.fbr"
    write_recording(path, 5)
    content = path.read_bytes()
    at = content.index(f"{group_record(3).group_id}-1".encode())
    flip_bit(path, at)
    with pytest.raises(RecordingDamaged, match=r"a\.fbr: byte \d+: the row of this record") as refused:
        Recording.open(path)
    assert content[int(refused.value.place.split()[1]) :].startswith(b"\xf5FBR")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"SQLite format 3\0" * 100, "is not a recording: it has an earlier format"),
        (b"not a recording" * 100, "is not a recording: it does not start with a record"),
    ],
)
def test_other_files_are_no_recordings(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.fbr"
    path.write_bytes(content)
    with pytest.raises(RecordingDamaged, match=message):
        Recording.open(path)


def test_another_format_is_refused_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.fbr"
    with monkeypatch.context() as patched:
        patched.setattr(log_records, "RECORD_VERSION", RECORD_VERSION + 1)
        write_recording(path)
    with pytest.raises(RecordingDamaged, match=f"records of version {RECORD_VERSION + 1}") as refused:
        Recording.open(path)
    assert "export or record it again" in refused.value.hint


def test_a_recording_of_calls_alone_has_no_run(tmp_path: Path) -> None:
    (tmp_path / "calls.fbr").touch()
    with Recording.open(tmp_path / "calls.fbr") as recording:
        assert (recording.has_run, recording.num_calls, recording.verify()) == (False, 0, [])
        with pytest.raises(NotRecorded, match="it may hold engine calls"):
            _ = recording.run


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.fbr"
    path.write_text("mine")
    with pytest.raises(InvalidInput, match="already exists"):
        write_recording(path)
    with pytest.raises(InvalidInput, match="there is no folder"):
        write_recording(tmp_path / "none" / "a.fbr")
    assert path.read_text() == "mine"
    assert os.listdir(tmp_path) == ["a.fbr"]


def test_a_failure_leaves_no_half_file(tmp_path: Path) -> None:
    def write() -> None:
        with RecordingWriter(tmp_path / "a.fbr", run_record()) as writer:
            writer.add_sample(sample_record(group_record(1), 0), b"{}")
            assert len(os.listdir(tmp_path)) == 1
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        write()
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFailed, match=r"a\.fbr cannot be written: No space left on device") as refused:
        write_recording(tmp_path / "a.fbr")
    assert "room" in refused.value.hint
    assert os.listdir(tmp_path) == []


WRITES_FOR_EVER = """
import itertools, sys
from pathlib import Path
from tests.replay.recordings.recording_kit import RecordingWriter, group_record, run_record, sample_record
with RecordingWriter(Path(sys.argv[1]), run_record()) as writer:
    for number in itertools.count(1):
        group = group_record(number)
        writer.add_sample(sample_record(group, 0), b"x" * 100_000)
        writer.add_group(group)
        print(number, flush=True)
"""


def test_a_kill_leaves_no_file_of_that_name(tmp_path: Path) -> None:
    path = tmp_path / "a.fbr"
    command = [sys.executable, "-c", WRITES_FOR_EVER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as writing:
        assert writing.stdout is not None
        assert writing.stdout.readline() == "1\n"
        writing.send_signal(signal.SIGKILL)
    assert not path.exists()
    write_recording(path)
    with Recording.open(path) as recording:
        assert recording.verify() == []


def test_a_file_that_is_cut_off_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.fbr"
    write_recording(path, 4)
    content = path.read_bytes()
    for num_bytes in (1, 50, 1_000, len(content) // 2, len(content) - 80, len(content) - 1):
        path.write_bytes(content[:num_bytes])
        with pytest.raises(RecordingDamaged, match=r"a\.fbr is cut off: its last record is missing after [\d,]+ bytes"):
            Recording.open(path)
    path.write_bytes(content + b"\n")
    with pytest.raises(RecordingDamaged):
        Recording.open(path)


def test_rows_are_dicts(tmp_path: Path) -> None:
    path, group = tmp_path / "a.fbr", group_record(2)
    write_recording(path)
    with Recording.open(path) as recording:
        rows = list(recording.rows())
        assert [row["uid"] for row in rows] == [
            f"{group_record(n).group_id}-{slot}" for n in (1, 2, 3) for slot in (0, 1)
        ]
        (first, second) = recording.rows("12")
    recorded = {"uid": f"{group.group_id}-0", "reward": 0.0, "group_id": group.group_id, "epoch": 0, "slot": 0}
    of_group = {"became": "member", "fork": 0, "error": "", "group_state": "acked", "group_reason": ""}
    assert first == msgspec.json.decode(json_of(written_sample(group, 0))) | recorded | of_group
    assert (second["slot"], second["reward"], len(second["tokens"]), len(second["logprobs"])) == (1, 1.0, 60, 60)
