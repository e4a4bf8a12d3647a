"""A trainer's client: batches until the run has ended, and errors in types."""

import threading
from collections.abc import Callable

import pytest

from forebay.client import BufferClient
from forebay.core.errors import (
    BatchNotFound,
    ForebayError,
    InvalidInput,
    RunEnded,
    RunNotFound,
    Unauthorized,
    UnknownTaskType,
)
from tests.client.client_kit import REWARDS, fill, num_groups, take
from tests.client.faulty_proxy import FaultyProxy
from tests.kit import FAILS_WITH_A_HINT, NativeRun, ServerProcess, make_group, write_generator

FAILS = """
TASK_TYPE = "fails"
def run_rollout(data):
    raise RuntimeError("no such dataset")
"""


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


def test_of_a_run_that_failed_the_error_is_told_not_its_last_words(make_server: Callable[..., ServerProcess]) -> None:
    server = make_server(max_restarts=0)
    write_generator(server.generators, FAILS_WITH_A_HINT, "hints_generator.py")
    with BufferClient(server.url) as client:
        client.start("hints", group_size=4)
        with pytest.raises(RunEnded, match=r"failed: .*no such dataset"):
            next(iter(client.batches(num_groups=1)))


def test_what_a_batch_is_for_is_recorded(run: NativeRun, client: BufferClient) -> None:
    fill(run, 3)
    run.stop()
    assert [batch.step for batch in client.batches(num_groups=1, step=5)] == [5, 6, 7]
    assert [batch["step"] for batch in run.batches()] == [5, 6, 7]


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


# --- errors


def test_what_is_wrong_is_said_in_types(run: NativeRun, client: BufferClient, proxy: FaultyProxy) -> None:
    with pytest.raises(RunNotFound, match="no-such-run"):
        client.attach("no-such-run")
    with pytest.raises(InvalidInput, match="exactly one of num_groups and batch_size"):
        client.batches()
    with pytest.raises(InvalidInput) as wrong:
        take(client, 0)
    assert wrong.value.field == "num_groups"
    with pytest.raises(BatchNotFound):
        client.ack("batch-none")
    with pytest.raises(UnknownTaskType, match="no generator"):
        client.start("no-such-task", group_size=1)
    with pytest.raises(InvalidInput, match="not attached to a run"):
        BufferClient(proxy.url).stats()
    with pytest.raises(InvalidInput, match="not a server's address"):
        BufferClient("localhost:8889")


def test_a_server_that_stays_away_is_told_after_a_time(run: NativeRun, proxy: FaultyProxy) -> None:
    proxy.plan(*["busy"] * 1_000)
    with BufferClient(proxy.url, retry_for_s=5) as client, pytest.raises(ForebayError, match="busy"):
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
