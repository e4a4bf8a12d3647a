"""What one worker's process does with its classes and with calls."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from forebay.workers.members.host import WorkerHost
from forebay.workers.members.worker import ClassWithInitArgs, Worker
from forebay.workers.members.worker_spec import MethodCall, RemoteFailure, WorkerSpec


class Member(Worker):
    def __init__(self, base: int = 0) -> None:
        self.base = base
        self.started = threading.Event()
        self.ended: list[str] = []
        self.rank_at_first = self.rank

    @property
    def never(self) -> int:
        raise AssertionError("a property was evaluated")

    def add(self, number: int, *, twice: bool = False) -> int:
        return (self.base + number) * (2 if twice else 1)

    def thread(self) -> int:
        return threading.get_ident()

    def fail(self) -> None:
        raise KeyError("not here")

    def leave(self) -> None:
        raise SystemExit(3)

    def nap(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    async def add_later(self, number: int) -> int:
        await asyncio.sleep(0)
        return self.base + number

    async def meet(self, barrier: dict[str, Any]) -> str:
        event = barrier.setdefault("event", asyncio.Event())
        barrier["waiting"] = barrier.get("waiting", 0) + 1
        if barrier["waiting"] == 2:
            event.set()
        await asyncio.wait_for(event.wait(), 60)
        return "met"

    async def forever(self) -> None:
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.append("cancelled")

    async def leave_later(self) -> None:
        raise SystemExit(3)

    async def time_out(self) -> None:
        raise TimeoutError("a database")

    def neighbours(self) -> list[str]:
        return sorted(self.roles)

    def ask(self, role: str, number: int) -> int:
        answer: int = self.roles[role].add(number)
        return answer

    def block(self) -> None:
        time.sleep(0)


class Broken(Worker):
    def __init__(self) -> None:
        raise ValueError("no weights")


MakeHost = Callable[..., WorkerHost]


@pytest.fixture
def make_host() -> Iterator[MakeHost]:
    made: list[WorkerHost] = []

    def make(**classes: ClassWithInitArgs[Any]) -> WorkerHost:
        of_roles = {"" if role == "only" else role: each for role, each in classes.items()}
        host = WorkerHost(WorkerSpec(1, 3, 1, 2, 0, of_roles), "box", lambda work: work())
        made.append(host)
        host.make()
        return host

    yield make
    for host in made:
        host.close(0)


def call(method: str, *args: Any, role: str = "", deadline_s: float | None = None, **kwargs: Any) -> MethodCall:
    return MethodCall(role, method, args, kwargs, deadline_s=deadline_s)


def place(worker: Member) -> tuple[Any, ...]:
    return worker.rank, worker.world_size, worker.local_rank, worker.local_world_size, worker.node, worker.rank_at_first


def test_a_worker_knows_its_place_from_its_constructor_on(make_host: MakeHost) -> None:
    host = make_host(only=ClassWithInitArgs(Member, 5))
    asked = MethodCall("", "place", function=place)
    assert host.call(asked).result(60) == (1, 3, 1, 2, "box", 1)


def test_methods_get_their_arguments_and_async_ones_run_elsewhere(make_host: MakeHost) -> None:
    host = make_host(only=ClassWithInitArgs(Member, base=5))
    assert host.call(call("add", 2, twice=True)).result(0) == 14
    assert host.call(call("thread")).result(0) == threading.get_ident()
    assert host.call(call("add_later", 2)).result(60) == 7


def test_async_methods_run_side_by_side(make_host: MakeHost) -> None:
    host, barrier = make_host(only=ClassWithInitArgs(Member)), dict[str, Any]()
    both = [host.call(call("meet", barrier)) for _ in range(2)]
    assert [each.result(60) for each in both] == ["met", "met"]


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("fail", "KeyError: 'not here'"),
        ("leave", "SystemExit: 3"),
        ("leave_later", "SystemExit: 3"),
        ("time_out", "TimeoutError: a database"),
        ("no_such", "no attribute 'no_such'"),
    ],
)
def test_what_a_method_raises_comes_with_its_trace_and_the_host_goes_on(
    make_host: MakeHost, method: str, said: str
) -> None:
    host = make_host(only=ClassWithInitArgs(Member, 5))
    error = host.call(call(method)).exception(60)
    assert isinstance(error, RemoteFailure)
    assert said in error.trace
    assert "/members/" not in error.trace or method == "no_such"
    assert host.call(call("add_later", 1)).result(60) == 6


def test_an_async_method_is_cancelled_at_its_deadline_and_when_its_future_is(make_host: MakeHost) -> None:
    host = make_host(only=ClassWithInitArgs(Member))
    member: Member = host.call(MethodCall("", "", function=lambda worker: worker)).result(0)
    with pytest.raises(TimeoutError, match=r"forever took longer than 0\.05 s"):
        host.call(call("forever", deadline_s=0.05)).result(60)
    assert member.ended == ["cancelled"]
    member.started.clear()
    future = host.call(call("forever"))
    assert member.started.wait(60)
    assert future.cancel()
    host.close(0)
    assert member.ended == ["cancelled", "cancelled"]


def test_a_method_that_ends_after_its_deadline_was_late(make_host: MakeHost) -> None:
    host = make_host(only=ClassWithInitArgs(Member))
    with pytest.raises(TimeoutError, match=r"nap took longer than 0\.001 s"):
        host.call(call("nap", 0.01, deadline_s=0.001)).result(60)
    assert host.call(call("nap", 0.0, deadline_s=60)).result(60) == "slept"


def test_what_waits_for_its_turn_is_dropped_when_it_is_cancelled_or_late() -> None:
    waiting: list[Callable[[], None]] = []
    host = WorkerHost(WorkerSpec(0, 1, 0, 1, 0, {"": ClassWithInitArgs(Member)}), "box", waiting.append)
    host.make()
    member: Member = Member()
    cancelled = host.call(MethodCall("", "one", function=lambda _: member.ended.append("one")))
    late = host.call(MethodCall("", "two", function=lambda _: member.ended.append("two"), deadline_s=0.0))
    assert cancelled.cancel()
    for work in waiting:
        work()
    assert isinstance(late.exception(0), TimeoutError)
    assert member.ended == []
    host.close(0)


def test_roles_of_one_process_see_each_other(make_host: MakeHost) -> None:
    host = make_host(actor=ClassWithInitArgs(Member, 1), critic=ClassWithInitArgs(Member, 2))
    assert host.call(call("neighbours", role="actor")).result(0) == ["critic"]
    assert host.call(call("ask", "actor", 10, role="critic")).result(0) == 11
    assert "no role 'judge'" in str(host.call(call("add", 1, role="judge")).exception(0))


def test_what_a_constructor_raises_comes_with_its_trace(make_host: MakeHost) -> None:
    with pytest.raises(RemoteFailure, match="no weights"):
        make_host(only=ClassWithInitArgs(Broken))


def test_a_closed_host_waits_for_what_it_took_and_takes_no_more(make_host: MakeHost) -> None:
    host, barrier = make_host(only=ClassWithInitArgs(Member)), dict[str, Any]()
    first = host.call(call("meet", barrier))
    while "event" not in barrier:
        pass  # until it waits
    closing = threading.Thread(target=host.close, args=(60,))
    closing.start()
    while not isinstance(host.call(call("add", 1)).exception(0), Exception):
        pass  # until it has begun to close
    assert not first.done()
    barrier["waiting"] = 2
    host._loop.loop.call_soon_threadsafe(barrier["event"].set)
    closing.join(60)
    assert first.result(0) == "met"
    assert "takes no more calls" in str(host.call(call("add", 1)).exception(0))


def test_vitals_name_the_line_in_which_a_loop_stands(make_host: MakeHost) -> None:
    host, freed = make_host(only=ClassWithInitArgs(Member)), threading.Event()

    async def stand_still(worker: Member) -> None:
        worker.started.set()
        freed.wait(30)

    standing = host.call(MethodCall("", "stand", function=stand_still))
    while (vitals := host.vitals).blocked_s == 0.0:
        pass
    assert vitals.pid == os.getpid()
    assert vitals.rss_bytes > 1 << 20
    while "stand_still" not in (vitals := host.vitals).blocked_at:
        pass
    freed.set()
    standing.result(60)
    while host.vitals.blocked_s:
        pass
