"""Nothing is lost or done twice when connections are: the trainer's client repeats what it asked."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from forebay.client import BufferClient
from tests.client.client_kit import fill, num_groups, take
from tests.client.faulty_proxy import FaultyProxy
from tests.kit import NativeRun, ServerProcess


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
    assert len(run.batches()) == 3


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
