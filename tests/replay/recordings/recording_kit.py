"""Recordings for tests: records with one valid value each, and files of a few groups."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import msgspec

from forebay.core.binary_sample import pack
from forebay.core.group import BatchState, GroupState
from forebay.core.ids import group_id
from forebay.core.records.record_file import RecordFile, encode_record
from forebay.core.records.recording_rows import FileRow, RecordedRun
from forebay.core.records.rows import BatchRow, ColumnsRow, GroupRow, Location, SampleRow, StoredSample
from forebay.core.sample import read_any_sample
from forebay.replay.recording_export import NewRecording, RecordEncoder


class RecordingWriter:
    """A file of samples, each before its group; each in a record of its own."""

    def __init__(self, path: Path, run: RecordedRun, steps: str = "") -> None:
        self._encoder = RecordEncoder(run, steps)
        self._file = NewRecording(path)

    def __enter__(self) -> Self:
        self._file.__enter__()
        self._file.write(self._encoder.run())
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._file.write(self._encoder.end())
        self._file.__exit__(kind, *rest)

    def add_sample(self, row: SampleRow, body: bytes) -> None:
        self.add_samples([row], [body])

    def add_samples(self, rows: Sequence[SampleRow], bodies: Sequence[bytes]) -> None:
        """All in one record."""
        self._file.write(self._encoder.samples([StoredSample(row, Location(0, 0, 0)) for row in rows], bodies))

    def add_group(self, group: GroupRow, left_out: str = "") -> None:
        self._file.write(self._encoder.group(group, left_out))

    def add_batch(self, batch: BatchRow) -> None:
        self._file.write(self._encoder.batch(batch))


def flip_bit(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def damage_body(path: Path, group: str) -> None:
    """Flip a bit in the bodies of a group."""
    with closing(RecordFile(path)) as file:
        of_group = (each for each in file.records() if isinstance(each.row, ColumnsRow) and each.row.group_id == group)
        end = next(of_group).end
    flip_bit(path, end - 1)


def rewrite(path: Path, change: Callable[[FileRow, bytes], tuple[FileRow, bytes]]) -> None:
    """Write a file with other rows and bodies, whose checksums agree."""
    content = b""
    with closing(RecordFile(path)) as file:
        for record in file.records():
            content += encode_record(*change(record.row, file.body(record)), len(content))
    path.write_bytes(content)


def run_record(**changes: Any) -> RecordedRun:
    run = RecordedRun(
        run_id="run-0123456789ab",
        name="sums",
        task_type="idle",
        origin="native",
        state="finished",
        reason="",
        created_at_s=1_700_000_000.0,
        payload={"task_type": "idle", "group_size": 2, "temperature": 1.0},
        generator_sha256="ab" * 32,
        generator_hooks=[],
        generator_contract=None,
        input_sha256="",
        weight_version=None,
    )
    return msgspec.structs.replace(run, **changes)


def group_record(number: int, **changes: Any) -> GroupRow:
    group = GroupRow(
        run_id="run-0123456789ab",
        group_id=group_id(f"task-{number}", 0),
        instance_id=f"task-{number}",
        epoch=0,
        number=number,
        order=number,
        closed_seq=number,
        state=GroupState.ACKED,
        reason="",
        is_salvaged=False,
        opened_s=0.0,
        closed_s=1.0,
        num_samples=2,
        num_failed=0,
    )
    return msgspec.structs.replace(group, **changes)


def sample_record(group: GroupRow, slot: int, **changes: Any) -> SampleRow:
    sample = SampleRow(
        run_id="run-0123456789ab",
        uid=f"{group.group_id}-{slot}",
        instance_id=group.instance_id,
        group_id=group.group_id,
        epoch=group.epoch,
        slot=slot,
        outcome="member",
        reward=float(slot),
        at_s=0.5,
        received_at_s=0.5,
        error="",
        reward_start=0,
        reward_end=0,
        rollout_id="",
        oldest_version=None,
        fork=0,
        rollout_outcome="ok",
        is_foreign=False,
    )
    return msgspec.structs.replace(sample, **changes)


def written_sample(group: GroupRow, slot: int) -> SampleRow:
    """The sample of the body that ``body_of`` makes."""
    sample = sample_record(group, slot)
    return with_reward_place(sample, body_of(sample))


def with_reward_place(sample: SampleRow, body: bytes) -> SampleRow:
    """The sample, which says where its reward stands in ``body``."""
    start, end = read_any_sample(body).reward_span or (0, 0)
    return msgspec.structs.replace(sample, reward_start=start, reward_end=end)


def batch_record(number: int, groups: Iterable[int], **changes: Any) -> BatchRow:
    batch = BatchRow(
        run_id="run-0123456789ab",
        batch_id=f"batch-{number}",
        number=number,
        state=BatchState.ACKED,
        group_ids=[group_record(each).group_id for each in groups],
        step=None,
        checkpoint_step=None,
    )
    return msgspec.structs.replace(batch, **changes)


def json_of(sample: SampleRow) -> bytes:
    named = {"uid": sample.uid, "instance_id": sample.instance_id, "messages": [], "reward": sample.reward}
    return msgspec.json.encode({**named, "text": "é " * 20})


def body_of(sample: SampleRow) -> bytes:
    """JSON for slot 0, the binary form for others."""
    return json_of(sample) if sample.slot == 0 else pack(json_of(sample), bytes(range(240)), bytes(240), bytes(60))


def write_recording(path: Path, num_groups: int = 3, **run: Any) -> dict[str, bytes]:
    """A file with so many groups of two samples, each group a batch of its own; the bodies by uid."""
    bodies = {}
    with RecordingWriter(path, run_record(**run)) as writer:
        for number in range(1, num_groups + 1):
            group = group_record(number)
            samples = [written_sample(group, slot) for slot in range(2)]
            bodies |= {sample.uid: body_of(sample) for sample in samples}
            writer.add_samples(samples, [bodies[sample.uid] for sample in samples])
            writer.add_group(group)
            writer.add_batch(batch_record(number, [number], step=number + 10))
    return bodies
