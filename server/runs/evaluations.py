"""Evaluations of a run's weights beside its training: starts them, ends them at a weight update, stores results.

An evaluation is a run of its own on the training run's engines. Its groups are never delivered, and are discarded once
the result is stored.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, Self

from forebay.buffer.buffer import Buffer, LiveRun
from forebay.buffer.journal_source import JournalSource
from forebay.buffer.run_warnings import warn
from forebay.core.addresses import engine_root, engine_urls
from forebay.core.backoff import Deadline
from forebay.core.errors import ForebayError, InvalidInput, RunEnded
from forebay.core.group import DiscardReason, GroupState
from forebay.core.ids import InstanceId
from forebay.core.records.rows import SampleRow
from forebay.core.run import WORKING, Run, RunState
from forebay.core.sample import named_versions
from forebay.core.starts.evaluate import Evaluate, Evaluates
from forebay.core.tasks import TaskSet
from forebay.core.weight_versions import AnnouncedWeights, Loaded
from forebay.server.runs.evaluation_statistics import estimates
from forebay.server.runs.service import RunService

logger = logging.getLogger(__name__)

STOP_GRACE_S = 1.0
"""Seconds that an evaluation's process has to end, while a weight update waits for it."""
GROUPS_AT_ONCE = 8


class Evaluations:
    """All evaluations of this server. Enter it before the server listens."""

    def __init__(self, buffer: Buffer, runs: RunService) -> None:
        self._buffer = buffer
        self._runs = runs
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._overtaken: set[str] = set()
        """Evaluations that were stopped because their weights were replaced."""
        self._tasks = TaskSet()

    async def __aenter__(self) -> Self:
        for run in [entry.run for entry in self._buffer.entries]:
            if run.state not in WORKING and run.evaluation is None:  # the server ended before its result was stored
                self.note_ended(run.run_id)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.cancel()

    def views_of(self, run_ids: Collection[str]) -> dict[str, list[dict[str, Any]]]:
        """The evaluations of each run, by step."""
        found: dict[str, list[dict[str, Any]]] = {run_id: [] for run_id in run_ids}
        for evaluates, entry in self._evaluations_of(found):
            found[evaluates.run_id].append(_view(entry))
        return {run_id: sorted(views, key=lambda view: int(view["step"])) for run_id, views in found.items()}

    def _evaluations_of(self, run_ids: Collection[str]) -> Iterator[tuple[Evaluates, LiveRun]]:
        for entry in self._buffer.entries:
            evaluates = entry.run.evaluates
            if evaluates and evaluates.run_id in run_ids and not evaluates.is_undone:
                yield evaluates, entry

    # --- starting

    async def start(self, run_id: str, task: str, step: int) -> dict[str, Any]:
        """Evaluate the run's current weights as those of ``step``, and return the view of the evaluation.

        An evaluation of the same task, step and weights that is in progress or finished is returned instead. Raises
        ``RunNotFound``, ``RunEnded``, ``InvalidInput``, and what a start raises.
        """
        entry = self._buffer.get(run_id)
        return await self._start(entry.run, _checked(entry, task, step), task, step)

    def note_marked(self, run_id: str, step: int) -> None:
        """Start those evaluations of ``step`` that are missing if its checkpoint, the newest, is the ``every``-th."""
        entry = self._buffer.get(run_id)
        evaluate = entry.run.settings.evaluate
        if evaluate is None or evaluate.every is None or len(entry.buffer.batches.steps) % evaluate.every:
            return
        known = {view["task"] for view in self.views_of([run_id])[run_id] if view["step"] == step}
        for task in sorted(evaluate.tasks.keys() - known):
            self._tasks.start(self._start_at_mark(entry.run, evaluate, task, step))

    async def note_rewound(self, run_id: str, step: int | None) -> None:
        """End and forget the evaluations of later steps, whose models are undone; None for those of all steps."""

        def undo(run: Run) -> None:
            run.evaluates = run.evaluates and replace(run.evaluates, is_undone=True)

        async with self._locks[run_id]:  # one may be starting
            for view in self.views_of([run_id])[run_id]:
                if step is None or view["step"] > step:
                    await self._end(view["run_id"], 0.0)
                    await self._buffer.update(view["run_id"], undo)

    async def _start_at_mark(self, run: Run, evaluate: Evaluate, task: str, step: int) -> None:
        try:
            await self._start(run, evaluate, task, step)
        except ForebayError as error:  # the training continues
            text = f"step {step} could not be evaluated on {task!r}: {error}"
            await self._buffer.update(run.run_id, lambda run: warn(run, text))

    async def _start(self, run: Run, evaluate: Evaluate, task: str, step: int) -> dict[str, Any]:
        weights = run.weights
        evaluates = Evaluates(run.run_id, task, step, weights.version)
        async with self._locks[run.run_id]:  # a client may repeat its request
            for known, entry in self._evaluations_of([run.run_id]):
                if known == evaluates and entry.run.state not in (RunState.FAILED, RunState.STOPPED):
                    return _view(entry)
            payload = evaluate.payload(run.payload, task)
            made = await self._runs.start(payload, f"eval-{task}-{step}", "native", evaluates)
        now = self._buffer.get(run.run_id).run.weights
        if now.id != weights.id and _is_replaced(weights.version, now):  # before this evaluation was known
            await self._end(made.run_id, 0.0)
        return _view(self._buffer.get(made.run_id))

    # --- weight updates

    async def make_way(self, run_id: str, loaded: Loaded | None = None) -> None:
        """End all evaluations on the run's engines whose weights ``loaded`` replaces; with None, respect ``hold``."""
        places, runs = _places(self._buffer.get(run_id).run), {e.run.run_id: e.run for e in self._buffer.entries}
        ends = [
            self._end(run.run_id, _hold_s(runs.get(run.evaluates.run_id)) if loaded is None else 0.0)
            for run in runs.values()
            if run.evaluates and places & _places(run) and _is_replaced(run.weights.version, loaded)
        ]
        await asyncio.gather(*ends)

    async def _end(self, run_id: str, wait_s: float) -> None:
        """Stop an evaluation that is not over within ``wait_s``."""
        deadline = Deadline(wait_s)
        while self._buffer.get(run_id).run.state in WORKING:
            if not await deadline.wait(self._buffer.get(run_id).buffer.news):
                self._overtaken.add(run_id)
                await self._runs.stop(run_id, STOP_GRACE_S)
                return

    # --- results

    def note_ended(self, run_id: str) -> None:
        """Store the result of an evaluation whose process has ended. Ignores other runs."""
        if self._buffer.get(run_id).run.evaluates is not None:
            self._tasks.start(self._store_result(run_id))

    async def _store_result(self, run_id: str) -> None:
        run = self._buffer.get(run_id).run
        try:
            result = await self._result(run)
        except ForebayError as error:
            logger.exception("the result of evaluation %s cannot be computed", run_id)
            result = _Rollouts(run).result(1) | {"reason": str(error)}
        if run_id in self._overtaken and run.state is RunState.STOPPED:
            result["reason"] = "the weights were replaced"
        self._overtaken.discard(run_id)

        def change(run: Run) -> None:
            run.evaluation = result

        await self._buffer.update(run_id, change)
        async with self._buffer.locked(run_id) as buffer:
            # Otherwise its bodies would be kept for a trainer.
            for group in buffer.groups.in_state(GroupState.OPEN, GroupState.READY):
                buffer.move(group, GroupState.DISCARDED, DiscardReason.EVALUATED)

    async def _result(self, run: Run) -> dict[str, Any]:
        source, rollouts = JournalSource(run, self._buffer.store), _Rollouts(run)
        group_ids = [group.group_id for group in await source.groups()]
        for first in range(0, len(group_ids), GROUPS_AT_ONCE):
            found = await source.samples(group_ids[first : first + GROUPS_AT_ONCE])
            members = [sample for samples in found.values() for sample in samples if sample.row.outcome == "member"]
            # In a thread: bodies may be long.
            await asyncio.to_thread(rollouts.add, [each.row for each in members], await source.bodies(members))
        return rollouts.result(run.settings.group_size)


class _Rollouts:
    """The rollouts of an evaluation, of which those count that failed neither and used only the pinned weights."""

    def __init__(self, run: Run) -> None:
        self._pinned = run.weights.version
        self._rewards: defaultdict[InstanceId, list[float]] = defaultdict(list)
        self._num_failed = self._num_other = 0

    def add(self, rows: Sequence[SampleRow], bodies: Sequence[bytes]) -> None:
        """Add the samples, with their bodies, of whole groups."""
        versions: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        for row, body in zip(rows, bodies, strict=True):  # forks included
            versions[row.group_id, row.slot] |= named_versions(body)
        for row in (row for row in rows if not row.fork):
            named = versions[row.group_id, row.slot]
            if self._pinned is None and len(named) == 1:
                (self._pinned,) = named  # the trainer announces none: all must have the first one's
            if row.reward is None:
                self._num_failed += 1
            elif named - {self._pinned}:
                self._num_other += 1
            else:
                self._rewards[row.instance_id].append(row.reward)

    def result(self, group_size: int) -> dict[str, Any]:
        """What is stored as the evaluation's result."""
        return {
            "num_counted": sum(map(len, self._rewards.values())),
            "num_failed": self._num_failed,
            "num_other_weights": self._num_other,
            **estimates(self._rewards, group_size),
        }


def _places(run: Run) -> set[str]:
    """The engines of a run and the id of the run that is trained: runs with a common one have the same weights."""
    return {run.evaluates.run_id if run.evaluates else run.run_id, *map(engine_root, engine_urls(run.payload))}


def _is_replaced(version: int | None, loaded: Loaded | AnnouncedWeights | None) -> bool:
    """Whether ``loaded`` replaces the weights of that version. None, and what Forebay loads or names, always does."""
    return loaded is None or loaded.engine_name is not None or loaded.version != version


def _hold_s(training: Run | None) -> float:
    """Seconds that an update waits for an evaluation of the run, which may have been removed."""
    evaluate = training.settings.evaluate if training else None
    return evaluate.hold_s if evaluate and evaluate.on_update == "hold" else 0.0


def _checked(entry: LiveRun, task: str, step: int) -> Evaluate:
    """Check a request for an evaluation, and return the run's settings. Raises ``InvalidInput``, ``RunEnded``."""
    run, evaluate, steps = entry.run, entry.run.settings.evaluate, entry.buffer.batches.steps
    if run.state in (RunState.STOPPED, RunState.FAILED):
        raise RunEnded(run.run_id, run.state.value)
    if evaluate is None or task not in evaluate.tasks:
        known = f"its tasks are {', '.join(evaluate.tasks)}" if evaluate else "it was started without evaluate.tasks"
        raise InvalidInput(f"run {run.run_id!r} has no evaluation task {task!r}", hint=known, field="task")
    asked = [row.step for row in entry.buffer.batches.by_id.values()]
    if step not in steps and step not in asked:
        hint = f"steps with a checkpoint: {', '.join(map(str, steps[-10:])) or 'none'}"
        raise InvalidInput(f"step {step} has neither a checkpoint nor a batch", hint=hint, field="step")
    if entry.buffer.is_exhausted and step != max(steps, default=step):
        raise RunEnded(run.run_id, f"only its last step, {max(steps)}, can be evaluated")
    return evaluate


def _view(entry: LiveRun) -> dict[str, Any]:
    """An evaluation with its result, whose numbers are preliminary until its state is final."""
    run, total = entry.run, entry.run.num_groups_total
    assert run.evaluates is not None
    so_far = {"num_counted": entry.buffer.counts["member"], "num_failed": entry.buffer.counts["failed"]}
    return {
        **asdict(run.evaluates),
        "run_id": run.run_id,
        "state": "running" if run.evaluation is None else run.state.value,
        "reason": "" if run.state is RunState.FINISHED else run.reason.partition("\n")[0],
        "num_rollouts": None if total is None else total * run.settings.group_size,
        **(so_far if run.evaluation is None else run.evaluation),
    }
