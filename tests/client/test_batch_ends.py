"""What becomes of a trainer's batches: checkpoints, rewinds, and leases that are kept, lost or given back."""

from collections.abc import Callable

import pytest

from forebay.client import BufferClient, ServerUnreachable
from forebay.core.errors import CheckpointNotFound, LeaseLost
from tests.client.client_kit import fill, num_groups, take
from tests.client.faulty_proxy import FaultyProxy
from tests.kit import NativeRun, ServerProcess, poll_until


def test_a_checkpoint_holds_all_that_was_handed_out_or_what_is_named(run: NativeRun, client: BufferClient) -> None:
    fill(run, 5)
    first, second, third, fourth = (client.read(num_groups=1) for _ in range(4))
    assert client.checkpoint(1, [first, second.batch_id]).batch_ids == [first.batch_id, second.batch_id]
    assert {batch["batch_id"] for batch in run.batches(state="leased")} == {third.batch_id, fourth.batch_id}
    client.ack(fourth)
    assert client.checkpoint(2).batch_ids == [third.batch_id, fourth.batch_id]
    assert client.checkpoint(3).batch_ids == []
    assert [checkpoint.step for checkpoint in client.checkpoints()] == [1, 2, 3]


def test_a_rewind_brings_back_what_no_checkpoint_holds(run: NativeRun, client: BufferClient) -> None:
    fill(run, 4)
    for step in range(3):
        take(client)
        if step < 2:
            client.checkpoint(step)
    told = client.rewind(0)
    assert (told.num_batches, told.num_groups, told.checkpoints) == (2, 2, [0])
    batch = take(client, 3)
    assert [group.instance_id for group in batch.groups] == ["g1", "g2", "g3"]
    with pytest.raises(CheckpointNotFound, match="known steps: 0"):
        client.rewind(9)


def test_a_released_batch_is_the_next_readers(run: NativeRun, client: BufferClient) -> None:
    fill(run, 1)
    batch = take(client)
    client.release(batch)
    again = take(client)
    assert again.rows == batch.rows
    assert client.checkpoint(1).batch_ids == [again.batch_id]


def test_leaving_gives_back_what_was_not_checkpointed(run: NativeRun) -> None:
    fill(run, 3)
    with BufferClient(run.server.url) as client:
        client.attach(run.run_id)
        take(client)
        client.checkpoint(1)
        acked = take(client)
        assert acked
        client.ack(acked)
        take(client)
    assert (num_groups(run, "acked"), num_groups(run, "ready")) == (2, 1)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_leaving_by_an_error_gives_back_what_was_not_checkpointed(run: NativeRun, error: type[BaseException]) -> None:
    fill(run, 2)

    def train() -> None:
        with BufferClient(run.server.url) as client:
            client.attach(run.run_id)
            for step, _ in enumerate(client.batches(num_groups=1)):
                if step == 1:
                    raise error
                client.checkpoint(step)

    with pytest.raises(error):
        train()
    assert (num_groups(run, "acked"), num_groups(run, "ready")) == (1, 1)


def test_an_error_arrives_although_the_server_is_gone(make_server: Callable[..., ServerProcess]) -> None:
    server = make_server()
    run = server.start_run()
    fill(run, 1)

    def train() -> None:
        with BufferClient(server.url, retry_for_s=0.2) as client:
            client.attach(run.run_id)
            take(client)
            server.kill9()
            client.checkpoint(1)

    with pytest.raises(ServerUnreachable, match="does not answer"):
        train()


# --- leases


def test_a_lease_is_kept_while_the_client_lives(run: NativeRun, client: BufferClient, proxy: FaultyProxy) -> None:
    fill(run, 1)
    batch = take(client, lease_s=6.0)
    poll_until(lambda: len(proxy.requests(f"{batch.batch_id}/extend")) >= 4)  # one after each third of its lease
    assert [held["batch_id"] for held in run.batches(state="leased")] == [batch.batch_id]
    client.checkpoint(1)
    assert num_groups(run, "acked") == 1


def test_a_lost_lease_is_told_at_the_next_call(run: NativeRun, client: BufferClient, proxy: FaultyProxy) -> None:
    fill(run, 2)
    batch = take(client, lease_s=0.3)
    run.client.post(f"{run.path}/rewind", json={"step": None}).raise_for_status()
    poll_until(lambda: proxy.requests("extend") and not client._reading.leases.all_ids)
    with pytest.raises(LeaseLost, match=batch.batch_id):
        take(client)
    again = take(client)
    assert again.rows == batch.rows


def test_a_lost_lease_cannot_be_checkpointed(run: NativeRun, client: BufferClient) -> None:
    fill(run, 1)
    take(client)
    run.client.post(f"{run.path}/rewind", json={"step": None}).raise_for_status()
    with pytest.raises(LeaseLost):
        client.checkpoint(1)
    assert num_groups(run, "ready") == 1


def test_an_extension_that_is_not_answered_is_tried_again_in_time(
    run: NativeRun, client: BufferClient, proxy: FaultyProxy
) -> None:
    fill(run, 1)
    proxy.plan("lose request", "busy", "lose reply", path="extend")
    batch = take(client, lease_s=6.0)
    poll_until(lambda: len(proxy.requests("extend")) >= 6)
    assert proxy.is_calm
    assert client.checkpoint(1).batch_ids == [batch.batch_id]
