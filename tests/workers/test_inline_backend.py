"""What is particular to workers in this process; what all backends promise is in tests/contracts."""

import asyncio
import os
import threading

import pytest

from forebay.core.errors import InvalidInput
from forebay.workers.backends.abc import MethodCall, RunningWorker, WorkerSpec
from forebay.workers.backends.by_name import make_backend
from forebay.workers.backends.inline import InlineBackend
from forebay.workers.members.worker import ClassWithInitArgs, Worker
from forebay.workers.members.worker_errors import WorkerLost
from tests.worker_kit import call, specs


class Neighbour(Worker):
    def thread(self) -> int:
        return threading.get_ident()

    async def forever(self) -> None:
        await asyncio.Event().wait()


def start(count: int = 1, **env: str) -> list[RunningWorker]:
    specs = [WorkerSpec(rank, count, rank, count, 0, {"": ClassWithInitArgs(Neighbour)}, env) for rank in range(count)]
    return list(InlineBackend().start(specs))


def test_a_method_runs_in_the_thread_of_its_caller_so_that_a_debugger_stops_in_it() -> None:
    (worker,) = start()
    future = worker.call(MethodCall("", "thread"))
    assert future.done()
    assert future.result(0) == threading.get_ident()
    worker.close(1)


def test_variables_are_there_until_the_last_worker_was_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_T_OLD", "before")
    monkeypatch.delenv("FOREBAY_T_NEW", raising=False)
    workers = start(2, FOREBAY_T_OLD="during", FOREBAY_T_NEW="new")
    workers[0].close(1)
    workers[0].close(1)
    assert (os.environ["FOREBAY_T_OLD"], os.environ["FOREBAY_T_NEW"]) == ("during", "new")
    workers[1].close(1)
    assert os.environ["FOREBAY_T_OLD"] == "before"
    assert "FOREBAY_T_NEW" not in os.environ


def test_what_was_in_flight_at_a_killed_worker_is_lost() -> None:
    (worker,) = start()
    reasons: list[str] = []
    worker.on_lost(reasons.append)
    future = worker.call(MethodCall("", "forever"))
    worker.kill()
    worker.kill()
    with pytest.raises(WorkerLost, match="worker 0 is lost: it was killed"):
        future.result(10)
    with pytest.raises(WorkerLost):
        worker.call(MethodCall("", "thread")).result(0)
    worker.on_lost(reasons.append)
    assert reasons == ["it was killed", "it was killed"]


def test_backends_are_found_by_name() -> None:
    made = make_backend("inline")
    assert make_backend(made) is made
    assert made.free() is None
    with pytest.raises(InvalidInput, match="'threads' is unknown") as caught:
        make_backend("threads")
    assert caught.value.field == "backend"
    assert caught.value.hint == "one of 'inline', 'processes', 'ray'"


@pytest.mark.parametrize("backend", [5, None, object(), ["ray"]])
def test_what_is_no_backend_is_refused(backend: object) -> None:
    with pytest.raises(InvalidInput, match="is unknown") as caught:
        make_backend(backend)  # type: ignore[arg-type]
    assert caught.value.field == "backend"
    assert caught.value.hint.startswith("one of")


def test_variables_are_taken_back_when_a_worker_that_was_started_anew_is_closed_last() -> None:
    backend, wanted = InlineBackend(), specs(2, env={"PROBE_COLOUR": "blue"})
    first, second = backend.start(wanted)
    first.kill()
    (anew,) = backend.start(wanted[:1])
    second.close(0.0)
    assert call(anew, "variable", "PROBE_COLOUR").result(5) == "blue"
    anew.close(0.0)
    assert "PROBE_COLOUR" not in os.environ
