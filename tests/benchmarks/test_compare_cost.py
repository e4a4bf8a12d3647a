"""``forebay compare``: its time against writing the same recording into a run, and its memory."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forebay.buffer.buffer import Buffer
from forebay.buffer.replay_feed import Feed
from forebay.buffer.store.journal import JournalStore
from forebay.core.group import GroupState
from forebay.core.ids import group_id
from forebay.core.records.recording_rows import RecordedRun
from forebay.core.records.rows import GroupRow, SampleRow
from forebay.core.sample import read_sample
from forebay.replay.recording_file import RecordingFile
from tests.benchmarks.bodies import sample_body
from tests.benchmarks.machines import show
from tests.buffer.buffer_kit import built_in_hooks, make_run
from tests.replay.recordings.recording_kit import RecordingWriter

pytestmark = pytest.mark.bench

GROUP_SIZE = 8
KILOBYTES = 32
ROUNDS = 3
NUM_BYTES = 512 << 20
"""Of the samples; with 2 GiB, which take a minute to be made, the memory is the same."""
MOST_MEMORY_BYTES = 300_000_000
MOST_TIMES_THE_FEED = 1.5


def write_recording(path: Path, num_bytes: int, kilobytes: int = KILOBYTES) -> int:
    """Groups of eight, all delivered; how many."""
    num_groups = num_bytes // (kilobytes * 1_000 * GROUP_SIZE)
    run = RecordedRun(
        run_id="run-0123456789ab",
        name="",
        task_type="task",
        origin="native",
        state="finished",
        reason="",
        created_at_s=1_700_000_000.0,
        payload={"group_size": GROUP_SIZE},
        generator_sha256="",
        generator_hooks=[],
        generator_contract=None,
        input_sha256="",
        weight_version=None,
    )
    with RecordingWriter(path, run) as writer:
        for number in range(num_groups):
            group, samples = recorded_group(number, kilobytes)
            for sample, body in samples:
                writer.add_sample(sample, body)
            writer.add_group(group)
    return num_groups


def recorded_group(number: int, kilobytes: int) -> tuple[GroupRow, list[tuple[SampleRow, bytes]]]:
    bodies = [sample_body(number * GROUP_SIZE + slot, kilobytes * 1_000, GROUP_SIZE) for slot in range(GROUP_SIZE)]
    instance_id = f"instance-{number}"
    key = group_id(instance_id, 0)
    group = GroupRow(
        run_id="run",
        group_id=key,
        instance_id=instance_id,
        epoch=0,
        number=number + 1,
        order=number + 1,
        closed_seq=number + 1,
        state=GroupState.ACKED,
        reason="",
        is_salvaged=False,
        opened_s=float(number),
        closed_s=number + 0.5,
        num_samples=GROUP_SIZE,
        num_failed=0,
    )
    samples = []
    for slot, body in enumerate(bodies):
        read = read_sample(body, is_lenient=False)
        start, end = read.reward_span or (0, 0)
        record = SampleRow(
            uid=read.uid,
            instance_id=instance_id,
            group_id=key,
            epoch=0,
            slot=slot,
            run_id="run",
            received_at_s=0.0,
            outcome="member",
            reward=read.reward,
            at_s=number + slot / 100,
            error="",
            reward_start=start,
            reward_end=end,
            rollout_id="",
            oldest_version=None,
            fork=0,
            rollout_outcome="ok",
            is_foreign=False,
        )
        samples.append((record, body))
    return group, samples


async def feed_seconds(path: Path, folder: Path) -> float:
    """How long it takes to write the recording into a run with a journal."""
    async with RecordingFile(path) as source, Buffer(JournalStore(folder), built_in_hooks) as buffer:
        entry = await buffer.add(make_run(group_size=GROUP_SIZE))
        groups = await source.groups()
        began_s = time.perf_counter()
        await Feed(lambda: entry, source, groups).run()
        return time.perf_counter() - began_s


def compare_costs(path: Path) -> tuple[float, int, int]:
    """Seconds of the comparison itself, the most bytes that its process had, and how many groups it looked at."""
    code = """
import asyncio, json, resource, sys, time
from pathlib import Path
from forebay.replay.recording_file import RecordingFile
from forebay.server.cli.compare.what_if import WhatChanges, compare
recorded = RecordingFile(Path(sys.argv[1]))
began_s = time.perf_counter()
_, comparison = asyncio.run(compare(recorded, WhatChanges(settings={"normaliser": "rloo"}), None))
took_s = time.perf_counter() - began_s
print(json.dumps([took_s, comparison.num_groups, comparison.num_as_recorded, len(comparison.changes)]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True)
    first, last = done.stdout.splitlines()
    took_s, num_groups, num_as_recorded, num_changes = json.loads(first)
    assert num_groups == num_as_recorded == num_changes
    return took_s, int(last), num_groups


def test_a_comparison_costs_little_more_than_a_feed_and_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "run.fbr"
    num_groups = write_recording(path, NUM_BYTES)
    feeds, comparisons = [], []
    for number in range(ROUNDS):  # one after the other, so that other work of the machine meets both
        feeds.append(asyncio.run(feed_seconds(path, tmp_path / f"data-{number}")))
        comparisons.append(compare_costs(path))
    fed_s, (took_s, num_bytes, num_compared) = min(feeds), min(comparisons)
    assert num_compared == num_groups
    row = (f"{NUM_BYTES >> 20} MiB", fed_s, took_s, took_s / fed_s, MOST_TIMES_THE_FEED, num_bytes / 1e6)
    show("A comparison, two rehearsals", ("samples", "feed, s", "compare, s", "ratio", "target", "MB"), [row])
    assert took_s <= MOST_TIMES_THE_FEED * fed_s
    assert num_bytes <= MOST_MEMORY_BYTES
