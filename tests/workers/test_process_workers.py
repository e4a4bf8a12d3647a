"""What is particular to workers in processes of this machine; what all backends promise is in tests/contracts."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from forebay.core.errors import InvalidInput
from forebay.workers.backends import endings, processes
from forebay.workers.backends.abc import WorkerSpec
from forebay.workers.backends.processes import ProcessesBackend, ProcessWorker
from forebay.workers.backends.watch import WorkerWatch
from forebay.workers.members.worker import ClassWithInitArgs
from forebay.workers.members.worker_errors import WorkerError, WorkerLost
from forebay.workers.members.worker_spec import RemoteFailure
from tests.kit import poll_until
from tests.worker_kit import Probe, Unmakable, call, is_running, specs

Start = Callable[..., list[ProcessWorker]]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[ProcessWorker] = []

    def start_them(wanted: Sequence[WorkerSpec] | None = None, silence_s: float = 10.0) -> list[ProcessWorker]:
        workers = list(ProcessesBackend(silence_s).start(wanted or specs()))
        started.extend(workers)
        return workers

    yield start_them
    for worker in started:
        worker.close(0.0)


@pytest.fixture
def worker(start: Start) -> ProcessWorker:
    return start()[0]


def test_every_worker_has_a_process_whose_main_thread_runs_its_methods(start: Start) -> None:
    workers = start(specs(2, Probe, 10))
    places = [call(each, "where").result(30) for each in workers]
    assert len({os.getpid(), *(place["pid"] for place in places)}) == 3
    assert all(place["pid"] == place["pid_at_first"] and place["is_main_thread"] for place in places)
    assert [(place["rank"], place["world_size"]) for place in places] == [(0, 2), (1, 2)]
    assert [each.vitals.pid for each in workers] == [place["pid"] for place in places]
    assert call(workers[1], "add", 5, times=2).result(30) == 30
    assert call(workers[1], "add_later", 5).result(30) == 15


def test_calls_given_before_the_worker_is_made_run_in_order(worker: ProcessWorker) -> None:
    for number in range(200):
        call(worker, "remember", number)
    assert call(worker, "remembered").result(30) == list(range(200))


def test_a_hundred_megabytes_go_there_and_back(worker: ProcessWorker) -> None:
    array = np.zeros(12_500_000)
    back = call(worker, "fill", array, 7.0).result(60)
    assert back.nbytes == 100_000_000
    assert (back[0], back[-1], array[0]) == (7.0, 7.0, 0.0)
    back[0] = 1.0  # the caller's own


def test_variables_are_added_to_its_environment(start: Start) -> None:
    worker = start(specs(env={"PROBE_COLOUR": "blue"}))[0]
    assert call(worker, "variable", "PROBE_COLOUR").result(30) == "blue"
    assert call(worker, "variable", "PATH").result(30) == os.environ["PATH"]
    assert "PROBE_COLOUR" not in os.environ


@pytest.mark.parametrize(
    ("args", "kwargs", "name"), [((threading.Lock(),), {}, "number"), ((1,), {"times": open}, "times")]
)
def test_an_argument_that_cannot_be_pickled_is_refused_by_its_name(
    worker: ProcessWorker, args: Any, kwargs: Any, name: str
) -> None:
    kwargs = {key: threading.Lock() for key in kwargs}
    with pytest.raises(InvalidInput, match=rf"the argument '{name}' of add is a _thread\.lock") as refused:
        call(worker, "add", *args, **kwargs).result(30)
    assert refused.value.field == name
    assert call(worker, "add", 1).result(30) == 1


def test_an_argument_of_the_constructor_that_cannot_be_pickled_is_refused_before_anything_starts() -> None:
    before = psutil.Process().children()
    with pytest.raises(InvalidInput, match=r"the argument 'number' of Probe is a _thread\.lock"):
        ProcessesBackend().start(specs(2, Probe, threading.Lock()))
    assert set(psutil.Process().children()) <= set(before)


def test_one_too_many_that_cannot_be_pickled_is_refused_by_its_place() -> None:
    with pytest.raises(InvalidInput, match=r"the argument '0' of Unmakable is a _thread\.lock"):
        ProcessesBackend().start(specs(1, Unmakable, threading.Lock()))


def test_a_result_that_cannot_be_pickled_is_refused_by_its_type(worker: ProcessWorker) -> None:
    with pytest.raises(InvalidInput, match="the result of generator is a generator and cannot be pickled"):
        call(worker, "generator").result(30)
    assert call(worker, "add", 1).result(30) == 1


def test_what_a_method_raises_arrives_with_its_trace(worker: ProcessWorker) -> None:
    with pytest.raises(RemoteFailure, match='raise KeyError\\("not here"\\)') as failure:
        call(worker, "fail").result(30)
    assert isinstance(failure.value.error, KeyError)
    with pytest.raises(RemoteFailure, match="1 and 2") as odd:
        call(worker, "fail_oddly").result(30)
    assert odd.value.error is None  # it cannot be put together from its arguments


def test_what_a_constructor_raises_is_why_it_did_not_start(start: Start) -> None:
    worker = start(specs(1, Unmakable))[0]
    lost: list[str] = []
    worker.on_lost(lost.append)
    with pytest.raises(RemoteFailure, match="no weights here"):
        worker.started.result(30)
    poll_until(lambda: not psutil.pid_exists(worker.vitals.pid))
    assert lost == []


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda worker: call(worker, "exit", 3), "exit status 3"),
        (lambda worker: os.kill(worker.vitals.pid, signal.SIGKILL), "killed by SIGKILL"),
        (lambda worker: os.kill(worker.vitals.pid, signal.SIGSEGV), "killed by SIGSEGV"),
        (lambda worker: worker.kill(), "killed by its controller"),
    ],
    ids=["exit", "kill", "segv", "controller"],
)
def test_a_process_that_ends_is_lost_with_the_reason_and_so_are_its_calls(start: Start, end: Any, reason: str) -> None:
    worker = start(silence_s=600.0)[0]  # it is not its silence that tells of its end
    worker.started.result(30)
    lost: list[str] = []
    worker.on_lost(lost.append)
    waiting = [call(worker, "wait_forever"), call(worker, "sleep", 0.05), call(worker, "add", 1)]
    poll_until(lambda: call(worker, "remembered").result(30) == ["waits"])
    program = call(worker, "start_program").result(30)
    end(worker)
    with pytest.raises(WorkerLost, match=f"worker 0 is lost: .*{reason}"):
        waiting[0].result(30)
    with pytest.raises(WorkerLost, match=reason):
        call(worker, "add", 1).result(30)
    poll_until(lambda: len(lost) == 1)
    assert reason in lost[0]
    later: list[str] = []
    worker.on_lost(later.append)
    assert later == lost
    poll_until(lambda: not is_running(program))


def test_a_process_that_says_nothing_is_lost(start: Start) -> None:
    worker = start(silence_s=5.0)[0]
    worker.started.result(30)
    waiting = call(worker, "wait_forever")
    os.kill(worker.vitals.pid, signal.SIGSTOP)
    with pytest.raises(WorkerLost, match=r"was silent for \d+\.\d s"):
        waiting.result(30)
    poll_until(lambda: not psutil.pid_exists(worker.vitals.pid))


def test_code_that_lets_no_thread_run_is_ended_and_the_log_says_where(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    worker = start(silence_s=5.0)[0]
    worker.started.result(30)
    with pytest.raises(WorkerLost, match=r"none of its threads could run for .* shows the blocked line|was silent"):
        call(worker, "keep_the_interpreter", 60).result(30)
    assert "in keep_the_interpreter" in capfd.readouterr().err


def test_code_that_computes_is_not_silent(start: Start) -> None:
    worker = start(silence_s=10.0)[0]
    worker.started.result(30)
    spinning = call(worker, "spin")
    began_s = time.monotonic()
    poll_until(lambda: time.monotonic() - began_s > 11.0)
    poll_until(lambda: worker.vitals.silent_s < 10.0)
    assert not spinning.done()


def test_the_memory_of_a_worker_and_a_loop_that_stands_still_are_seen(start: Start, tmp_path: Path) -> None:
    worker = start(silence_s=10.0)[0]
    worker.started.result(30)
    poll_until(lambda: worker.vitals.rss_bytes > 1 << 20)
    assert worker.vitals.blocked_at == ""
    blocked = call(worker, "block_the_loop", str(tmp_path / "go on"))
    poll_until(lambda: worker.vitals.blocked_s > 0.5)
    assert "worker_kit.py:" in worker.vitals.blocked_at
    assert worker.vitals.blocked_at.endswith("in Probe.block_the_loop")
    (tmp_path / "go on").touch()
    blocked.result(30)
    poll_until(lambda: worker.vitals.blocked_s == 0.0)


def test_a_deadline_ends_the_future_whatever_the_method_does(worker: ProcessWorker, tmp_path: Path) -> None:
    worker.started.result(30)
    with pytest.raises(TimeoutError, match=r"sleep_until took longer than 0\.2 s"):
        call(worker, "sleep_until", str(tmp_path / "go on"), deadline_s=0.2).result(30)
    (tmp_path / "go on").touch()
    with pytest.raises(TimeoutError, match="wait_forever"):
        call(worker, "wait_forever", deadline_s=0.1).result(30)
    poll_until(lambda: call(worker, "remembered").result(30) == ["waits", "cancelled"])


def test_cancelling_reaches_the_worker(worker: ProcessWorker, tmp_path: Path) -> None:
    waiting = call(worker, "wait_forever")
    poll_until(lambda: call(worker, "remembered").result(30) == ["waits"])
    go_on = tmp_path / "go on"
    sleeping, queued = call(worker, "sleep_until", str(go_on)), call(worker, "remember", "never")
    assert waiting.cancel()
    assert queued.cancel()
    assert call(worker, "add_later", 7).result(30) == 7  # it reads what it is sent in order; a file would overtake it
    go_on.touch()
    with pytest.raises(CancelledError):
        waiting.result(30)
    assert sleeping.result(30) == "slept"
    assert call(worker, "remembered").result(30) == ["waits", "cancelled"]


def test_closing_waits_for_calls_and_leaves_nothing_behind() -> None:
    def left() -> tuple[int, int, int]:
        process = psutil.Process()
        return process.num_fds(), threading.active_count(), len(process.children())

    before = left()
    for _ in range(3):
        workers = ProcessesBackend().start(specs(2))
        slow = [call(each, "sleep", 0.2) for each in workers]
        for each in workers:
            each.close(30.0)
            each.close(30.0)
        assert [each.result(0) for each in slow] == ["slept", "slept"]
        with pytest.raises(WorkerError, match="takes no more calls"):
            call(workers[0], "add", 1).result(0)
    poll_until(lambda: all(now <= then for now, then in zip(left(), before, strict=True)))


def test_a_worker_may_be_closed_when_its_call_has_ended(start: Start) -> None:
    worker = start()[0]
    worker.started.result(30)
    call(worker, "add", 1).add_done_callback(lambda _: worker.close(0.0))
    poll_until(lambda: not psutil.pid_exists(worker.vitals.pid))


def test_closing_does_not_wait_for_ever(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "KILLING_S", 600.0)  # one that ends by itself has this time, they have not
    workers = start(specs(2))
    spinning, waiting = call(workers[0], "spin"), call(workers[1], "wait_forever")
    lost: list[str] = []
    for each in workers:
        each.started.result(30)
        each.on_lost(lost.append)
    for each in workers:
        each.close(0.1)
    for each in (spinning, waiting):
        with pytest.raises(WorkerLost, match=r"closed|killed by its controller"):
            each.result(0)
    assert lost == []


CONTROLLER = """
import os, sys, multiprocessing, time
from forebay.workers.backends.abc import MethodCall, WorkerSpec
from forebay.workers.backends.processes import ProcessesBackend
from forebay.workers.members.worker import ClassWithInitArgs, Worker

class Here(Worker):
    def programs(self):
        import subprocess
        return [os.getpid(), subprocess.Popen(["sleep", "1000"]).pid]
    def spin(self):
        while True: pass
    def sleep(self):
        time.sleep(1000)
    def keep(self):
        import ctypes
        ctypes.PyDLL(None).sleep(1000)

classes = {"": ClassWithInitArgs(Here)}
workers = ProcessesBackend(worker_silence_s=10.0).start([WorkerSpec(r, 4, r, 4, 0, classes) for r in range(4)])
pids = [worker.call(MethodCall("", "programs")).result() for worker in workers]
for worker, method in zip(workers, ["spin", "sleep", "keep"]):
    worker.call(MethodCall("", method))
if sys.argv[1:]:  # a copy of this process, which holds all of its sockets
    copy = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    copy.start()
    print(copy.pid)
print(*[pid for each in pids for pid in each], flush=True)
if sys.argv[1:] == ["end"]:
    sys.exit()
time.sleep(1000)
"""


@pytest.mark.parametrize("copy", [[], ["copy"]], ids=["alone", "copied"])
def test_no_worker_outlives_its_controller_whatever_it_does(tmp_path: Path, copy: list[str]) -> None:
    script = tmp_path / "controller.py"
    script.write_text(CONTROLLER)  # without a guard, and with its classes in __main__
    with subprocess.Popen([sys.executable, str(script), *copy], stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        copies = [int(controller.stdout.readline()) for _ in copy]
        pids = [int(pid) for pid in controller.stdout.readline().split()]
        assert len(pids) == 8
        assert all(map(is_running, pids))
        controller.kill()
        try:
            # The program of a worker that let no thread run is beyond us then: the kernel has ended the worker alone.
            mortal = [pid for pid in pids if pid != pids[5]]
            poll_until(lambda: not any(map(is_running, mortal)))
        finally:
            for pid in (*copies, *pids):
                if is_running(pid):
                    os.kill(pid, signal.SIGKILL)


def test_the_kernel_s_want_of_memory_is_said_if_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "count_oom_kills", lambda: {"memory.events": 3})
    assert endings.ending_of(-9, {"memory.events": 2}).endswith(
        "the kernel killed a process for lack of memory in the meantime"
    )
    assert endings.ending_of(-9, {"memory.events": 3}) == "its process was killed by SIGKILL"
    assert endings.ending_of(-11, {"memory.events": 2}) == "its process was killed by SIGSEGV"
    assert endings.ending_of(7, {}) == "its process ended with exit status 7"


def test_this_machine_counts_what_it_ended_for_want_of_memory() -> None:
    assert endings.count_oom_kills()


def test_deadlines_of_calls_that_have_ended_are_forgotten() -> None:
    class Still:
        def look(self) -> None: ...

    watch, still, acted = WorkerWatch(0.01), Still(), threading.Event()
    watch.add(still)
    for _ in range(5000):
        watch.at(time.monotonic() + 1000, lambda: True, acted.set)
    assert watch.num_deadlines < 2500
    watch.at(time.monotonic() + 0.01, lambda: False, acted.set)
    assert acted.wait(30)
    watch.remove(still)
    poll_until(lambda: "workers watch" not in {thread.name for thread in threading.enumerate()})


def test_a_class_is_pickled_once_for_all_workers(start: Start) -> None:
    pickled = []

    class Counted:
        def __reduce__(self) -> Any:
            pickled.append(1)
            return (int, ())

    classes = {"": ClassWithInitArgs(Probe, Counted())}
    start([WorkerSpec(rank, 2, rank, 2, 0, classes) for rank in range(2)])
    assert len(pickled) == 1
