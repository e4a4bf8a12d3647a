"""Runs workers as actors of a Ray cluster, with one placement group for each node of the pool."""

import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from forebay.core.errors import InvalidInput
from forebay.workers.backends.abc import NodeRoom
from forebay.workers.backends.ray_cluster import RayBundles, connect, free_rooms, needs_of, placement_failure
from forebay.workers.backends.ray_member import actor_class, version_reader
from forebay.workers.backends.remote_worker import RemoteWorker
from forebay.workers.backends.watch import WorkerWatch, beat_s
from forebay.workers.backends.wire import Frames, from_frames, read_outcome, spec_frames
from forebay.workers.members.worker_errors import WorkerError
from forebay.workers.members.worker_spec import Vitals, WorkerSpec

MOST_CALLS = 100_000
"""Calls in flight at one actor. With Ray's default of 1000, further calls, including those for vitals, would wait."""
CLOSING_S = 5.0


class RayBackend:
    """Starts workers on a Ray cluster. Needs the extra ``ray``."""

    name = "ray"

    def __init__(
        self,
        ray_address: str | None = None,
        ray_namespace: str | None = None,
        *,
        worker_silence_s: float = 10.0,
        placement_s: float = 30.0,
    ) -> None:
        """Join the cluster at ``ray_address`` or ``RAY_ADDRESS``; without either, start one for this process.

        ``ray_namespace`` is Ray's namespace of the actors. A worker that is silent for ``worker_silence_s`` is lost.
        A worker that is not placed within ``placement_s`` fails to start.
        """
        connect(ray_address, ray_namespace)
        self.silence_s, self.placement_s = worker_silence_s, placement_s
        self.watch = WorkerWatch(beat_s(worker_silence_s))
        self.places = RayBundles()
        self._actor_class = _remote_class()
        self._masters: dict[int, Any] = {}
        """Rendezvous of each group, on the node of its rank 0, by id of the ``classes`` that its workers share."""

    def start(self, specs: Sequence[WorkerSpec]) -> Sequence["RayWorker"]:
        """Start workers, and return while they come up. Raises ``PlacementFailed`` if they can never be placed.

        A worker that is not placed within ``placement_s`` fails to start with ``PlacementFailed``.
        """
        frames = spec_frames(specs, out_of_band=False)
        workers = []
        for spec, place, own in zip(specs, self.places.take(specs), frames, strict=True):
            actor = self._make_actor(spec, place)
            if spec.rank == 0 and spec.master is not None:
                self._masters[id(spec.classes)] = actor.master.remote()
            worker = RayWorker(spec, actor, place, self)
            worker.begin(own, self._masters.get(id(spec.classes)))
            workers.append(worker)
        return workers

    def free(self) -> Sequence[NodeRoom] | None:
        """Free resources of each node."""
        return free_rooms()

    def _make_actor(self, spec: WorkerSpec, place: Any) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options: dict[str, Any] = {
            "num_cpus": needs_of(spec)["CPU"],
            "resources": dict(spec.resources),
            "max_concurrency": MOST_CALLS,
            "max_restarts": 0,  # the owner of the group decides about restarts
            "scheduling_strategy": PlacementGroupSchedulingStrategy(place, spec.local_rank),
        }
        if spec.env:
            options["runtime_env"] = {"env_vars": dict(spec.env)}
        return self._actor_class.options(**options).remote()


class RayWorker(RemoteWorker):
    """One actor, and the thread in the controller that handles its replies."""

    def __init__(self, spec: WorkerSpec, actor: Any, place: Any, backend: RayBackend) -> None:
        super().__init__(spec, backend.watch, out_of_band=False)
        self._actor, self._place, self._backend = actor, place, backend
        self._vitals = Vitals("", 0, 0)
        self._looked_s = self._begun_s = self._heard_s = time.monotonic()
        self._asked: Future[Any] | None = None
        self._answers: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._take_answers, name=f"worker {spec.rank} replies", daemon=True).start()

    @property
    def vitals(self) -> Vitals:
        """Last vitals of the worker."""
        return replace(self._vitals, silent_s=time.monotonic() - self._heard_s)

    def begin(self, frames: Frames, master: Any) -> None:
        """Have it construct the classes of its spec, once Ray has ``master``, the rendezvous of its group."""
        wanted = version_reader()()
        begun = self._actor.begin.remote(wanted, frames, master).future()
        self._watch.add(self)
        self._on_answer(begun, partial(self._see_begun, wanted))

    def close(self, drain_s: float) -> None:
        """Refuse new calls, wait up to ``drain_s`` for those in flight, then end the actor."""
        self._is_closing = True
        if self._lost_because:
            return
        self._drain(drain_s)
        if self.started.done():
            with suppress(Exception):  # it is gone or busy: it is killed in any case
                self._ask("close").result(CLOSING_S)
        self._lose("it was closed")

    def look(self) -> None:
        """Check that it is placed and that it answers."""
        now_s, silence_s = time.monotonic(), self._backend.silence_s
        was_away = now_s - self._looked_s > silence_s / 2
        self._looked_s = now_s
        if was_away:  # this process was suspended: replies may still be unread
            self._heard_s = now_s
        if not self.started.done():
            self._heard_s = now_s
            placement_s = self._backend.placement_s
            if now_s - self._begun_s > placement_s and not self._place.wait(0):
                self._fail_start(placement_failure([self.spec], f"no room within {placement_s:g} s"))
        elif now_s - self._heard_s > silence_s:
            self._lose(f"its actor has not answered for {now_s - self._heard_s:.1f} s")
        if self._asked is None and not self._lost_because:
            self._asked = self._ask("vitals")
            self._on_answer(self._asked, self._see_vitals)

    def _ask(self, method: str, *args: Any) -> "Future[Any]":
        answer: Future[Any] = self._actor.run.remote(method, *args).future()
        return answer

    def _on_answer(self, answer: "Future[Any]", see: Callable[["Future[Any]"], None]) -> None:
        # Ray calls back in its own thread, where Ray functions and users' callbacks could block forever.
        answer.add_done_callback(lambda ended: self._answers.put(partial(see, ended)))

    def _take_answers(self) -> None:
        while (see := self._answers.get()) is not None:
            try:
                see()
            except Exception as error:  # noqa: BLE001 - its calls would wait forever
                self._lose(f"a message from it could not be read: {error!r}")

    def _send_call(self, number: int, method: str, frames: Frames) -> None:
        try:
            answer = self._ask("call", number, method, frames)
        except Exception as error:  # noqa: BLE001 - such as a full object store; later calls must not wait
            self._ask("skip", number)
            self._fail_call(number, WorkerError(f"the arguments of {method} cannot be sent: {error}"))
            return
        self._on_answer(answer, partial(self._see_answer, number))

    def _cancel(self, number: int) -> None:
        if not self._lost_because:
            self._ask("cancel", number)

    def _see_begun(self, wanted: dict[str, str], begun: "Future[Any]") -> None:
        if (error := begun.exception()) is not None:
            self._lose(reason_of(error))
            return
        node, found, outcome, vitals = begun.result()
        if outcome is None:
            self._fail_start(_differing(node, found, wanted))
            return
        try:
            kind, made = outcome
            read_outcome(kind, made, "the constructor")
        except BaseException as failure:  # noqa: BLE001 - a constructor may raise anything
            self._fail_start(failure)
        else:
            self._vitals = from_frames(vitals)
            with suppress(InvalidStateError):  # it is already lost
                self.started.set_result(None)

    def _see_answer(self, number: int, answer: "Future[Any]") -> None:
        if not self._sees_death(answer):
            if (error := answer.exception()) is None:
                self._end_call(number, *answer.result())
            else:
                self._fail_call(number, WorkerError(str(error)))

    def _see_vitals(self, asked: "Future[Any]") -> None:
        self._asked = None
        if not self._sees_death(asked) and asked.exception() is None:
            self._heard_s = time.monotonic()
            self._vitals = from_frames(asked.result())

    def _sees_death(self, ended: "Future[Any]") -> bool:
        from ray.exceptions import RayActorError

        if is_dead := isinstance(error := ended.exception(), RayActorError):
            self._lose(reason_of(error))
        return is_dead

    def _fail_start(self, error: BaseException) -> None:
        super()._fail_start(error)
        self._lose(str(error))

    def _lose(self, reason: str) -> None:
        import ray

        with self._lock:
            if self._lost_because:
                return
            self._lost_because = reason
        self._watch.remove(self)
        with suppress(Exception):  # it is dead, or this process is no longer connected
            ray.kill(self._actor)
        self._backend.places.give_back(self.spec)
        self._tell_end()
        self._answers.put(None)


def _remote_class() -> Any:
    import ray

    return ray.remote(actor_class())


def reason_of(error: BaseException) -> str:
    """Ray's reason for the death of an actor, in one line, without ids and guessed causes."""
    words = re.sub(r"\s+", " ", str(error)).strip()
    words = re.sub(r"^The actor \w+ is unavailable: ", "", words)
    _, found, detail = words.partition("The actor is dead because ")
    return re.split(r" Some common causes| There are some potential", found + detail if found else words)[0]


def _differing(node: str, found: dict[str, str], wanted: dict[str, str]) -> InvalidInput:
    differing = [
        f"{name} {found.get(name)} (here {version})" for name, version in wanted.items() if found.get(name) != version
    ]
    return InvalidInput(
        f"node {node} has {', '.join(differing)}",
        field="backend",
        hint="install the same versions of Forebay, Ray and Python on every node",
    )
