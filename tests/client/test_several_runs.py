"""A client that goes from one run to another: nothing of the first is forgotten."""

from collections.abc import Iterator

import pytest

from forebay.client import BufferClient
from forebay.core.errors import InvalidInput
from tests.client.client_kit import fill, num_groups, take
from tests.kit import NativeRun, ServerProcess


@pytest.fixture
def first(server: ServerProcess) -> NativeRun:
    run = server.start_run()
    fill(run, 3)
    return run


@pytest.fixture
def second(server: ServerProcess) -> NativeRun:
    run = server.start_run()
    fill(run, 1)
    return run


@pytest.fixture
def client(server: ServerProcess, first: NativeRun) -> Iterator[BufferClient]:
    with BufferClient(server.url) as client:
        client.attach(first.run_id)
        yield client


def test_a_run_with_leased_batches_is_not_left(client: BufferClient, first: NativeRun, second: NativeRun) -> None:
    batch = take(client)
    with pytest.raises(InvalidInput, match=f"still leased to this client: {batch.batch_id} of {first.run_id}"):
        client.attach(second.run_id)
    with pytest.raises(InvalidInput, match="still leased"):
        client.start("idle", 4)
    assert client.attach(first.run_id).run_id == client.run_id == first.run_id
    assert client.checkpoint(1).batch_ids == [batch.batch_id]
    client.attach(second.run_id)
    assert take(client).rows


def test_acked_batches_belong_to_the_next_checkpoint_of_their_run(
    client: BufferClient, first: NativeRun, second: NativeRun
) -> None:
    before = take(client)
    client.ack(before)
    client.attach(second.run_id)
    other = take(client)
    assert client.checkpoint(1).batch_ids == [other.batch_id]
    client.attach(first.run_id)
    after = take(client)
    assert client.checkpoint(1).batch_ids == [before.batch_id, after.batch_id]


def test_a_batch_that_was_released_stays_with_its_run(
    client: BufferClient, first: NativeRun, second: NativeRun
) -> None:
    client.release(take(client))
    client.attach(second.run_id)
    client.attach(first.run_id)
    assert num_groups(first, "ready") == 3
    assert client.checkpoint(1).batch_ids == []
