"""Bodies that cannot be read: a damaged one costs its group, a machine that is short of something costs nothing."""

import errno
from contextlib import suppress
from pathlib import Path

import pytest

from forebay.buffer.store.journal import JournalStore
from forebay.core.errors import BodyUnreadable, StorageFailed
from tests.buffer.buffer_kit import (
    MakeHooks,
    built_in_hooks,
    check_books,
    file_hooks,
    fill,
    make_run,
    open_buffer,
    read,
    states,
    take,
)
from tests.buffer.store.faulty_disks import RefusingFiles

LOOKS_AT_BODIES = """
def is_valid_group(group, min_valid_group_size, task_type):
    is_full = len([item["uid"] for item in group[1]]) >= min_valid_group_size
    return is_full, is_full
"""
NUM_GROUPS = 3


@pytest.fixture(params=["built-in hooks", "hooks that read the samples"])
def make_hooks(request: pytest.FixtureRequest, tmp_path: Path) -> MakeHooks:
    if request.param == "built-in hooks":
        return built_in_hooks
    path = tmp_path / "hooks.py"
    path.write_text(LOOKS_AT_BODIES)
    return file_hooks(path)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES])
async def test_a_machine_short_of_something_costs_no_group(tmp_path: Path, code: int, make_hooks: MakeHooks) -> None:
    files = RefusingFiles()
    async with open_buffer(JournalStore(tmp_path / "data", files=files), make_hooks=make_hooks) as buffer:
        entry = await buffer.add(make_run())
        for instance in range(NUM_GROUPS):
            await fill(entry, instance, [0.0, 1.0])
        files.read_error = code
        for _ in range(2):
            with pytest.raises(StorageFailed) as caught:
                await read(entry)
            assert not isinstance(caught.value, BodyUnreadable)
        assert not any(state.startswith("discarded") for state in states(entry).values())
        files.read_error = 0
        assert {group.instance_id for group in (await take(entry)).groups} == {*range(NUM_GROUPS)}
        check_books(entry)


async def test_a_lost_segment_costs_its_groups_and_not_the_reads(tmp_path: Path, make_hooks: MakeHooks) -> None:
    files = RefusingFiles()
    async with open_buffer(JournalStore(tmp_path / "data", files=files), make_hooks=make_hooks) as buffer:
        entry = await buffer.add(make_run())
        await fill(entry, 1, [0.0, 1.0])
        files.read_error = errno.ENOENT
        with suppress(BodyUnreadable):
            assert await read(entry) is None
        files.read_error = 0
        await fill(entry, 2, [0.0, 1.0])
        assert [group.instance_id for group in (await take(entry)).groups] == [2]
        assert states(entry)[1, 0] == "discarded: unreadable"
        check_books(entry)
