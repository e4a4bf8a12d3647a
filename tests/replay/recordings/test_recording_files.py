"""The file of a recording: what was written is read, whatever is damaged is named, and everything else still loads."""

import errno
import os
import random
import signal
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from forebay.core.binary_sample import pack
from forebay.core.errors import InvalidInput, StorageFailed
from forebay.replay import recording_writer
from forebay.replay.errors import NotRecorded, RecordingDamaged
from forebay.replay.recording_file import RecordingFile
from forebay.replay.recording_schema import VERSION, create
from forebay.replay.recording_writer import RecordingWriter
from forebay.replay.recordings.recording import Recording
from tests.replay.recordings.recording_kit import (
    batch_record,
    body_of,
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
            found.update({sample.uid: recording.body(sample) for sample in recording.samples(group.group_id)})
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
        assert [msgspec.structs.replace(each, place=(0, 0, 0)) for each in first] == [
            written_sample(group_record(1), slot) for slot in range(2)
        ]
        assert bodies_of(recording) == bodies
        assert (recording.made.num_samples, recording.made.num_bytes) == (6, sum(map(len, bodies.values())))
        assert recording.verify() == recording.damage == []
        with pytest.raises(NotRecorded, match="no group 'none'"):
            recording.samples("none")
    # Every tool can open it, its last line notwithstanding.
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    database.close()


async def test_a_file_is_a_source(tmp_path: Path) -> None:
    bodies = write_recording(tmp_path / "a.fbr")
    async with RecordingFile(tmp_path / "a.fbr") as source:
        groups = await source.groups()
        samples = await source.samples([group.group_id for group in groups])
        in_order = [each for group in groups for each in samples[group.group_id]]
        assert all(map(source.has_body, in_order))
        assert await source.bodies(in_order) == [bodies[each.uid] for each in in_order]
        assert [batch.step for batch in await source.batches()] == [11, 12, 13]
        assert source.run.name == "sums"
        assert source.damage() == []


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


def test_any_flipped_bit_is_named_and_costs_no_other_row(tmp_path: Path) -> None:
    """Every region of the file: its head, each kind of page, the free bytes of pages, its last line."""
    path, damaged = tmp_path / "a.fbr", tmp_path / "b.fbr"
    bodies = write_recording(path, 40)
    content = path.read_bytes()
    rng = random.Random(16)
    places = [*range(0, 100, 5), *range(len(content) - 90, len(content), 6), *range(100, len(content) - 90, 499)]
    num_kept = 0
    for at in places:
        changed = bytearray(content)
        changed[at] ^= 1 << rng.randrange(8)
        damaged.write_bytes(changed)
        try:
            with Recording.open(damaged) as recording:
                assert recording.verify() != [], at
                found = bodies_of(recording)
        except RecordingDamaged:  # the file as a whole is refused
            continue
        assert found.items() <= bodies.items(), at
        assert len(found) >= len(bodies) - 2 or recording.damage, at
        num_kept += len(found) >= len(bodies) - 2
    assert num_kept > 0.8 * len(places)  # most of a file are bodies and free bytes: no more than a group is lost


def test_a_damaged_row_costs_its_group_and_verify_names_it(tmp_path: Path) -> None:
    path = tmp_path / "a.fbr"
    write_recording(path, 5)
    content = bytearray(path.read_bytes())
    uid = f"{group_record(3).group_id}-1".encode()
    at = content.index(b'"uid":"' + uid)
    content[at + 8] ^= 1
    path.write_bytes(content)
    with Recording.open(path) as recording:
        with pytest.raises(RecordingDamaged, match=r"a\.fbr: samples 6: it is not what was written"):
            recording.samples(group_record(3).group_id)
        assert [len(recording.samples(group_record(n).group_id)) for n in (1, 2, 4, 5)] == [2, 2, 2, 2]
        places = [each.place for each in recording.verify()]
        assert {"samples 6", "the file"} <= set(places)


def test_a_damaged_group_is_left_out_and_told(tmp_path: Path) -> None:
    path = tmp_path / "a.fbr"
    write_recording(path, 5)
    content = bytearray(path.read_bytes())
    at = content.index(b'"instance_id":"task-4"')
    content[at + 20] ^= 2
    path.write_bytes(content)
    with Recording.open(path) as recording:
        assert [group.number for group in recording.groups()] == [1, 2, 3, 5]
        assert [str(each) for each in recording.damage] == ["groups 4: it is not what was written"]
        recording.groups()
        assert len(recording.damage) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no recording: it is another database, or empty"),
        (b"not a database" * 100, "is no recording"),
        (None, "is no recording: it is another"),
    ],
)
def test_other_files_are_no_recordings(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "a.fbr"
    if content is None:
        sqlite3.connect(path).execute("CREATE TABLE t (a)").connection.close()
    else:
        path.write_bytes(content)
    with pytest.raises(RecordingDamaged, match=message):
        Recording.open(path)


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_another_format_is_refused_by_its_number(tmp_path: Path, version: int) -> None:
    path = tmp_path / "a.fbr"
    write_recording(path)
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA user_version = {version}")
    database.close()
    with pytest.raises(RecordingDamaged, match=f"has format {version}, and this Forebay knows {VERSION}") as refused:
        Recording.open(path)
    assert "export or record it again" in refused.value.hint


def test_a_recording_of_calls_alone_has_no_run(tmp_path: Path) -> None:
    create(tmp_path / "calls.fbr").close()
    with Recording.open(tmp_path / "calls.fbr") as recording:
        assert (recording.has_run, recording.num_calls, recording.verify()) == (False, 0, [])
        with pytest.raises(NotRecorded, match="an engine's calls alone"):
            _ = recording.run


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.fbr"
    path.write_text("mine")
    with pytest.raises(InvalidInput, match="exists"):
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
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(recording_writer, "seal", full)
    with pytest.raises(StorageFailed, match=r"a\.fbr cannot be written: No space left on device") as refused:
        write_recording(tmp_path / "a.fbr")
    assert "room" in refused.value.hint
    assert os.listdir(tmp_path) == []


WRITES_FOR_EVER = """
import itertools, sys
from pathlib import Path
from tests.replay.recordings.recording_kit import group_record, run_record, sample_record
from forebay.replay.recording_writer import RecordingWriter
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
    write_recording(path, 40)
    for num_bytes in (path.stat().st_size - 1, path.stat().st_size - 80):
        os.truncate(path, num_bytes)
        with Recording.open(path) as recording:
            assert "the file" in [each.place for each in recording.verify()]
    os.truncate(path, 50)
    with pytest.raises(RecordingDamaged, match=r"a\.fbr is cut off: 50 of 114,688 bytes are there"):
        Recording.open(path)


def test_a_body_that_is_not_of_its_row_is_found(tmp_path: Path) -> None:
    """Frames that are whole, but not what the row says: no checksum of their own tells it."""
    path = tmp_path / "a.fbr"
    write_recording(path)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE samples SET body = (SELECT body FROM samples WHERE seq = 2) WHERE seq = 1")
    database.close()
    with Recording.open(path) as recording:
        sample = recording.samples(group_record(1).group_id)[0]
        assert body_of(sample)
        with pytest.raises(RecordingDamaged, match="no frame of this length"):
            recording.body(sample)


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


def test_rows_skip_a_group_with_a_damaged_body_and_name_it(tmp_path: Path) -> None:
    path = tmp_path / "a.fbr"
    write_recording(path)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE samples SET body = substr(body, 1, 30) WHERE seq = 3")
    with Recording.open(path) as recording:
        for _ in range(2):
            assert {row["instance_id"] for row in recording.rows()} == {"task-1", "task-3"}
        assert ["body of sample 3" in str(each) for each in recording.damage] == [True]
