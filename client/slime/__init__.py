"""slime's rollout function, for ``--rollout-function-path forebay.client.slime.generate_rollout``.

Every rollout is a checkpoint of the run, marked before slime trains on it, and holds what was handed out for it and
nothing else: ``rollout_id`` is the step. A mark without a model is harmless; and whichever model slime finds when it
starts again, ``start_rollout_id`` says which marks that model has seen. The first call of a process rewinds the run to
them. So nothing hangs on the moment at which slime saves (its ``data_source.save`` comes after the model is there), or
on what it had fetched early by then.

``args.py`` says what slime's arguments mean to Forebay, ``samples.py`` and ``tokens.py`` make slime's samples of rows,
and ``evaluation.py`` is the other half of slime's contract: a run for each data set, whose every sample counts.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from forebay.client.errors import ServerUnreachable, make_error
from forebay.client.model import Batch, RunStats
from forebay.client.slime.args import SlimeArgs, buffer_url, check_args, run_name, shares_gpus, start_fields
from forebay.client.slime.evaluation import evaluate
from forebay.client.slime.samples import Group, Unusable, groups_of, slime_module, to_slime
from forebay.client.trainer.buffer_client import BufferClient
from forebay.core.errors import BodiesGone, ForebayError, InvalidInput, RunEnded

logger = logging.getLogger(__name__)

WAIT_S = 10.0
"""Seconds of waiting after which the log says for what, and the run is looked at."""
MAX_UNUSABLE = 4
"""Times the groups of a rollout that may be unusable before something is wrong with all of them."""

_trainings: dict[tuple[str, str], "Training"] = {}
"""By address of the server and name of the run: slime calls a plain function."""


def generate_rollout(args: SlimeArgs, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """slime's contract: a ``RolloutFnTrainOutput`` with ``rollout_batch_size`` groups of exactly
    ``n_samples_per_prompt`` samples, or with ``evaluation`` a ``RolloutFnEvalOutput``.

    ``data_source`` is not used: prompts are the run's own. Raises ``RunEnded`` when the run has too few groups left;
    they stay in the buffer. Raises ``InvalidInput``, ``StartRefused``, ``ServerUnreachable``.
    """
    del data_source
    check_args(args)
    if evaluation:
        return slime_module("rollout.base_types").RolloutFnEvalOutput(*evaluate(args, rollout_id))
    where = (buffer_url(args), run_name(args))
    if where not in _trainings:
        _trainings[where] = Training(*where)
    samples, metrics = _trainings[where].rollout(args, rollout_id)
    return slime_module("rollout.base_types").RolloutFnTrainOutput(samples=samples, metrics=metrics)


def close() -> None:
    """Let go of the server. A later rollout begins as it does in a new process."""
    while _trainings:
        _trainings.popitem()[1].close()


class Training:
    """The run of one training, as long as slime's process lives."""

    def __init__(self, url: str, name: str) -> None:
        self._client = BufferClient(url, as_tensors=True)
        self._name = name
        self._last: int | None = None
        """The rollout that was handed out last."""

    def rollout(self, args: SlimeArgs, rollout_id: int) -> tuple[list[list[Any]], dict[str, Any]]:
        """slime's samples for one rollout, by group, and numbers for its log."""
        begun_s = time.monotonic()
        if self._client.run_id or self._find(args):
            # A new process looks where slime begins; so does a call that goes no step forward.
            if self._last is None or rollout_id <= self._last:
                self._go_back(args, rollout_id)
        else:
            self._start(args)
        if not self._has_enough(args):
            self._client.set_weight_version(rollout_id)  # begins a step: a run that is held goes on
        self._last = None  # until it is known better: what fails on the way is undone by the next call
        batches: list[Batch] = []
        try:
            groups, unusable = self._collect(args, rollout_id, batches)
            samples = to_slime(groups, args, rollout_id * args.rollout_batch_size)
            # Unusable groups are in it too: a rewind brings them again, as what they are.
            self._client.checkpoint(rollout_id, batches)
        except Exception as error:  # whatever it is: what was leased on the way must not stay so
            if not isinstance(error, ServerUnreachable):
                with suppress(ForebayError, ServerUnreachable):  # the next call's rewind gives back what is left
                    self._client.release(batches)
            raise
        self._last = rollout_id
        return samples, {
            **_metrics(batches, unusable, time.monotonic() - begun_s),
            "rollout/forebay/forks": sum(len(slot) - 1 for group in groups for slot in group),
            "rollout/forebay/filled_slots": sum(slot[0].is_filler for group in groups for slot in group),
        }

    def close(self) -> None:
        """Let go of the connections."""
        self._client.close()

    # --- the run

    def _find(self, args: SlimeArgs) -> bool:
        """Attach to the newest run of the name, if it is of the same kind."""
        # Runs come oldest first; an older one of the name was given up for the newer, whatever there is in it.
        named = self._client.runs(self._name)
        if not named or not _is_alike(named[-1], args):
            return False
        self._client.attach(named[-1].run_id)
        logger.info("goes on with run %s, which is %s", named[-1].run_id, named[-1].state)
        return True

    def _start(self, args: SlimeArgs) -> None:
        started = self._client.start(**start_fields(args))
        logger.info("started run %s under the name %s", started.run_id, self._name)

    def _go_back(self, args: SlimeArgs, rollout_id: int) -> None:
        """Undo what was handed out for ``rollout_id`` and later: the model that slime has now did not see it."""
        steps = [checkpoint.step for checkpoint in self._client.checkpoints()]
        step = max((step for step in steps if step < rollout_id), default=None)
        if steps and rollout_id and step != rollout_id - 1:
            logger.warning("rollout %d begins, but the buffer last knows of %s before it", rollout_id, step)
        try:
            undone = self._client.rewind(step)
        except BodiesGone as error:
            if step is not None:
                raise
            logger.warning("run %s cannot begin again, another one is started: %s", self._client.run_id, error)
            self._start(args)
            return
        if undone.num_groups:
            logger.info("%d groups of later rollouts are ready again", undone.num_groups)
        if step is None and _is_spent(self._client.stats()):
            logger.warning("run %s came to nothing, another one is started", self._client.run_id)
            self._start(args)

    def _has_enough(self, args: SlimeArgs) -> bool:
        """Whether a rollout is there already, after a rewind: a step more would keep the shared GPUs busy."""
        return shares_gpus(args) and self._client.stats().groups.get("ready", 0) >= args.rollout_batch_size

    # --- groups

    def _collect(self, args: SlimeArgs, rollout_id: int, batches: list[Batch]) -> tuple[list[Group], list[Unusable]]:
        """Lease whole groups, and no more than are needed, until enough of them are usable."""
        groups: list[Group] = []
        unusable: list[Unusable] = []
        while missing := args.rollout_batch_size - len(groups):
            batches.append(self._next_batch(missing, rollout_id, unusable))
            for group in groups_of(batches[-1], args):
                if isinstance(group, Unusable):
                    unusable.append(group)
                    logger.warning("a group of %r is passed over: %s", group.instance_id, group.reason)
                else:
                    groups.append(group)
            _check_progress(args, unusable)
        return groups, unusable

    def _next_batch(self, num_groups: int, rollout_id: int, unusable: Sequence[Unusable]) -> Batch:
        wait_s = 0.0
        while True:
            with suppress(RunEnded):  # raised below, with what there is to say
                batch = self._client.read(num_groups, wait_s=wait_s, step=rollout_id)
                if batch is not None:
                    return batch
            stats = self._client.stats()
            if stats.has_ended and stats.groups.get("ready", 0) < num_groups:
                raise _ended(stats, num_groups, rollout_id)
            if wait_s and stats.is_held and unusable:  # the server has counted them: it makes no others for this step
                raise _useless(unusable)
            if wait_s:
                waiting = "the engine" if stats.is_waiting_for_engine else f"{num_groups} groups"
                logger.info("waiting for %s: %s, discarded %s", waiting, stats.groups, stats.discarded)
            wait_s = WAIT_S


def _ended(stats: RunStats, num_groups: int, rollout_id: int) -> ForebayError:
    left = f"{stats.groups.get('ready', 0)} groups are left, rollout {rollout_id} needs {num_groups}"
    why = f" ({stats.reason.partition(chr(10))[0]})" if stats.reason else ""
    hint = "more epochs (--num-epoch) make more groups; another run needs another rollout_buffer_name"
    return make_error("run_ended", f"run {stats.run_id!r} is {stats.state}{why}: {left}", hint=hint)


def _is_alike(run: RunStats, args: SlimeArgs) -> bool:
    return (run.task_type, run.settings.get("group_size")) == (args.rollout_task_type, args.n_samples_per_prompt)


def _is_spent(stats: RunStats) -> bool:
    """Whether a run broke off without anything in it."""
    return stats.state in ("failed", "stopped") and not stats.groups.get("ready") and not stats.groups.get("open")


def _check_progress(args: SlimeArgs, unusable: Sequence[Unusable]) -> None:
    if len(unusable) > MAX_UNUSABLE * args.rollout_batch_size:
        raise _useless(unusable)


def _useless(unusable: Sequence[Unusable]) -> InvalidInput:
    return InvalidInput(
        f"slime can use none of {len(unusable)} groups; of {unusable[-1].instance_id!r}: {unusable[-1].reason}",
        hint="they were given back to the buffer; mend the generator or its hooks",
    )


def _metrics(batches: Sequence[Batch], unusable: Sequence[Unusable], wait_s: float) -> dict[str, Any]:
    """Numbers for slime's log. The reward is that of all samples, before any filter."""
    counts = [batch.meta_info.get("total_samples") or 0 for batch in batches]
    total = sum(counts)
    # Each batch says the mean of what arrived since the one before it.
    reward = sum(
        (batch.meta_info.get("avg_reward") or 0.0) * count for batch, count in zip(batches, counts, strict=True)
    )
    metrics = {"total_samples": total, "unusable_groups": len(unusable), "wait_s": wait_s}
    if total:
        metrics["avg_reward_unfiltered"] = reward / total
    return {f"rollout/forebay/{name}": value for name, value in metrics.items()}
