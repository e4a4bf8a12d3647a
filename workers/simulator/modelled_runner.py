"""Runs the rollouts of a simulated run: each requests the tokens of its answer from a modelled engine."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from forebay.client.sample_writer.outbox import Sample
from forebay.core.ids import InstanceId, rollout_uid
from forebay.generators.rollouts.open_group import GroupClosed, OpenGroup, RolloutBroken
from forebay.generators.rollouts.rollout_slot import RolloutSlot
from forebay.generators.rollouts.rollout_trace import RolloutTrace
from forebay.workers.simulator.attempt_records import AttemptRecord
from forebay.workers.simulator.engine_model import EngineModel, ModelledCall, Outcome
from forebay.workers.simulator.modelled_engines import ModelledEngines
from forebay.workers.simulator.populations import AnswerLengths, Answers

EXPIRED_S = 0.05
"""A group with less time left sends no further call, as in a real run."""


class _NoTrajectory:
    """Stands for the trajectory: modelled rollouts have no tokens for samples."""

    counters: Mapping[str, int] = {}

    def samples(self) -> list[Any]:
        return []


class ModelledExecution:
    """The counted parts of one attempt of a rollout."""

    trajectory: Any = _NoTrajectory()

    def __init__(self) -> None:
        self.num_sampled_tokens = 0


class ModelledRunner:
    """Replaces a ``RolloutRunner``."""

    def __init__(
        self,
        engines: ModelledEngines,
        prompts: Callable[[InstanceId], AnswerLengths],
        answers: Answers,
        max_tokens: int,
        run_id: str,
    ) -> None:
        self._engines, self._prompts, self._answers = engines, prompts, answers
        self._max_tokens, self._run_id = max_tokens, run_id

    async def when_ready(self) -> None:
        """Return at once. Implements ``JobRunner``, like ``samples``."""

    async def samples(
        self, group: OpenGroup, number: int, trace: RolloutTrace, rollout_slot: RolloutSlot
    ) -> list[Sample]:
        lengths = self._prompts(group.row.instance_id)
        answer = self._answers.of(lengths, group.epoch, number, trace.num_attempts - 1)
        model = await self._engines.take(rollout_slot.preferred)
        rollout = _ModelledRollout(self._engines, model, group, number, trace, rollout_slot, lengths)
        try:
            limit = min(answer.limit or self._max_tokens, self._max_tokens)
            await rollout.sample(min(answer.tokens, limit), limit)
        finally:
            rollout_slot.move(None)
        rollout.record.reward = answer.reward
        return [self._sample(group, number)]

    def _sample(self, group: OpenGroup, number: int) -> Sample:
        return {
            "uid": rollout_uid(self._run_id, group.group_id, number),
            "group": group.group_id,
            "key": group.key,
            "number": number,
            "status": "completed",
        }


class _ModelledRollout:
    """One attempt of a rollout."""

    def __init__(
        self,
        engines: ModelledEngines,
        model: EngineModel,
        group: OpenGroup,
        number: int,
        trace: RolloutTrace,
        rollout_slot: RolloutSlot,
        lengths: AnswerLengths,
    ) -> None:
        assert isinstance(trace.attempt, AttemptRecord)
        self.record = trace.attempt.rollout
        self._engines, self._model, self._group, self._rollout_slot, self._lengths = (
            engines,
            model,
            group,
            rollout_slot,
            lengths,
        )
        self._execution = ModelledExecution()
        self.record.cap = rollout_slot.cap_tokens
        trace.attempt.note_started()
        group.note_rollout(number, self._execution)
        self._go_to(model)

    def _go_to(self, model: EngineModel) -> None:
        self._model = model
        self._rollout_slot.move(model.url)
        self.record.engine = model.url

    async def sample(self, num: int, limit: int) -> None:
        """Run all its turns. Raises ``GroupClosed``, ``RolloutBroken``."""
        turns = max(1, min(self._lengths.num_turns, num))
        for turn in range(turns):
            await self._turn(num * (turn + 1) // turns, limit)
            if self._model.cost.tool_s:
                await asyncio.sleep(self._model.cost.tool_s)

    async def _turn(self, until: int, limit: int) -> None:
        """Run one turn, in as many calls as needed, until the total is ``until`` tokens."""
        while self.record.sampled < until:
            if self._group.left_s() < EXPIRED_S:
                raise GroupClosed(self._group.group_id)
            most = until if self.record.cap is None else min(until, self.record.cap)
            if self.record.sampled >= most:
                raise RolloutBroken(self._group.group_id)
            if not self._group.hold.may_call:
                await self._group.hold.wait_call()
            elif await self._call(most, limit) == "done" and self.record.sampled < most:
                return  # its engine has no memory for more tokens

    async def _call(self, most: int, limit: int) -> Outcome:
        """Continue sampling up to a total of ``most`` tokens."""
        sampled = self.record.sampled
        prompt = self._lengths.prompt_tokens + sampled
        cached = self._model.cached_of(self._group.group_id, prompt)
        shared = self._model.shared_of(self._lengths.prompt_tokens)
        left = min(limit, self.record.cap or limit) - sampled
        call = ModelledCall(prompt, most - sampled, left, cached, None, self._group.group_id, shared)
        rid = self._engines.new_rid()
        outcome: Outcome = "aborted"
        try:
            with self._group.in_flight((self._model.url, rid)):
                outcome = await self._engines.call(self._model, rid, call)
        finally:  # also if cancelled
            self._note(call, outcome)
        if outcome == "lost":
            self._go_to(await self._engines.take(None))
        return outcome

    def _note(self, call: ModelledCall, outcome: Outcome) -> None:
        record = self.record
        record.prompt += call.prompt
        record.cached += call.cached
        record.preemptions += call.num_preemptions
        if outcome == "lost":
            record.lost += call.sampled
        else:
            record.sampled += call.sampled
            self._execution.num_sampled_tokens += call.sampled


class ModelledWriter:
    """Replaces an ``AsyncWriter``: samples are delivered at once."""

    def __init__(self, take: Callable[[Sample], None], on_judged: Callable[[Sample], object]) -> None:
        self._take, self._on_judged = take, on_judged
        self._is_closed = asyncio.Event()

    async def write(self, sample: Sample) -> None:
        """Deliver a sample. Implements ``JobWriter``, like the methods below."""
        self._on_judged(sample)  # first, so that the rollout's outcome is known when it is trained on
        self._take(sample)

    async def watch(self) -> None:
        await self._is_closed.wait()

    async def close(self) -> None:
        self._is_closed.set()
