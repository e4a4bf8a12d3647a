"""Token arrays from a writer to a trainer, through a real server."""

import json
import math

import numpy as np
import pytest

from forebay.client import AsyncBufferClient, BufferClient, SampleWriter
from forebay.client.tensors import collate, numpy_arrays
from tests.kit import Json, NativeRun, ServerProcess, make_group, make_sample


@pytest.fixture
def run(server: ServerProcess) -> NativeRun:
    return server.start_run(group_size=2)


def token_group(instance_id: str, length: int) -> list[Json]:
    """Samples with arrays, exact in float32."""
    group = make_group(instance_id, [0.0, 1.0], weight_version=4)
    tokens = np.arange(length, dtype=np.int32)
    return [
        sample | {"tokens": tokens, "logprobs": -tokens / np.float32(8), "loss_mask": tokens % 2} for sample in group
    ]


@pytest.mark.parametrize("as_tensors", [True, False])
def test_what_is_written_as_arrays_is_collated(run: NativeRun, as_tensors: bool) -> None:
    run.send([*token_group("a", 3), *token_group("b", 5)])
    with BufferClient(run.server.url, as_tensors=as_tensors) as client:
        client.attach(run.run_id)
        batch = client.read(num_groups=2)
        assert batch is not None
        out = collate(batch, pad_token_id=-1)
        client.ack(batch)
    short, long = [0, 1, 2, -1, -1], [0, 1, 2, 3, 4]
    assert out["tokens"].tolist() == [short, short, long, long]
    assert out["logprobs"][3].tolist() == [0.0, -0.125, -0.25, -0.375, -0.5]
    assert out["loss_mask"][0].tolist() == [False, True, False, False, False]
    assert out["rewards"].tolist() == pytest.approx([-1.0, 1.0, -1.0, 1.0], abs=1e-5)
    assert out["group_index"].tolist() == [0, 0, 1, 1]
    assert out["weight_version"].tolist() == [4, 4, 4, 4]
    assert [row["uid"] for row in batch.rows] == ["a/0", "a/1", "b/0", "b/1"]
    assert ["tokens" in row for row in batch.rows] == [not as_tensors] * 4


async def test_the_client_that_awaits_gets_the_same(run: NativeRun) -> None:
    run.send(token_group("a", 3))
    async with AsyncBufferClient(run.server.url, as_tensors=True) as client:
        await client.attach(run.run_id)
        async for batch in client.batches(num_groups=1):
            assert numpy_arrays(batch)["tokens"].tolist() == [0, 1, 2, 0, 1, 2]
            await client.checkpoint(1)
            break


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_arrays_may_be_compressed(run: NativeRun, encoding: str) -> None:
    with SampleWriter(run.server.url, run.run_id, encoding=encoding) as writer:
        for sample in token_group("a", 4_000):
            writer.write(sample)
    with BufferClient(run.server.url, as_tensors=True) as client:
        client.attach(run.run_id)
        batch = client.read(num_groups=1)
        assert batch is not None
        assert collate(batch, 0)["tokens"].tolist() == [list(range(4_000))] * 2
        client.ack(batch)


def test_a_batch_without_any_tokens_has_rows_as_ever(run: NativeRun) -> None:
    group = [make_sample(uid=f"{n}", reward=float(n)) for n in range(2)]
    run.send(group)
    with BufferClient(run.server.url, as_tensors=True) as client:
        client.attach(run.run_id)
        batch = client.read(num_groups=1)
        assert batch is not None
        assert [row["messages"] for row in batch.rows] == [sample["messages"] for sample in group]
        assert [group.instance_id for group in batch.groups] == ["task-1"]
        client.ack(batch)


def test_nothing_within_the_time_is_none_in_either_form(run: NativeRun) -> None:
    with BufferClient(run.server.url, as_tensors=True) as client:
        client.attach(run.run_id)
        assert client.read(num_groups=1, wait_s=0) is None


@pytest.mark.parametrize("as_tensors", [True, False])
def test_a_number_beyond_float64_costs_no_batch(run: NativeRun, as_tensors: bool) -> None:
    for number in range(2):
        sample = make_sample(uid=f"{number}", reward=number, tokens=[1, 2], huge=0)
        body = json.dumps(sample).replace('"huge": 0', '"huge": [1e309, -1e309]')
        run.client.post(f"{run.path}/samples", content=body).raise_for_status()
    with BufferClient(run.server.url, as_tensors=as_tensors) as client:
        client.attach(run.run_id)
        batch = client.read(num_groups=1, wait_s=20)
        assert batch is not None
        assert [row["huge"] for row in batch.rows] == [[math.inf, -math.inf]] * 2
        assert collate(batch, 0, min_weight_version=1)["tokens"].tolist() == [[1, 2]] * 2
        client.ack(batch)


@pytest.mark.parametrize("as_tensors", [True, False])
def test_a_loss_mask_may_be_floats(run: NativeRun, as_tensors: bool) -> None:
    import torch

    written, sent = make_group("a", [0.0, 1.0], tokens=[1, 2, 3], loss_mask=[0.0, 1.0, 1.0])
    run.send([written | {"loss_mask": torch.tensor(written["loss_mask"])}])
    run.write(sent)
    with BufferClient(run.server.url, as_tensors=as_tensors) as client:
        client.attach(run.run_id)
        batch = client.read(num_groups=1, wait_s=20)
        assert batch is not None
        assert collate(batch, 0)["loss_mask"].tolist() == [[False, True, True]] * 2
        client.ack(batch)
