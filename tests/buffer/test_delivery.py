"""Reads: what goes out, in which order, once, and what happens to it when the reader goes away."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.buffer.store.abc import Store
from forebay.buffer.store.memory import MemoryStore
from forebay.core.clock import ManualClock
from forebay.core.errors import RunEnded
from tests.buffer.buffer_kit import (
    check_books,
    end_process,
    file_hooks,
    fill,
    make_run,
    open_buffer,
    put,
    read,
    rows_of,
    states,
    take,
    turns,
    uids_of,
    until,
    write,
)

GENERATOR = """
TASK_TYPE = "task"
def run_rollout(data): ...
"""


@pytest.fixture
def make_file(tmp_path: Path) -> Callable[[str], Path]:
    def make(source: str) -> Path:
        path = tmp_path / "task_generator.py"
        path.write_text(GENERATOR + source)
        return path

    return make


async def test_reader_that_goes_away_gives_everything_back(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run())
        await fill(entry, 1, [0.0, 1.0])
        await fill(entry, 2, [None, None])
        batch = await read(entry)
        assert batch is not None
        assert batch.meta_info["finished_groups"] == [1, 2]
        entry.delivery.leases.release_soon(batch.batch_id)
        entry.delivery.leases.release_soon(batch.batch_id)
        entry.delivery.leases.ack_soon(batch.batch_id)
        again = await take(entry)
        assert uids_of(again) == uids_of(batch)
        assert again.meta_info == batch.meta_info
        assert again.groups[0].row.num_deliveries == 2
        check_books(entry)


async def test_released_short_group_goes_out_once(store: Store) -> None:
    """It was leased while open; given back it is an ordinary ready group, queued once."""
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run(group_size=4, min_valid_group_size_ratio=0.5, min_valid_item_size_ratio=0.5))
        await fill(entry, 1, [0.0, 1.0])
        batch = await read(entry)
        assert batch is not None
        entry.delivery.leases.release_soon(batch.batch_id)
        await fill(entry, 2, [0.0, 1.0, 1.0, 0.0])
        assert await read(entry, num_groups=3) is None
        assert [g.instance_id for g in (await take(entry, num_groups=2)).groups] == [1, 2]
        check_books(entry)


async def test_short_valid_groups_wait_behind_full_ones(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run(group_size=4, min_valid_group_size_ratio=0.5, min_valid_item_size_ratio=0.5))
        await fill(entry, 1, [0.0, 1.0])
        await fill(entry, 2, [0.0, 1.0, 1.0, 0.0])
        assert [g.instance_id for g in (await take(entry)).groups] == [2]
        assert states(entry)[1, 0] == "open"
        await fill(entry, 3, [0.0, 1.0, 1.0, 0.0])
        assert [g.instance_id for g in (await take(entry, num_groups=2)).groups] == [3, 1]
        assert await fill(entry, 1, [1.0]) == ["late"]


async def test_waiting_readers_are_served_in_the_order_in_which_they_came(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run())
        served: list[int] = []

        async def wait(number: int) -> None:
            assert await read(entry, wait_s=10, num_groups=1) is not None
            served.append(number)

        readers = []
        for number in range(5):
            readers.append(asyncio.create_task(wait(number)))
            await turns(10)
        for instance_id in range(5):
            await fill(entry, instance_id, [0.0, 1.0])
            await until(lambda done=instance_id + 1: len(served) == done)
            if instance_id == 1:  # whoever comes now is behind those who are there
                readers.append(asyncio.create_task(wait(5)))
        await fill(entry, 5, [0.0, 1.0])
        await asyncio.gather(*readers)
        assert served == list(range(6))


async def test_a_reader_that_wants_more_than_there_is_holds_nobody_up(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run())
        large = asyncio.create_task(read(entry, wait_s=10, num_groups=3))
        await turns(10)
        await fill(entry, 1, [0.0, 1.0])
        assert await read(entry, num_groups=1) is not None
        for instance_id in (2, 3, 4):
            await fill(entry, instance_id, [0.0, 1.0])
        batch = await large
        assert batch is not None
        assert [group.instance_id for group in batch.groups] == [2, 3, 4]


async def test_sample_that_arrives_while_a_hook_is_asked_is_not_lost(make_file: Callable[[str], Path]) -> None:
    """The first group is chosen while short; before the second has been asked about, another sample comes for it."""
    path = make_file(
        "import pathlib, time\n"
        "def is_valid_group(group, size, task_type): return len(group[1]) >= 2, len(group[1]) >= 2\n"
        "def filter_item(item, task_type):\n"
        "    if item['uid'] == 'slow':\n"
        f"        pathlib.Path({str(path_of(make_file))!r}, 'asked').touch()\n"
        f"        while not pathlib.Path({str(path_of(make_file))!r}, 'go').exists(): time.sleep(0.005)\n"
        "    return True\n"
    )
    async with open_buffer(MemoryStore(), make_hooks=file_hooks(path)) as buffer:
        entry = await buffer.add(make_run(group_size=4, min_valid_item_size_ratio=0.5))
        await fill(entry, 1, [0.0, 1.0])
        await write(entry, instance_id=2, uid="slow", reward=0.0)
        await write(entry, instance_id=2, uid="other", reward=1.0)
        reader = asyncio.create_task(read(entry, num_groups=2))
        await until((path.parent / "asked").exists)
        put(entry, instance_id=1, uid="meanwhile", reward=0.5)
        (path.parent / "go").touch()
        batch = await reader
        assert batch is not None
        assert "meanwhile" in uids_of(batch)
        assert len(batch.rows) == 8
        check_books(entry)


def path_of(make_file: Callable[[str], Path]) -> Path:
    """The folder in which the file will lie."""
    return make_file("").parent


SLOW_HOOK = """
import pathlib, time
def {name}(group, *rest):
    folder = pathlib.Path(__file__).parent
    (folder / "asked").touch()
    while not (folder / "go").exists():
        time.sleep(0.005)
    return {answer}
"""


@pytest.mark.parametrize(
    ("name", "answer"),
    [("is_valid_group", "(True, True)"), ("normalize_group_data", "group"), ("get_group_data_meta_info", "{}")],
)
async def test_reader_cancelled_while_a_hook_is_asked_leaves_the_group_for_the_next(
    make_file: Callable[[str], Path], name: str, answer: str
) -> None:
    path = make_file(SLOW_HOOK.format(name=name, answer=answer))
    async with open_buffer(MemoryStore(), make_hooks=file_hooks(path)) as buffer:
        entry = await buffer.add(make_run())
        await fill(entry, 1, [0.0, 1.0])
        reader = asyncio.create_task(read(entry))
        await until((path.parent / "asked").exists)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        (path.parent / "go").touch()
        assert [g.instance_id for g in (await take(entry)).groups] == [1]
        check_books(entry)


async def test_reader_cancelled_at_any_point_leaves_the_groups_for_the_next(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run())
        await fill(entry, 1, [0.0, 1.0])
        num_turns = 0
        while True:
            reader = asyncio.create_task(read(entry, num_groups=1))
            await turns(num_turns)
            if reader.done():
                break
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            assert states(entry)[1, 0] in ("open", "ready")
            check_books(entry)
            num_turns += 1
        batch = reader.result()
        assert batch is not None
        assert len(batch.rows) == 2
        assert num_turns > 0


async def test_failing_hook_costs_one_group_and_not_the_read(make_file: Callable[[str], Path]) -> None:
    path = make_file(
        "def normalize_group_data(group):\n    if group[0] == 1: raise ValueError('the reason')\n    return group\n"
    )
    async with open_buffer(MemoryStore(), make_hooks=file_hooks(path)) as buffer:
        entry = await buffer.add(make_run())
        await fill(entry, 1, [0.0, 1.0])
        await fill(entry, 2, [0.0, 1.0])
        assert [g.instance_id for g in (await take(entry)).groups] == [2]
        assert states(entry)[1, 0] == "discarded: hook_failed"
        detail = next(g.row.detail for g in entry.buffer.groups.by_id.values() if g.instance_id == 1)
        assert "the reason" in detail
        assert "task_generator.py" in detail


async def test_slime_read_discards_what_is_incomplete_and_v1_sends_it(make_file: Callable[[str], Path]) -> None:
    path = make_file("def pad_group_data(group, size): return group[0], group[1][:1]\n")
    async with open_buffer(MemoryStore(), make_hooks=file_hooks(path)) as buffer:
        entry = await buffer.add(make_run())
        await fill(entry, 1, [0.0, 1.0])
        assert len((await take(entry, num_groups=1)).rows) == 1
        await fill(entry, 2, [0.0, 1.0])
        assert await read(entry) is None
        assert states(entry)[2, 0] == "discarded: incomplete"


async def test_surplus_rows_are_cut_for_slime_only(make_file: Callable[[str], Path]) -> None:
    path = make_file("def pad_group_data(group, size): return group[0], group[1] * 2 + group[1][:1]\n")
    async with open_buffer(MemoryStore(), make_hooks=file_hooks(path)) as buffer:
        entry = await buffer.add(make_run())
        await fill(entry, 1, [0.0, 1.0])
        batch = await read(entry)
        assert batch is not None
        assert (len(batch.rows), entry.buffer.counts["rows_cut"]) == (4, 1)
        entry.delivery.leases.release_soon(batch.batch_id)
        assert len((await take(entry, num_groups=1)).rows) == 5


async def test_hooks_of_a_new_start_answer_for_groups_that_were_staged(make_file: Callable[[str], Path]) -> None:
    hooks: list[Any] = []
    async with open_buffer(MemoryStore(), make_hooks=lambda run: hooks[-1](run)) as buffer:  # noqa: PLW0108 - the list grows later
        hooks.append(file_hooks(make_file("def normalize_group_data(group): return group\n")))
        entry = await buffer.add(make_run())
        await fill(entry, 1, [0.0, 1.0])
        assert await read(entry, num_groups=2) is None
        source = "def normalize_group_data(group):\n    for item in group[1]: item['reward'] = 9.0\n    return group\n"
        hooks.append(file_hooks(make_file(source)))
        await buffer.replace_hooks("run-1")
        assert [row["reward"] for row in rows_of(await take(entry))] == [9.0, 9.0]


async def test_meta_hook_of_a_late_verdict_is_given_the_samples(make_file: Callable[[str], Path]) -> None:
    """The run was added before its generator was known."""
    path = make_file("def get_group_data_meta_info(data): return {'ids': sorted(data), 'num': len(data[1])}\n")
    makers = [file_hooks(path), file_hooks(make_empty(path))]
    async with open_buffer(MemoryStore(), make_hooks=lambda run: makers.pop()(run)) as buffer:  # noqa: PLW0108 - one for each call
        entry = await buffer.add(make_run())
        await buffer.replace_hooks("run-1")
        await fill(entry, 1, [0.0, 1.0])
        meta = (await take(entry)).meta_info
        assert (meta["ids"], meta["num"], meta["finished_groups"]) == ([1], 2, [1])


def make_empty(path: Path) -> Path:
    empty = path.with_name("empty_generator.py")
    empty.write_text(GENERATOR)
    return empty


async def test_reads_of_an_ended_run_say_so_once_nothing_is_left(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        entry = await buffer.add(make_run())
        await fill(entry, 1, [0.0, 1.0])
        await end_process(buffer)
        clock.advance(301)
        await buffer.tick()
        assert entry.run.has_ended
        batch = await read(entry)
        assert batch is not None
        assert await read(entry) is None, "the batch may come back"
        entry.delivery.leases.ack_soon(batch.batch_id)
        with pytest.raises(RunEnded):
            await read(entry)


async def test_reader_that_waits_is_told_of_the_end(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        entry = await buffer.add(make_run())
        reader = asyncio.create_task(read(entry, wait_s=10, num_groups=1))
        await end_process(buffer)
        clock.advance(301)
        await buffer.tick()
        with pytest.raises(RunEnded):
            await reader
