"""A client that is left while others still use it: they are told, and what they were about to get is given back."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from forebay.client import AsyncBufferClient, BufferClient, ClientClosed
from forebay.client.calls.cutting import Connections
from tests.client.client_kit import fill, num_groups, take
from tests.client.faulty_proxy import FaultyProxy
from tests.client.relay import Relay
from tests.kit import TIME_LIMIT_S, NativeRun, poll_until

Do = Callable[[], object]
Leave = Callable[..., BaseException | None]
KEEPER = "forebay-leases"


@pytest.fixture
def relay(run: NativeRun) -> Iterator[Relay]:
    """Between the client and the server, noticed by neither."""
    with Relay(run.server.url) as relay:
        yield relay


def leave_blocking(url: str, run: NativeRun, before: Do, until: Do, error: bool = True) -> BaseException | None:
    """Take a batch, let another thread ask for the next after ``before``, and leave, by an error, after ``until``; what
    the other thread is told."""
    with ThreadPoolExecutor(1) as pool:
        with suppress(ZeroDivisionError), BufferClient(url) as client:
            client.attach(run.run_id)
            take(client)
            before()
            other = pool.submit(next, client.batches(num_groups=1))
            until()
            if error:
                raise ZeroDivisionError
        assert KEEPER not in [thread.name for thread in threading.enumerate()]
        return other.exception(TIME_LIMIT_S)


def leave_awaiting(url: str, run: NativeRun, before: Do, until: Do, error: bool = True) -> BaseException | None:
    """The same with another task."""

    async def leave() -> BaseException | None:
        with suppress(ZeroDivisionError):
            async with AsyncBufferClient(url) as client:
                await client.attach(run.run_id)
                assert await client.read(num_groups=1, wait_s=20)
                before()
                other = asyncio.ensure_future(anext(client.batches(num_groups=1)))
                await asyncio.to_thread(until)
                if error:
                    raise ZeroDivisionError
        assert KEEPER not in [task.get_name() for task in asyncio.all_tasks()]
        await asyncio.wait({other}, timeout=TIME_LIMIT_S)
        return other.exception()

    return asyncio.run(leave())


@pytest.fixture(params=[leave_blocking, leave_awaiting])
def leave(request: pytest.FixtureRequest) -> Leave:
    """Both clients keep the same promise."""
    made: Leave = request.param
    return made


@pytest.mark.parametrize("error", [True, False])
def test_a_read_that_waits_at_the_server_is_broken_off(run: NativeRun, relay: Relay, leave: Leave, error: bool) -> None:
    fill(run, 1)
    told = leave(relay.url, run, lambda: None, lambda: relay.wait_for(b'"wait_s":1.0'), error)
    assert isinstance(told, ClientClosed)
    assert run.read(num_groups=1, wait_s=20)["data"][0]["instance_id"] == "g0"
    # The release of the first batch may reach the server before the end of the read's connection does: what that read
    # was then still given is given back as well.
    *earlier, last = [batch["state"] for batch in run.batches()]
    assert (set(earlier), last) == ({"released"}, "leased")


def test_a_batch_whose_reply_is_just_being_read_is_given_back(run: NativeRun, relay: Relay, leave: Leave) -> None:
    fill(run, 2)
    told = leave(relay.url, run, lambda: relay.keep_end_of(b'"batch_id":"'), relay.wait_until_kept)
    assert isinstance(told, ClientClosed)
    assert [batch["state"] for batch in run.batches()] == ["released", "released"]
    assert num_groups(run, "ready") == 2


def test_a_batch_that_is_to_be_asked_for_again_is_given_back(run: NativeRun, proxy: FaultyProxy, leave: Leave) -> None:
    fill(run, 2)
    told = leave(
        proxy.url,
        run,
        lambda: proxy.plan("lose reply", "busy for long", path="/batches"),
        lambda: poll_until(lambda: proxy.is_calm),
    )
    assert isinstance(told, ClientClosed)
    assert [batch["state"] for batch in run.batches()] == ["released", "released"]
    assert num_groups(run, "ready") == 2


async def test_a_batch_of_a_cancelled_read_is_given_back(run: NativeRun, relay: Relay) -> None:
    fill(run, 1)
    async with AsyncBufferClient(relay.url) as client:
        await client.attach(run.run_id)
        relay.keep_end_of(b'"batch_id":"')
        read = asyncio.ensure_future(client.read(num_groups=1))
        await asyncio.to_thread(relay.wait_until_kept)
        read.cancel()
        await asyncio.wait({read})
        assert read.cancelled()
    assert num_groups(run, "ready") == 1


def test_what_another_thread_checkpointed_stays_so(run: NativeRun, relay: Relay) -> None:
    fill(run, 2)
    with ThreadPoolExecutor(1) as pool, BufferClient(relay.url) as client:
        client.attach(run.run_id)
        first = take(client)
        take(client)
        relay.keep_end_of(b'"checkpoints":')
        other = pool.submit(client.checkpoint, 1, first)
        relay.wait_until_kept()
        client.close()
        assert isinstance(other.exception(TIME_LIMIT_S), ClientClosed)
    assert (num_groups(run, "acked"), num_groups(run, "ready")) == (1, 1)


def test_a_client_that_was_left_says_so(run: NativeRun) -> None:
    fill(run, 1)
    with BufferClient(run.server.url) as client:
        client.attach(run.run_id)
        batches = client.batches(num_groups=1)
    for call in (client.stats, lambda: client.read(num_groups=1), lambda: next(batches), lambda: client.checkpoint(1)):
        with pytest.raises(ClientClosed, match="this client is closed"):
            call()
    client.close()


def test_a_connection_that_is_made_too_late_is_of_no_use() -> None:
    class Stream:
        def get_extra_info(self, name: str) -> socket.socket:
            assert name == "socket"
            return ours

    ours, theirs = socket.socketpair()
    with ours, theirs:
        connections = Connections()
        connections.cut()
        connections.trace("connection.connect_tcp.started", {})
        connections.trace("connection.connect_tcp.complete", {"return_value": Stream()})
        assert theirs.recv(1) == b""
