"""The disk fails while a user's hook hangs: the recovery of every run does not wait for that hook."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from forebay.buffer.buffer import Buffer, LiveRun
from forebay.buffer.store.journal import JournalStore
from forebay.core.errors import StorageFailed
from forebay.core.run import Run
from forebay.hooks.run_hooks import HookRunner
from tests.buffer.buffer_kit import (
    built_in_hooks,
    end_process,
    file_hooks,
    fill,
    make_run,
    open_buffer,
    read,
    states,
    take,
    until,
    write,
)
from tests.buffer.store.faulty_disks import RefusingFiles

GENERATOR = """
TASK_TYPE = "task"
def run_rollout(data): ...
import pathlib, time
HANGS = pathlib.Path({hangs!r})
def hang(instance_id):
    while instance_id == "hangs" and HANGS.exists():
        HANGS.with_name("hanging").touch()
        time.sleep(0.01)
def is_valid_group(group, size, task_type):
    {judge}
    return len(group[1]) == 2, len(group[1]) == 2
def normalize_group_data(group):
    {process}
    return group
"""
HANG = "hang(group[0])"


class Trap:
    """A hook that hangs while a file is there, and the disk below it."""

    def __init__(self, folder: Path, *, judge: str = "", process: str = "") -> None:
        self.folder = folder
        self.files = RefusingFiles()
        self.path = folder / "task_generator.py"
        source = GENERATOR.format(hangs=str(folder / "hangs"), judge=judge or "pass", process=process or "pass")
        self.path.write_text(source)
        (folder / "hangs").touch()

    def hooks(self, run: Run) -> HookRunner:
        make = file_hooks(self.path, time_limit_s=3_600) if run.run_id == "run-1" else built_in_hooks
        return make(run)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Buffer]:
        store = JournalStore(self.folder / "data", files=self.files)
        async with open_buffer(store, make_hooks=self.hooks) as buffer:
            await buffer.add(make_run())
            await buffer.add(make_run("run-2"))
            yield buffer
            (self.folder / "hangs").unlink(missing_ok=True)

    async def hanging(self) -> None:
        await until((self.folder / "hanging").exists)

    async def break_disk(self, entry: LiveRun) -> None:
        await write(entry, instance_id="kept")  # and with it all that was recorded before
        self.files.refuses_sync = True
        with pytest.raises(StorageFailed):
            await write(entry, instance_id="lost")
        self.files.refuses_sync = False


@pytest.mark.parametrize(("stage", "state"), [("judge", "open"), ("process", "ready")])
async def test_a_hanging_hook_does_not_hold_up_the_recovery(tmp_path: Path, stage: str, state: str) -> None:
    trap = Trap(tmp_path, **{stage: HANG})
    async with trap.open() as buffer:
        await fill(buffer.get("run-1"), "hangs", [0.0, 1.0])
        await fill(buffer.get("run-1"), "next", [0.0, 1.0])
        reading = asyncio.create_task(read(buffer.get("run-1"), num_groups=1))
        await trap.hanging()
        await trap.break_disk(buffer.get("run-2"))
        await buffer.update("run-2", lambda _: None)
        with pytest.raises(StorageFailed):
            await reading
        assert buffer.is_healthy
        assert set(states(buffer.get("run-1")).values()) == {state}, "a hook that was ended has decided nothing"
        assert await fill(buffer.get("run-2"), "other", [0.0, 1.0]) == ["member"] * 2
        (tmp_path / "hangs").unlink()
        assert [g.instance_id for g in (await take(buffer.get("run-1"), num_groups=2)).groups] == ["hangs", "next"]


async def test_a_tick_that_waits_for_a_hook_is_ended_as_well(tmp_path: Path) -> None:
    trap = Trap(tmp_path, judge=HANG)
    async with trap.open() as buffer:
        await fill(buffer.get("run-1"), "hangs", [0.0, 1.0])
        await end_process(buffer)
        ticking = asyncio.create_task(buffer.tick())
        await trap.hanging()
        await trap.break_disk(buffer.get("run-2"))
        await buffer.update("run-2", lambda _: None)
        await ticking
        assert states(buffer.get("run-1")) == {("hangs", 0): "open"}
        (tmp_path / "hangs").unlink()
        await buffer.tick()
        assert states(buffer.get("run-1")) == {("hangs", 0): "ready"}
