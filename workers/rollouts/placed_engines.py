"""The engines of a run whose rollouts run in workers: the lead's own ring, and what the workers have in flight."""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence

from forebay.core.weight_versions import AnnouncedWeights
from forebay.engines.abc import EngineLoad
from forebay.engines.ring import Call, EngineRing
from forebay.workers.rollouts.messages import CallsStopped, StopCalls
from forebay.workers.rollouts.placed_rollout import PlacedRollout, uids_of
from forebay.workers.rollouts.placed_worker import PlacedWorker
from forebay.workers.rollouts.worker_set import WorkerSet

STOP_S = 7.0
"""A worker answers within its own limit; one that does not is not waited for."""


class PlacedEngines:
    """In place of an ``EngineRing``, for a job. ``on_state`` sends at once what workers have to know of the run."""

    def __init__(
        self, ring: EngineRing, workers: WorkerSet, rollouts: dict[str, PlacedRollout], on_state: Callable[[], None]
    ) -> None:
        self._ring, self._workers, self._rollouts, self._on_state = ring, workers, rollouts, on_state
        self.weights: AnnouncedWeights | None = None
        self._requests = itertools.count()
        self._answers: dict[int, tuple[PlacedWorker, asyncio.Future[None]]] = {}

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
        by_member: dict[PlacedWorker, list[str]] = {}
        for uid in uids:
            if (placed := self._rollouts.get(uid)) is not None and placed.member is not None:
                by_member.setdefault(placed.member, []).append(uid)
        answers = [self._asked(member, some, are_over) for member, some in by_member.items()]
        if answers:
            await asyncio.wait(answers, timeout=limit_s)

    def _asked(self, member: PlacedWorker, uids: list[str], are_over: bool) -> "asyncio.Future[None]":
        request = next(self._requests)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answers[request] = member, answer
        answer.add_done_callback(lambda _: self._answers.pop(request, None))
        member.send(StopCalls(request, uids, are_over))
        return answer

    def note_stopped(self, message: CallsStopped) -> None:
        """A worker has answered."""
        for uid, tokens in message.tokens.items():
            if (placed := self._rollouts.get(uid)) is not None:
                placed.note_tokens(tokens)
        if message.request in self._answers:
            self._resolve(self._answers[message.request][1])

    def note_lost(self, member: PlacedWorker) -> None:
        """It answers nothing any more."""
        for asked, answer in list(self._answers.values()):
            if asked is member:
                self._resolve(answer)

    def _resolve(self, answer: "asyncio.Future[None]") -> None:
        if not answer.done():
            answer.set_result(None)
