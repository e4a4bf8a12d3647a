"""What is particular to workers on Ray; what all backends promise is in tests/contracts."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.core.errors import InvalidInput
from forebay.workers.backends import ray
from forebay.workers.backends.abc import WorkerSpec
from forebay.workers.backends.ray import RayBackend, RayWorker
from forebay.workers.members.worker import ClassWithInitArgs
from forebay.workers.members.worker_errors import PlacementFailed, WorkerError, WorkerLost
from tests.kit import poll_until
from tests.ray_kit import join_cluster
from tests.worker_kit import Probe, Unmakable, call, is_running, specs

pytestmark = pytest.mark.ray
Start = Callable[..., list[RayWorker]]
NODE_CPUS = 16


@pytest.fixture(scope="module", autouse=True)
def cluster() -> None:
    join_cluster(NODE_CPUS)


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[RayWorker] = []

    def start_them(wanted: Sequence[WorkerSpec] | None = None, backend: RayBackend | None = None) -> list[RayWorker]:
        workers = list((backend or RayBackend()).start(wanted or specs()))
        started.extend(workers)
        return workers

    yield start_them
    for worker in started:
        worker.close(0.0)


def wanting(cpus: float, count: int = 1, **resources: float) -> list[WorkerSpec]:
    classes = {"": ClassWithInitArgs(Probe)}
    return [WorkerSpec(rank, count, rank, count, 0, classes, {}, cpus, resources) for rank in range(count)]


def test_every_worker_is_an_actor_whose_one_thread_makes_it_and_runs_its_methods(start: Start) -> None:
    import ray

    workers = start(specs(2, Probe, 10))
    places = [[call(each, "where") for _ in range(3)] for each in workers]
    pids = {place.result(60)["pid"] for each in places for place in each}
    assert len(pids | {os.getpid()}) == 3
    for each, own in zip(places, workers, strict=True):
        assert len({place.result()["thread"] for place in each}) == 1
        assert each[0].result()["pid"] == each[0].result()["pid_at_first"] == own.vitals.pid
        assert each[0].result()["node"] == own.vitals.node == ray.util.get_node_ip_address()
    assert workers[0].vitals.rss_bytes > 1 << 20


def test_large_and_small_calls_begin_in_the_order_in_which_they_were_sent(start: Start) -> None:
    worker = start()[0]
    for number in range(20):
        value = np.full(200_000, number) if number % 3 == 0 else number
        call(worker, "remember", value)
    seen = call(worker, "remembered").result(60)
    assert [int(np.max(value)) for value in seen] == list(range(20))


def test_a_call_that_is_cancelled_before_it_arrives_does_not_run(start: Start) -> None:
    worker = start()[0]
    unwanted = [call(worker, "remember", np.zeros(200_000)) for _ in range(5)]
    assert all(each.cancel() for each in unwanted)
    worker.started.result(60)
    assert len(call(worker, "remembered").result(60)) == 0


def test_more_than_a_thousand_calls_may_be_in_flight(start: Start) -> None:
    worker = start()[0]
    waiting = [call(worker, "wait_forever") for _ in range(1200)]
    assert call(worker, "add", 1).result(60) == 1
    assert len(call(worker, "remembered").result(60)) == 1200
    assert not any(each.done() for each in waiting)


@pytest.mark.parametrize(
    "end",
    [
        lambda worker: call(worker, "exit", 3),
        lambda worker: os.kill(worker.vitals.pid, signal.SIGKILL),
        lambda worker: worker.kill(),
    ],
    ids=["exit", "kill", "controller"],
)
def test_an_actor_that_ends_is_lost_with_ray_s_reason_and_so_are_its_calls(start: Start, end: Any) -> None:
    worker = start()[0]
    worker.started.result(60)
    lost: list[str] = []
    worker.on_lost(lost.append)
    waiting = call(worker, "wait_forever")
    poll_until(lambda: call(worker, "remembered").result(30) == ["waits"])
    end(worker)
    with pytest.raises(WorkerLost, match=r"worker 0 is lost: (The actor is dead|it was killed)") as error:
        waiting.result(30)
    assert "Some common causes" not in str(error.value)
    with pytest.raises(WorkerLost):
        call(worker, "add", 1).result(30)
    poll_until(lambda: lost == [error.value.reason])


def test_an_actor_that_says_nothing_is_lost(start: Start) -> None:
    worker = start(backend=RayBackend(worker_silence_s=2.0))[0]
    worker.started.result(60)
    waiting = call(worker, "wait_forever")
    os.kill(worker.vitals.pid, signal.SIGSTOP)
    with pytest.raises(WorkerLost, match=r"has not answered for \d+\.\d s"):
        waiting.result(30)
    poll_until(lambda: not is_running(worker.vitals.pid))


def test_a_loop_that_stands_still_is_seen_and_is_not_silence(start: Start, tmp_path: Path) -> None:
    worker = start(backend=RayBackend(worker_silence_s=5.0))[0]
    worker.started.result(60)
    blocked = call(worker, "block_the_loop", str(tmp_path / "go on"))
    poll_until(lambda: worker.vitals.blocked_s > 5.5)
    assert worker.vitals.blocked_at.endswith("in Probe.block_the_loop")
    (tmp_path / "go on").touch()
    blocked.result(30)


def test_what_no_node_has_room_for_is_refused_at_once_with_wanted_and_free() -> None:
    with pytest.raises(PlacementFailed, match=r"no node .* large enough: 2 on one machine need CPU 200; free: .*CPU"):
        RayBackend().start(wanting(100.0, 2))
    with pytest.raises(PlacementFailed, match=r"need CPU 1, licence 1; free: .*: CPU [\d.]+, probe 2"):
        RayBackend().start(wanting(1.0, licence=1))


def test_a_worker_waits_for_its_place_and_fails_to_start_when_none_comes(start: Start) -> None:
    backend = RayBackend(placement_s=1.0)
    hog = start(wanting(NODE_CPUS - 1.0))[0]
    hog.started.result(60)
    late = start(wanting(NODE_CPUS - 2.0), backend)[0]
    lost: list[str] = []
    late.on_lost(lost.append)
    with pytest.raises(PlacementFailed, match=r"no room within 1 s: 1 on one machine need CPU 14; free: .*: CPU 1\b"):
        late.started.result(30)
    assert lost == []
    patient = start(wanting(NODE_CPUS - 2.0))[0]
    hog.close(0.0)
    patient.started.result(60)


def test_a_worker_that_is_started_anew_gets_the_place_of_the_lost_one(start: Start) -> None:
    backend = RayBackend(placement_s=5.0)
    wanted = wanting(6.0, 2, probe=1)
    workers = start(wanted, backend)
    for each in workers:
        each.started.result(60)
    filler = start(wanting(3.0))[0]
    filler.started.result(60)
    lost = threading.Event()
    workers[1].on_lost(lambda _: lost.set())
    os.kill(workers[1].vitals.pid, signal.SIGKILL)
    assert lost.wait(30)
    anew = start(wanted[1:], backend)[0]
    anew.started.result(60)
    assert call(anew, "where").result(30)["rank"] == 1


def test_workers_that_are_started_one_by_one_share_their_machine(start: Start) -> None:
    backend = RayBackend(placement_s=5.0)
    wanted = wanting(4.0, 3)
    first = start(wanted[:1], backend)[0]
    first.started.result(60)
    # The places of the others are taken: a worker that wants more than is left of the node does not start.
    filler = start(wanting(NODE_CPUS - 11.0), backend)[0]
    with pytest.raises(PlacementFailed, match=r"CPU 5; free: .*: CPU 4"):
        filler.started.result(60)
    others = [start(wanted[rank : rank + 1], backend)[0] for rank in (2, 1)]
    assert [call(each, "where").result(60)["rank"] for each in others] == [2, 1]


@pytest.mark.parametrize("cls", [Probe, Unmakable])
def test_who_hears_that_a_worker_has_started_or_not_may_close_it(start: Start, cls: type[Probe]) -> None:
    worker = start(specs(1, cls))[0]
    closed = threading.Event()
    worker.started.add_done_callback(lambda _: (worker.close(0.0), closed.set()))
    assert closed.wait(30)


def test_closing_leaves_no_place_taken_and_no_thread() -> None:
    import ray

    before = {thread.name for thread in threading.enumerate()}
    backend = RayBackend()
    workers = backend.start(specs(2))
    slow = call(workers[0], "sleep", 0.5)
    for each in workers:
        each.close(30.0)
        each.close(30.0)
    assert slow.result(0) == "slept"
    poll_until(lambda: ray.available_resources()["CPU"] == NODE_CPUS)
    poll_until(lambda: {thread.name for thread in threading.enumerate()} <= before)


def test_a_node_with_other_versions_is_refused_with_both(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    here = ray.version_reader()()
    monkeypatch.setattr(ray, "version_reader", lambda: lambda: {**here, "Forebay": "9.9.9"})
    worker = start()[0]
    with pytest.raises(InvalidInput, match=rf"node [\d.]+ has Forebay {here['Forebay']} \(here 9\.9\.9\)") as refused:
        worker.started.result(60)
    assert refused.value.field == "backend"


SCRIPT = """
import sys, time
from forebay.workers.backends.ray import RayBackend
from tests.worker_kit import call, specs
backend = RayBackend(sys.argv[1], sys.argv[2])
"""
STARTS = """
workers = backend.start(specs(4))
pids = [call(worker, "where").result(60)["pid"] for worker in workers]
call(workers[0], "remember", "from another process").result(60)
call(workers[0], "say", "a worker says something").result(60)
for worker, method, args in zip(workers, ["spin", "sleep", "keep_the_interpreter"], [(), (1000,), (1000,)]):
    call(worker, method, *args)
print(*pids, flush=True)
time.sleep(1000)
"""


def run_script(tmp_path: Path, code: str, *arguments: str) -> "subprocess.Popen[str]":
    script = tmp_path / "controller.py"
    script.write_text(SCRIPT + code)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *filter(None, sys.path)])}
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
    )


def address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def read_pids(controller: "subprocess.Popen[str]", lines: list[str]) -> list[int]:
    assert controller.stdout is not None
    for line in controller.stdout:
        lines.append(line)
        if all(word.isdecimal() for word in line.split()) and len(line.split()) == 4:
            return [int(word) for word in line.split()]
    raise AssertionError("".join(lines))


def test_no_actor_outlives_its_controller_whatever_it_does(tmp_path: Path) -> None:
    with run_script(tmp_path, STARTS, address(), "forebay") as controller:
        lines: list[str] = []
        pids = read_pids(controller, lines)
        assert all(map(is_running, pids))
        assert any("a worker says something" in line for line in chain(lines, controller.stdout or ()))
        controller.kill()
        poll_until(lambda: not any(map(is_running, pids)), 60.0)


def test_a_call_that_ray_does_not_take_fails_alone(start: Start) -> None:
    worker = start()[0]
    actor, worker._actor = worker._actor, Full(worker._actor)
    refused = call(worker, "remember", "never")
    worker._actor = actor
    with pytest.raises(WorkerError, match="the arguments of remember cannot be sent: no room"):
        refused.result(30)
    assert call(worker, "remembered").result(60) == []


class Full:
    """An actor whose cluster has no room for arguments."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return self if name == "run" else getattr(self._actor, name)

    def remote(self, method: str, *args: Any) -> Any:
        if method == "call":
            raise MemoryError("no room")
        return self._actor.run.remote(method, *args)


def test_a_cluster_that_does_not_answer_is_no_reason_to_start_another(tmp_path: Path) -> None:
    with run_script(tmp_path, "", "127.0.0.1:9", "") as controller:
        output = controller.communicate(timeout=60)[0]
    assert controller.returncode == 1
    assert "WorkerError: no Ray cluster answers at 127.0.0.1:9" in output


def test_a_process_belongs_to_one_cluster() -> None:
    assert RayBackend(address()).free()
    with pytest.raises(InvalidInput, match=r"already connected to the Ray cluster at ") as refused:
        RayBackend("127.0.0.1:9")
    assert refused.value.field == "ray_address"
