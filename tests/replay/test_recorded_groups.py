"""What of a recorded group is used again by a run that generates the rest."""

from pathlib import Path

import pytest

from forebay.buffer.journal_source import JournalSource
from forebay.buffer.store.memory import MemoryStore
from forebay.core.clock import ManualClock
from forebay.core.records.rows import StoredSample
from forebay.core.settings import Settings
from forebay.server.runs.input_files import InputFiles
from forebay.server.runs.recorded_groups import RecordedGroups
from forebay.server.runs.replay_sources import ReplaySources
from tests.buffer.buffer_kit import make_run, open_buffer, write

SIZE = 2


@pytest.mark.parametrize("gone", ["fork-0-1", "fork-0-0"])
async def test_a_rollout_of_which_a_body_is_gone_is_left_to_be_generated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gone: str
) -> None:
    async with open_buffer(MemoryStore(), ManualClock()) as buffer:
        entry = await buffer.add(make_run("run-1", group_size=SIZE))
        for slot in range(SIZE):
            common = {"instance_id": "a", "epoch": 0, "slot": slot, "rollout_id": f"r{slot}", "reward": 1.0}
            for fork in (1, 0):
                await write(entry, uid=f"fork-{slot}-{fork}", fork=fork, **common)
        run = make_run("run-2", group_size=SIZE, replay={"source": "run-1", "mode": "cache"})
        run.replay = {"source": "run-1"}
        sources = ReplaySources(buffer, InputFiles(Settings(), tmp_path), None, 1 << 20)
        async with RecordedGroups(sources) as recorded:
            assert len((await recorded.find(run, "a", 0)).samples) == 2 * SIZE

            def has_body(_: JournalSource, sample: StoredSample) -> bool:
                return sample.row.uid != gone

            monkeypatch.setattr(JournalSource, "has_body", has_body)
            left = await recorded.find(run, "a", 0)
            assert [sample.row.uid for sample in left.samples] == ["fork-1-1", "fork-1-0"]
