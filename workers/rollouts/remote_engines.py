"""The engines of a run whose rollouts run in workers: the lead's own ring, and what the workers have in flight."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from forebay.core.tasks import TaskSet
from forebay.core.weight_versions import AnnouncedWeights
from forebay.engines.abc import EngineLoad
from forebay.engines.ring import Call, EngineRing
from forebay.workers.rollouts.remote_rollout import RemoteRollout, uids_of
from forebay.workers.rollouts.run_worker import RunWorker

STOP_S = 7.0
"""A worker answers within its own limit; one that does not is not waited for."""


class RemoteEngines:
    """In place of an ``EngineRing``, for a job. ``on_state`` sends at once what workers have to know of the run."""

    def __init__(self, ring: EngineRing, rollouts: dict[str, RemoteRollout], on_state: Callable[[], None]) -> None:
        self._ring, self._rollouts, self._on_state = ring, rollouts, on_state
        self.weights: AnnouncedWeights | None = None
        self._tasks = TaskSet()

    def announce(self, weights: AnnouncedWeights | None) -> None:
        """Of ``JobEngines``, as those below. The workers hear of it with the state of the run."""
        self.weights = weights
        self._ring.announce(weights)

    async def when_up(self) -> Sequence[str]:
        return await self._ring.when_up()

    async def load_at(self, url: str) -> EngineLoad | None:
        return await self._ring.load_at(url)

    async def abort(self, rid_prefix: str, calls: Iterable[Call] = ()) -> None:  # noqa: ARG002 - the workers end theirs
        await self._ring.abort(rid_prefix)

    async def stop(self, calls: Callable[[], Iterable[Call]], limit_s: float | None = STOP_S) -> None:
        self._on_state()  # whether it is held they must know before
        uids, are_over = uids_of(list(calls()))
        by_worker: dict[RunWorker, list[str]] = {}
        for uid in uids:
            if (rollout := self._rollouts.get(uid)) is not None and rollout.worker is not None:
                by_worker.setdefault(rollout.worker, []).append(uid)
        answers = [self._tasks.start(self._stop(worker, some, are_over)) for worker, some in by_worker.items()]
        if answers:
            await asyncio.wait(answers, timeout=limit_s)

    async def _stop(self, worker: RunWorker, uids: list[str], are_over: bool) -> None:
        with suppress(Exception):  # a worker that is gone answers nothing any more
            tokens: dict[str, int] = await worker.call("stop", uids, are_over)
            for uid, number in tokens.items():
                if (rollout := self._rollouts.get(uid)) is not None:
                    rollout.note_tokens(number)
