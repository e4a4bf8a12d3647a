"""Recordings for tests: records with one valid value each, and files of a few groups."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from forebay.core.binary_sample import pack
from forebay.core.ids import group_id
from forebay.core.sample import read_any_sample
from forebay.replay.model import BatchRecord, GroupRecord, RunRecord, SampleRecord
from forebay.replay.recording_writer import RecordingWriter


def run_record(**changes: Any) -> RunRecord:
    run = RunRecord(
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


def group_record(number: int, **changes: Any) -> GroupRecord:
    group = GroupRecord(
        group_id=group_id(f"task-{number}", 0),
        instance_id=f"task-{number}",
        epoch=0,
        number=number,
        order=number,
        closed_seq=number,
        state="acked",
        reason="",
        is_salvaged=False,
        opened_s=0.0,
        closed_s=1.0,
        num_samples=2,
        num_failed=0,
    )
    return msgspec.structs.replace(group, **changes)


def sample_record(group: GroupRecord, slot: int, **changes: Any) -> SampleRecord:
    sample = SampleRecord(
        uid=f"{group.group_id}-{slot}",
        instance_id=group.instance_id,
        group_id=group.group_id,
        epoch=group.epoch,
        slot=slot,
        became="member",
        reward=float(slot),
        at_s=0.5,
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


def written_sample(group: GroupRecord, slot: int) -> SampleRecord:
    """The sample of the body that ``body_of`` makes."""
    sample = sample_record(group, slot)
    return with_reward_place(sample, body_of(sample))


def with_reward_place(sample: SampleRecord, body: bytes) -> SampleRecord:
    """The sample, which says where its reward stands in ``body``."""
    start, end = read_any_sample(body).reward_span or (0, 0)
    return msgspec.structs.replace(sample, reward_start=start, reward_end=end)


def batch_record(number: int, groups: Iterable[int], **changes: Any) -> BatchRecord:
    batch = BatchRecord(
        batch_id=f"batch-{number}",
        number=number,
        state="acked",
        group_ids=[group_record(each).group_id for each in groups],
        step=None,
        checkpoint_step=None,
    )
    return msgspec.structs.replace(batch, **changes)


def json_of(sample: SampleRecord) -> bytes:
    named = {"uid": sample.uid, "instance_id": sample.instance_id, "messages": [], "reward": sample.reward}
    return msgspec.json.encode({**named, "text": "é " * 20})


def body_of(sample: SampleRecord) -> bytes:
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
            for sample in samples:
                writer.add_sample(sample, bodies[sample.uid])
            writer.add_group(group)
            writer.add_batch(batch_record(number, [number], step=number + 10))
    return bodies
