"""The end that a controller holds of a worker on Ray."""

import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from forebay.core.errors import InvalidInput
from forebay.workers.backends.hand_over import HandOver
from forebay.workers.backends.ray_member import version_reader
from forebay.workers.backends.ray_places import RayPlace, RayPlaces, needs_of, placement_failure
from forebay.workers.backends.remote_worker import RemoteWorker
from forebay.workers.backends.watch import WorkerWatch
from forebay.workers.backends.wire import Frames, from_frames, read_outcome
from forebay.workers.members.worker_errors import WorkerError, WorkerLost
from forebay.workers.members.worker_spec import Vitals, WorkerSpec

CLOSING_S = 5.0


class RayWorker(RemoteWorker):
    """One actor. A call that never returns tells when it dies, others that are sent now and then whether it answers."""

    def __init__(
        self,
        spec: WorkerSpec,
        actor: Any,
        place: RayPlace,
        places: RayPlaces,
        watch: WorkerWatch,
        answers: HandOver,
        *,
        silence_s: float,
        placement_s: float,
    ) -> None:
        super().__init__(spec, watch, out_of_band=False)
        self._actor, self._place, self._places, self._answers = actor, place, places, answers
        self._silence_s, self._placement_s = silence_s, placement_s
        self._vitals = Vitals("", 0, 0)
        self._looked_s = self._begun_s = self._heard_s = time.monotonic()
        self._asked: Future[Any] | None = None

    @property
    def vitals(self) -> Vitals:
        """As it was heard of last."""
        return replace(self._vitals, silent_s=time.monotonic() - self._heard_s)

    def begin(self, frames: Frames, master: Any) -> None:
        """Have it make the classes of its spec, once Ray knows ``master``, where its group meets."""
        wanted = version_reader()()
        begun = self._actor.begin.remote(wanted, frames, master).future()
        self._watch_over()
        self._on_answer(begun, partial(self._see_begun, wanted))

    def close(self, drain_s: float) -> None:
        """Take no more calls, wait so long for those in flight, then end the actor."""
        self._is_closing = True
        if self._lost_because:
            return
        self._pending.drain(drain_s)
        if self._started.done():
            with suppress(Exception):  # it is gone, or goes on with something: it is killed in any case
                self._actor.close.remote().future().result(CLOSING_S)
        self._lose("it was closed")

    def kill(self) -> None:
        """End the actor at once."""
        self._lose("it was killed by its controller")

    def look(self) -> None:
        """See whether it has a place, and whether it answers."""
        now_s = time.monotonic()
        was_away = now_s - self._looked_s > self._silence_s / 2
        self._looked_s = now_s
        if was_away:  # this process was stopped: what came meanwhile has yet to be seen
            self._heard_s = now_s
        if not self._started.done():
            self._heard_s = now_s
            if now_s - self._begun_s > self._placement_s and not self._place.is_there():
                self._fail_start(
                    placement_failure(
                        [needs_of(self.spec)] * self.spec.local_world_size, f"no place within {self._placement_s:g} s"
                    )
                )
        elif now_s - self._heard_s > self._silence_s:
            self._lose(f"its actor has not answered for {now_s - self._heard_s:.1f} s")
        if self._asked is None and not self._lost_because:
            self._asked = self._actor.vitals.remote().future()
            self._on_answer(self._asked, self._see_vitals)

    def _watch_over(self) -> None:
        self._answers.acquire()
        self._watch.add(self)
        self._on_answer(self._actor.stay.remote().future(), self._see_death)

    def _on_answer(self, answer: "Future[Any]", see: Callable[["Future[Any]"], None]) -> None:
        # Ray tells it in its own thread, in which its own functions, and callbacks of users, may wait for ever.
        answer.add_done_callback(lambda ended: self._answers.soon(partial(see, ended)))

    def _send_call(self, number: int, method: str, frames: Frames) -> None:
        try:
            answer = self._actor.call.remote(number, method, frames).future()
        except Exception as error:  # noqa: BLE001 - Ray's object store is full, say: the calls after it must not wait
            self._actor.skip.remote(number)
            self._pending.fail(number, WorkerError(f"the arguments of {method} cannot be sent: {error}"))
            return
        self._on_answer(answer, partial(self._see_answer, number))

    def _cancel(self, number: int) -> None:
        if not self._lost_because:
            self._actor.cancel.remote(number)

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
        except BaseException as failure:  # noqa: BLE001 - whatever a constructor raised
            self._fail_start(failure)
        else:
            self._vitals = from_frames(vitals)
            self._see_started()

    def _see_answer(self, number: int, answer: "Future[Any]") -> None:
        if (error := answer.exception()) is None:
            kind, frames = answer.result()
            self._pending.end(number, lambda call: read_outcome(kind, frames, call.method))
        else:
            self._see_death(answer)
            lost = self._lost_because
            self._pending.fail(number, WorkerLost(self.spec.rank, lost) if lost else WorkerError(str(error)))

    def _see_vitals(self, asked: "Future[Any]") -> None:
        self._asked = None
        if asked.exception() is None:
            self._heard_s = time.monotonic()
            if asked.result() is not None:
                self._vitals = from_frames(asked.result())

    def _see_death(self, ended: "Future[Any]") -> None:
        from ray.exceptions import RayActorError

        error = ended.exception()
        if isinstance(error, RayActorError):
            self._lose(reason_of(error))

    def _fail_start(self, error: BaseException) -> None:
        self._is_closing = True  # it has not been there yet: it is not lost
        self._see_started(error)
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
        self._places.give_back(self._place, is_lost=not self._is_closing)
        self._tell_end()
        self._answers.release()


def reason_of(error: BaseException) -> str:
    """Ray's own words for the death of an actor, in one line, without its guesses and ids."""
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
