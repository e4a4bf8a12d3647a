"""The trainer's client, awaited: the same methods, the same promises."""

import asyncio
import inspect
from typing import Any

import pytest

from forebay.client import AsyncBufferClient, BufferClient
from tests.client.client_kit import fill, num_groups
from tests.client.faulty_proxy import FaultyProxy
from tests.kit import NativeRun, make_sample, poll_until


def test_both_clients_show_the_same_methods_and_results() -> None:
    def shown(kind: type[Any]) -> dict[str, str]:
        functions = [each for name, each in inspect.getmembers(kind, inspect.isfunction) if name[0] != "_"]
        assert {(each.__module__, each.__qualname__) for each in functions} == {
            (kind.__module__, f"{kind.__name__}.{each.__name__}") for each in functions
        }
        return {each.__name__: str(inspect.signature(each)).replace("AsyncIterator", "Iterator") for each in functions}

    blocking = shown(BufferClient)
    assert blocking == shown(AsyncBufferClient)
    assert blocking["stats"] == "(self) -> forebay.client.model.RunStats"
    assert inspect.getdoc(AsyncBufferClient.metrics).endswith("TensorBoard. See ``BufferClient.metrics``.")


async def test_the_awaited_client_does_the_same(run: NativeRun, proxy: FaultyProxy) -> None:
    names = fill(run, 5)
    run.stop()
    proxy.plan("lose reply", path="/batches")
    seen, is_rewound = list[Any](), False
    async with AsyncBufferClient(proxy.url) as client:
        await client.attach(run.run_id)
        async for batch in client.batches(num_groups=2, lease_s=6):
            seen += [group.instance_id for group in batch.groups]
            await client.checkpoint(len(seen))
            if not is_rewound:
                await client.rewind(None)
                seen, is_rewound = [], True
        assert [checkpoint.step for checkpoint in await client.checkpoints()] == [2, 4, 5]
    assert seen == names
    assert num_groups(run, "acked") == 5


async def test_leases_are_kept_by_a_task_and_given_back_at_the_end(run: NativeRun, proxy: FaultyProxy) -> None:
    fill(run, 1)
    async with AsyncBufferClient(proxy.url) as client:
        await client.attach(run.run_id)
        await client.read(num_groups=1, lease_s=6)
        await asyncio.to_thread(poll_until, lambda: len(proxy.requests("extend")) >= 4)
        assert len(await asyncio.to_thread(run.batches, state="leased")) == 1
    assert num_groups(run, "ready") == 1


async def test_a_read_that_is_cancelled_loses_nothing(run: NativeRun, proxy: FaultyProxy) -> None:
    async with AsyncBufferClient(proxy.url) as client:
        await client.attach(run.run_id)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.read(num_groups=1)
        fill(run, 1)
        batch = await client.read(num_groups=1, wait_s=20)
        assert batch is not None
        run.write(make_sample(uid="later"))
        assert (await client.checkpoint(1)).batch_ids == [batch.batch_id]
