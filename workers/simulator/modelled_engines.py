"""Modelled engines of a simulated run: their failures, the choice of an engine, and calls by id."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from forebay.core.weight_versions import AnnouncedWeights
from forebay.engines.abc import EngineLoad
from forebay.engines.pool import Call
from forebay.workers.simulator.cost import EngineCost
from forebay.workers.simulator.engine_model import EngineModel, ModelledCall, Outcome
from forebay.workers.simulator.virtual_loop import SimulationStuck

STUCK_S = 1e6
"""Longest time in which all engines may be idle while rollouts wait to be started."""


def engine_url(number: int) -> str:
    """The address of the ``number``-th engine of a scenario."""
    return f"http://engine-{number}"


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """An engine failure from ``at_s`` to ``back_s``. Its unfinished calls are lost."""

    engine: int
    at_s: float
    back_s: float


class ModelledEngines:
    """Replaces an ``EnginePool``. ``on_waiting`` is called when all engines are gone, and when one is back."""

    def __init__(self, costs: Sequence[EngineCost], on_waiting: Callable[[bool], None]) -> None:
        self.models = [EngineModel(cost, engine_url(number)) for number, cost in enumerate(costs)]
        self._by_url = {model.url: model for model in self.models}
        self._up: tuple[str, ...] = tuple(self._by_url)
        self._known = frozenset(self._up)
        self._num_on: dict[str, int] = dict.fromkeys(self._up, 0)
        self._calls: dict[str, tuple[EngineModel, ModelledCall]] = {}
        self._num_calls = 0
        self._on_waiting = on_waiting
        self._is_any_up = asyncio.Event()
        self._is_any_up.set()
        self._time = asyncio.get_running_loop().time
        self._last_used_s = 0.0

    def schedule(self, failures: Iterable[EngineFailure]) -> None:
        """Schedule failures."""
        loop = asyncio.get_running_loop()
        for failure in failures:
            loop.call_at(failure.at_s, self._fail, engine_url(failure.engine), max(0.0, failure.back_s - failure.at_s))

    def _fail(self, url: str, lasts_s: float) -> None:
        self._set_up(url, False)
        # Scheduled only now: timers of one moment fire in any order, and an engine must not return before it failed.
        asyncio.get_running_loop().call_later(lasts_s, self._set_up, url, True)

    def _set_up(self, url: str, is_up: bool) -> None:
        if (url in self._known) == is_up:
            return
        self._known = self._known | {url} if is_up else self._known - {url}
        self._up = tuple(each for each in self._by_url if each in self._known)
        if not is_up:
            self._by_url[url].fail()
        if bool(self._up) != self._is_any_up.is_set():
            self._on_waiting(not self._up)
            self._is_any_up.set() if self._up else self._is_any_up.clear()

    # --- of an `EnginePool`

    def announce(self, weights: AnnouncedWeights | None) -> None:  # noqa: ARG002 - any new weights have this effect
        """Empty the engines' caches, which belong to the old weights."""
        for model in self.models:
            model.forget_prompts()

    async def when_up(self) -> Sequence[str]:
        """Wait for engines that answer. Raises ``SimulationStuck`` if they were idle for too long."""
        while not self._up:
            await self._is_any_up.wait()
            self._last_used_s = self._time()
        if self._calls:
            self._last_used_s = self._time()
        elif self._time() - self._last_used_s > STUCK_S:
            raise SimulationStuck("rollouts wait and engines are free, but the policy starts nothing")
        return self._up

    async def load_at(self, url: str) -> EngineLoad | None:
        """Load of the engine at this address; None while it does not answer."""
        return self._by_url[url].load if url in self._known else None

    async def take(self, preferred: str | None) -> EngineModel:
        """Return the preferred engine if it answers, or else the least loaded one."""
        await self.when_up()
        if preferred in self._known:
            return self._by_url[preferred]
        return self._by_url[min(self._up, key=self._num_on.__getitem__)]

    async def abort(self, rid_prefix: str, calls: Iterable[Call] = ()) -> None:  # noqa: ARG002 - calls have unique ids
        """Abort calls at once."""
        for _, rid in list(calls):
            self._abort(rid)

    async def stop(self, calls: Callable[[], Iterable[Call]], limit_s: float | None = None) -> None:  # noqa: ARG002
        """Abort calls at once, until none is left."""
        while left := list(calls()):
            for _, rid in left:
                self._abort(rid)
            await asyncio.sleep(0)

    # --- for its rollouts

    def new_rid(self) -> str:
        """A new id for a call."""
        self._num_calls += 1
        return str(self._num_calls)

    async def call(self, model: EngineModel, rid: str, call: ModelledCall) -> Outcome:
        """Run a call on an engine. Cancelling it aborts it there."""
        done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        call.ended = done.set_result
        self._calls[rid] = model, call
        self._num_on[model.url] += 1
        model.submit(call)
        try:
            return await done
        except asyncio.CancelledError:
            call.ended = _ignore if call.ended is not None else None
            model.abort(call)
            raise
        finally:
            self._num_on[model.url] -= 1
            del self._calls[rid]

    def _abort(self, rid: str) -> None:
        if (found := self._calls.get(rid)) is not None:
            model, call = found
            model.abort(call)


def _ignore(_: Outcome) -> None:
    """Discard the outcome of a cancelled call."""
