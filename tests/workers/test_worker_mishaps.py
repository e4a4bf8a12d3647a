"""What goes wrong at an odd moment: an exit while unpickling, an interrupt, or a garbage collection, while sending."""

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from traceback import walk_stack
from typing import Any, NamedTuple

import cloudpickle
import pytest

from forebay.core.errors import InvalidInput
from forebay.workers.backends import processes
from forebay.workers.groups import (
    ClassWithInitArgs,
    Dispatch,
    Worker,
    WorkerFailed,
    WorkerGroup,
    WorkerLost,
    register,
)
from tests.kit import poll_until
from tests.worker_kit import is_running

cloudpickle.register_pickle_by_value(sys.modules[__name__])
WAIT_S = 30.0


class Unpickled:
    """Becomes the value of a Python expression where it is unpickled."""

    def __init__(self, expression: str) -> None:
        self.expression = expression

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (self.expression,)


class Unmakable(Worker):
    def __init__(self) -> None:
        raise LookupError("no weights here")

    def size(self, data: Any) -> int:
        return len(data)


class Totals(NamedTuple):
    total: int
    count: int


class Clerk(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def size(self, data: Any) -> int:
        return len(data)

    @register(Dispatch.ONE_TO_ALL)
    def exit(self) -> None:
        os._exit(3)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    async def forever(self) -> None:
        await asyncio.Event().wait()

    @register(Dispatch.DP_COMPUTE_PROTO)
    def totals(self, numbers: list[int]) -> Totals:
        return Totals(sum(numbers), len(numbers))

    @register(Dispatch.MAP)
    def square(self, number: int) -> int:
        return number * number

    @register(Dispatch.MAP)
    async def wait_for(self, number: int) -> int:
        await asyncio.Event().wait()
        return number


class NeverMade(Worker):
    def __init__(self, marker: str) -> None:
        with open(marker, "w"):
            pass
        threading.Event().wait()


@pytest.fixture
def group() -> Iterator[WorkerGroup]:
    with WorkerGroup([1], ClassWithInitArgs(Clerk)) as clerks:
        yield clerks
        clerks.close(0.0)


@pytest.mark.parametrize("raised", ["SystemExit(3)", "KeyboardInterrupt()"])
def test_an_argument_that_exits_while_it_is_unpickled_fails_its_call_alone(group: WorkerGroup, raised: str) -> None:
    throws = Unpickled(f"(_ for _ in ()).throw({raised})")
    with pytest.raises(InvalidInput, match=f"arguments of size cannot be unpickled .*{raised.partition('(')[0]}"):
        group.execute_all("size", throws).get(WAIT_S)
    assert group.size("abc") == [3]


def test_calls_of_a_worker_that_cannot_be_made_fail_as_its_constructor_did() -> None:
    with WorkerGroup([1], ClassWithInitArgs(Unmakable), wait_started=False) as group:
        early = group.execute_all("size", "abc")
        with pytest.raises(WorkerFailed, match="no weights here"):
            early.get(WAIT_S)
        with pytest.raises(WorkerFailed, match="no weights here"):
            group.execute_all("size", "abc").get(WAIT_S)
        assert list(group.lost) == [0]


def test_a_group_whose_closing_is_interrupted_is_closed(group: WorkerGroup) -> None:
    waiting, pid = group.forever(), group.vitals[0].pid
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    seen = threading.Thread(target=_interrupt_main_in, args=("threading.py", "close"))
    seen.start()
    with pytest.raises(KeyboardInterrupt):
        group.close(600.0)
    signal.signal(signal.SIGINT, before)
    seen.join()
    assert not is_running(pid)
    assert waiting.done


def test_after_an_interrupt_in_the_middle_of_a_message_the_worker_is_lost_and_says_why(group: WorkerGroup) -> None:
    busy = group.execute_all("size", Unpickled("__import__('time').sleep(60)"))  # it reads nothing meanwhile
    seen = threading.Thread(target=_interrupt_main_in, args=("channel.py", "_send"))
    # Servers of other tests in this process may have left theirs.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    seen.start()
    with pytest.raises(KeyboardInterrupt):
        group.size(bytes(50_000_000))
    signal.signal(signal.SIGINT, before)
    seen.join()
    with pytest.raises(WorkerLost, match="interrupted while it sent"):
        busy.get(WAIT_S)
    group.replace(0).result(WAIT_S)
    assert group.size("abc") == [3]


def test_who_hears_of_a_loss_may_close_the_group(group: WorkerGroup) -> None:
    closed = threading.Event()
    calls = [group.forever() for _ in range(3)]
    group.on_lost(lambda *_: (group.close(), closed.set()))
    with pytest.raises(WorkerLost):
        group.exit()
    assert closed.wait(WAIT_S)
    assert poll_until(lambda: all(call.done for call in calls))


def test_a_group_whose_constructors_hang_is_closed_soon(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "KILLING_S", 600.0)  # it has not the time that is given to one that ends by itself
    marker = tmp_path / "begun"
    group = WorkerGroup([1], ClassWithInitArgs(NeverMade, str(marker)), wait_started=False)
    assert poll_until(marker.exists)
    group.close(0.0)
    with pytest.raises(WorkerLost, match="it was "):
        group.started(0).result(WAIT_S)


def test_results_that_are_records_are_not_run_together() -> None:
    with WorkerGroup([2], ClassWithInitArgs(Clerk), backend="inline") as group:
        assert group.totals([1, 2, 3]) == [Totals(3, 2), Totals(3, 1)]


def test_an_input_that_exits_ends_its_map() -> None:
    def items() -> Iterator[int]:
        yield 1
        sys.exit(3)

    with WorkerGroup([2], ClassWithInitArgs(Clerk), backend="inline") as group, pytest.raises(SystemExit):
        group.square(items()).get(WAIT_S)


def test_results_that_are_forgotten_while_a_message_is_sent_do_not_hold_it_up(group: WorkerGroup) -> None:
    results: list[Any] = [group.wait_for([1])]
    results.append(results)  # for the garbage collector alone
    assert poll_until(lambda: group._workers._in_flight[0])
    del results
    group._workers._workers[0]._channel._sock = Collecting(group._workers._workers[0]._channel._sock)
    assert group.size("abc") == [3]
    assert poll_until(lambda: not group._workers._in_flight[0])


class Collecting:
    """A socket during whose use the garbage collector runs."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock

    def __getattr__(self, name: str) -> Any:
        gc.collect()
        return getattr(self._sock, name)


def _interrupt_main_in(file: str, function: str) -> None:
    """Once the main thread stands in a line of ``file``, below a function of that name."""
    main, lines = threading.main_thread().ident or 0, list[tuple[str, int]]()

    def stands_in_it() -> bool:
        frame = sys._current_frames()[main]
        lines.append((frame.f_code.co_filename, frame.f_lineno))
        is_below = function in {each.f_code.co_name for each, _ in walk_stack(frame)}
        return is_below and lines[-1][0].endswith(file) and lines[-3:] == [lines[-1]] * 3

    if poll_until(stands_in_it):
        os.kill(os.getpid(), signal.SIGINT)
