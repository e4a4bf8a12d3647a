"""A trainer's client: batches until the run has ended, checkpoints, rewinds, and leases that are kept or given back."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from forebay.client import AsyncBufferClient, Batch, BufferClient, ServerUnreachable
from forebay.core.errors import (
    BatchNotFound,
    CheckpointNotFound,
    ForebayError,
    InvalidInput,
    LeaseLost,
    RunEnded,
    RunNotFound,
    Unauthorized,
    UnknownTaskType,
)
from tests.client.faulty_proxy import FaultyProxy
from tests.kit import NativeRun, ServerProcess, make_group, make_sample, poll_until, write_generator

REWARDS = [0.0, 1.0, 0.5, 0.25]
FAILS = """
TASK_TYPE = "fails"
def run_rollout(data):
    raise RuntimeError("no such dataset")
"""


def fill(run: NativeRun, num_groups: int, first: int = 0) -> list[str]:
    names = [f"g{number}" for number in range(first, first + num_groups)]
    for name in names:
        run.write(*make_group(name, REWARDS))
    return names


def batches(run: NativeRun, **query: Any) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = run.client.get(f"{run.path}/batches", params=query).json()["batches"]
    return told


def num_groups(run: NativeRun, state: str) -> int:
    return int(run.view()["groups"][state])


def take(client: BufferClient, num_groups: int = 1, **asked: Any) -> Batch:
    batch = client.read(num_groups=num_groups, wait_s=20, **asked)
    assert batch is not None
    return batch


@pytest.fixture
def client(run: NativeRun, proxy: FaultyProxy) -> Iterator[BufferClient]:
    """Attached to the run, through the proxy."""
    with BufferClient(proxy.url) as client:
        client.attach(run.run_id)
        yield client


# --- reading


def test_a_loop_sees_every_group_once_and_ends_with_the_run(run: NativeRun, client: BufferClient) -> None:
    names = fill(run, 6)
    run.stop()
    seen = []
    for step, batch in enumerate(client.batches(num_groups=2)):
        assert (batch.num_groups, len(batch.rows)) == (2, 8)
        seen += [group.instance_id for group in batch.groups]
        assert client.checkpoint(step).batch_ids == [batch.batch_id]
    assert seen == names
    assert [checkpoint.step for checkpoint in client.checkpoints()] == [0, 1, 2]
    assert num_groups(run, "acked") == 6
    with pytest.raises(RunEnded):
        client.read(num_groups=1)


def test_a_batch_has_its_rows_by_group(run: NativeRun, client: BufferClient) -> None:
    for number, (instance_id, epoch) in enumerate([(1, 0), ("1", 0), ("1", 1)]):
        run.write(*[{**s, "uid": f"{number}/{s['uid']}"} for s in make_group(instance_id, REWARDS, epoch=epoch)])
    batch = take(client, 3)
    assert [(group.instance_id, len(group.samples)) for group in batch.groups] == [(1, 4), ("1", 4), ("1", 4)]
    assert [row["raw_reward"] for row in batch.groups[0].samples] == REWARDS
    assert batch.meta_info["total_samples"] == 12


def test_epochs_that_nobody_numbered_are_cut_by_size(run: NativeRun, client: BufferClient) -> None:
    for epoch in range(3):
        run.write(*[{**sample, "uid": f"{epoch}/{sample['uid']}"} for sample in make_group("a", REWARDS)])
    batch = take(client, 3)
    assert [[row["uid"][0] for row in group.samples] for group in batch.groups] == [["0"] * 4, ["1"] * 4, ["2"] * 4]


def test_a_read_waits_as_long_as_it_is_told(run: NativeRun, client: BufferClient) -> None:
    assert client.read(num_groups=1, wait_s=0) is None
    threading.Timer(0.2, fill, (run, 1)).start()
    batch = client.read(num_groups=1, wait_s=20)
    assert batch.groups[0].instance_id == "g0"


def test_the_last_batch_may_be_smaller(run: NativeRun, client: BufferClient) -> None:
    fill(run, 5)
    run.stop()
    sizes = [batch.num_groups for batch in client.batches(num_groups=2)]
    assert sizes == [2, 2, 1]


def test_the_last_batch_of_rows_may_be_smaller(run: NativeRun, client: BufferClient) -> None:
    fill(run, 3)
    run.stop()
    assert [len(batch.rows) for batch in client.batches(batch_size=8)] == [8, 4]


def test_a_smaller_last_batch_can_be_left_where_it_is(run: NativeRun, client: BufferClient) -> None:
    fill(run, 5)
    run.stop()
    assert [batch.num_groups for batch in client.batches(num_groups=2, drop_last=True)] == [2, 2]
    assert num_groups(run, "ready") == 1


def test_a_loop_that_holds_all_that_is_left_ends_too(run: NativeRun, client: BufferClient) -> None:
    fill(run, 2)
    run.stop()
    held = list(client.batches(num_groups=1))
    assert len(held) == num_groups(run, "leased") == 2
    client.checkpoint(7)
    assert num_groups(run, "acked") == 2


def test_a_run_that_failed_is_no_quiet_end(make_server: Callable[..., ServerProcess]) -> None:
    server = make_server(max_restarts=0)
    write_generator(server.generators, FAILS, "fails_generator.py")
    with BufferClient(server.url) as client:
        client.start("fails", group_size=4)
        with pytest.raises(RunEnded, match="no such dataset"):
            next(iter(client.batches(num_groups=1)))


def test_what_a_batch_is_for_is_recorded(run: NativeRun, client: BufferClient) -> None:
    fill(run, 3)
    run.stop()
    assert [batch.step for batch in client.batches(num_groups=1, step=5)] == [5, 6, 7]
    assert [batch["step"] for batch in batches(run)] == [5, 6, 7]


def test_a_stale_group_is_not_handed_out(run: NativeRun, client: BufferClient) -> None:
    run.write(*make_group("old", REWARDS, weight_version=1))
    run.write(*make_group("new", REWARDS, weight_version=3))
    client.set_weight_version(3)
    assert client.stats().weight_version == 3
    batch = client.read(num_groups=1, max_staleness=1)
    assert batch.groups[0].instance_id == "new"
    assert client.stats().discarded == {"stale": 1}


def test_tensors_come_with_the_rest(run: NativeRun) -> None:
    tokens = [[1], [2, 3], [4], [5]]
    run.write(*[{**s, "tokens": t} for s, t in zip(make_group("a", REWARDS), tokens, strict=True)])
    with BufferClient(run.server.url, as_tensors=True) as client:
        client.attach(run.run_id)
        batch = take(client)
        assert batch is not None
        assert [row["raw_reward"] for row in batch.rows] == REWARDS
        assert "tokens" not in batch.rows[0]
        client.ack(batch)
        assert client.read(num_groups=1, wait_s=0) is None


# --- what became of batches


def test_a_checkpoint_holds_all_that_was_handed_out_or_what_is_named(run: NativeRun, client: BufferClient) -> None:
    fill(run, 5)
    first, second, third, fourth = (client.read(num_groups=1) for _ in range(4))
    assert client.checkpoint(1, [first, second.batch_id]).batch_ids == [first.batch_id, second.batch_id]
    assert {batch["batch_id"] for batch in batches(run, state="leased")} == {third.batch_id, fourth.batch_id}
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
    batch = take(client, lease_s=1.0)
    poll_until(lambda: len(proxy.requests(f"{batch.batch_id}/extend")) >= 6)  # two seconds: twice its lease
    assert [held["batch_id"] for held in batches(run, state="leased")] == [batch.batch_id]
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
    batch = take(client, lease_s=1.0)
    poll_until(lambda: len(proxy.requests("extend")) >= 7)
    assert proxy.is_calm
    assert client.checkpoint(1).batch_ids == [batch.batch_id]


# --- nothing is lost or done twice when connections are


@pytest.mark.parametrize("kind", ["lose request", "lose reply", "busy", "full"])
def test_a_lost_reply_is_never_a_lost_batch(
    run: NativeRun, client: BufferClient, proxy: FaultyProxy, kind: Any
) -> None:
    names = fill(run, 3)
    run.stop()
    proxy.plan(kind, kind, path="/batches")
    seen = [batch.groups[0].instance_id for batch in client.batches(num_groups=1)]
    assert proxy.is_calm
    assert seen == names
    assert len(batches(run)) == 3


@pytest.mark.parametrize("kind", ["lose request", "lose reply", "busy"])
def test_every_other_call_may_be_repeated(run: NativeRun, client: BufferClient, proxy: FaultyProxy, kind: Any) -> None:
    fill(run, 4)
    first, second, third = (client.read(num_groups=1) for _ in range(3))
    for path, call in {
        "ack": lambda: client.ack(first),
        "release": lambda: client.release(second),
        "checkpoints": lambda: client.checkpoint(1),
        "weight_version": lambda: client.set_weight_version(2),
        "rewind": lambda: client.rewind(1),
        run.run_id: client.stats,
        "stop": client.stop,
    }.items():
        proxy.plan(kind, kind, path=path)
        call()
        assert proxy.is_calm, path
    assert client.checkpoints()[0].batch_ids == [first.batch_id, third.batch_id]
    view = run.view()
    assert (view["groups"]["acked"], view["groups"]["ready"], view["state"]) == (2, 2, "stopped")


@pytest.mark.parametrize("kind", ["lose request", "lose reply", "busy"])
def test_a_start_makes_one_run(server: ServerProcess, proxy: FaultyProxy, kind: Any) -> None:
    name = f"start-{kind.replace(' ', '-')}"
    with BufferClient(proxy.url) as client:
        client.runs()
        proxy.plan(kind, path="/v1/runs")
        proxy.plan(kind, kind, path="/v1/runs")
        told = client.start("idle", group_size=4, name=name)
        assert proxy.is_calm
        assert [run.run_id for run in client.runs() if run.name == name] == [told.run_id] == [client.run_id]
        assert told.settings["group_size"] == 4


def test_a_restarted_server_is_not_noticed(make_server: Callable[..., ServerProcess]) -> None:
    server = make_server()
    run = server.start_run()
    names = fill(run, 4)
    seen = []
    with BufferClient(server.url) as client:
        client.attach(run.run_id)
        for step in range(4):
            batch = take(client)
            seen.append(batch.groups[0].instance_id)
            if step == 1:
                server.kill9()
                restart = threading.Timer(0.3, server.restart)
                restart.start()
                client.checkpoint(step)
                restart.join()
    assert seen == names
    assert (num_groups(run, "acked"), num_groups(run, "ready")) == (2, 2)


# --- errors


def test_what_is_wrong_is_said_in_types(run: NativeRun, client: BufferClient, proxy: FaultyProxy) -> None:
    with pytest.raises(RunNotFound, match="no-such-run"):
        client.attach("no-such-run")
    with pytest.raises(InvalidInput, match="either num_groups or batch_size"):
        client.batches()
    with pytest.raises(InvalidInput) as wrong:
        take(client, 0)
    assert wrong.value.field == "num_groups"
    with pytest.raises(BatchNotFound):
        client.ack("batch-none")
    with pytest.raises(UnknownTaskType, match="no generator"):
        client.start("no-such-task", group_size=1)
    with pytest.raises(InvalidInput, match="no run is chosen"):
        BufferClient(proxy.url).stats()
    with pytest.raises(InvalidInput, match="not a server's address"):
        BufferClient("localhost:8889")


def test_a_server_that_stays_away_is_told_after_a_time(run: NativeRun, proxy: FaultyProxy) -> None:
    proxy.plan(*["busy"] * 1_000)
    with BufferClient(proxy.url, retry_for_s=0.3) as client, pytest.raises(ForebayError, match="busy"):
        client.attach(run.run_id)
    assert len(proxy.seen) > 1


def test_what_is_no_forebay_server_is_said(run: NativeRun) -> None:
    with BufferClient(f"{run.server.url}/nowhere") as client, pytest.raises(ForebayError, match="Not Found"):
        client.attach(run.run_id)


def test_a_token_is_sent(make_server: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_server(token="secret")
    with BufferClient(server.url) as client, pytest.raises(Unauthorized):
        client.runs()
    with BufferClient(server.url, "secret") as client:
        assert client.runs() == []
    monkeypatch.setenv("FOREBAY_TOKEN", "secret")
    with BufferClient(server.url) as client:
        assert client.runs() == []


# --- awaited


def test_both_clients_have_the_same_methods() -> None:
    def signatures(kind: type[Any]) -> dict[str, list[str]]:
        functions = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(function).parameters) for name, function in functions if name[0] != "_"}

    assert signatures(BufferClient) == signatures(AsyncBufferClient)


async def test_the_awaited_client_does_the_same(run: NativeRun, proxy: FaultyProxy) -> None:
    names = fill(run, 5)
    run.stop()
    proxy.plan("lose reply", path="/batches")
    seen, is_rewound = list[Any](), False
    async with AsyncBufferClient(proxy.url) as client:
        await client.attach(run.run_id)
        async for batch in client.batches(num_groups=2, lease_s=0.6):
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
        await client.read(num_groups=1, lease_s=0.6)
        await asyncio.to_thread(poll_until, lambda: len(proxy.requests("extend")) >= 6)
        assert len(await asyncio.to_thread(batches, run, state="leased")) == 1
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
