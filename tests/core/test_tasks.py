"""Tasks that are kept until they end."""

import asyncio

from forebay.core.tasks import TaskSet


async def test_drain_waits_for_tasks_that_others_start_meanwhile() -> None:
    tasks, ended = TaskSet(), []

    async def child() -> None:
        ended.append("child")

    async def parent() -> None:
        tasks.start(child())
        ended.append("parent")

    tasks.start(parent())
    await tasks.drain()
    assert ended == ["parent", "child"]


async def test_cancel_returns_when_every_task_has_tidied_up() -> None:
    tasks, tidied = TaskSet(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            tidied.set()

    task = tasks.start(work())
    await asyncio.sleep(0)
    await tasks.cancel()
    assert task.cancelled()
    assert tidied.is_set()


async def test_an_error_of_one_task_reaches_only_who_awaits_it() -> None:
    tasks = TaskSet()

    async def fail() -> None:
        raise ValueError("no")

    task = tasks.start(fail())
    await tasks.drain()
    assert str(task.exception()) == "no"
