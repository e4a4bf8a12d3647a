"""slime's rollout function, for ``--rollout-function-path forebay.client.slime.generate_rollout``.

Each rollout is a checkpoint of the run with step ``rollout_id``. The checkpoint is made before slime trains on the
rollout and contains exactly the groups returned for it. When slime restarts, ``start_rollout_id`` identifies the
checkpoints that its model has seen, and the first call of the process rewinds the run to them. Checkpoints without a
model are harmless. So it does not matter when slime saves (``data_source.save`` is called after the model is written),
or which rollouts it had already fetched by then.

``args.py`` translates slime's arguments, and ``samples.py`` and ``tokens.py`` turn rows into slime's samples.
``evaluation.py`` implements evaluation: one run per data set, in which every sample counts.
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
"""Seconds of waiting after which the run is checked and the wait is logged."""
MAX_UNUSABLE = 4
"""Unusable groups, in multiples of a rollout's groups, after which the rollout fails."""

_trainings: dict[tuple[str, str], "Training"] = {}
"""By server address and run name. Module state, because slime calls a plain function."""


def generate_rollout(args: SlimeArgs, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Return slime's ``RolloutFnTrainOutput`` with ``rollout_batch_size`` groups of exactly ``n_samples_per_prompt``
    samples, or with ``evaluation`` a ``RolloutFnEvalOutput``.

    ``data_source`` is ignored: the run has its own prompts. Raises ``RunEnded`` when the run has too few groups left;
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
    """Close the connections to all servers. The next rollout begins as in a new process."""
    while _trainings:
        _trainings.popitem()[1].close()


class Training:
    """The run of one training, for the lifetime of slime's process."""

    def __init__(self, url: str, name: str) -> None:
        self._client = BufferClient(url, as_tensors=True)
        self._name = name
        self._last: int | None = None
        """The ``rollout_id`` returned last."""

    def rollout(self, args: SlimeArgs, rollout_id: int) -> tuple[list[list[Any]], dict[str, Any]]:
        """slime's samples for one rollout, by group, and metrics for its log."""
        begun_s = time.monotonic()
        if self._client.run_id or self._find(args):
            # The first call of a process rewinds, and so does a call for the same or an earlier rollout.
            if self._last is None or rollout_id <= self._last:
                self._go_back(args, rollout_id)
        else:
            self._start(args)
        if not self._has_enough(args):
            self._client.set_weight_version(rollout_id)  # begins a step, in which a paused run resumes
        self._last = None  # if this call fails, the next one rewinds
        batches: list[Batch] = []
        try:
            groups, unusable = self._collect(args, rollout_id, batches)
            samples = to_slime(groups, args, rollout_id * args.rollout_batch_size)
            # The checkpoint includes unusable groups too: after a rewind they are read and skipped again.
            self._client.checkpoint(rollout_id, batches)
        except Exception as error:  # of any kind: batches leased by this call must be released
            if not isinstance(error, ServerUnreachable):
                with suppress(ForebayError, ServerUnreachable):  # the rewind of the next call releases the rest
                    self._client.release(batches)
            raise
        self._last = rollout_id
        return samples, {
            **_metrics(batches, unusable, time.monotonic() - begun_s),
            "rollout/forebay/forks": sum(len(slot) - 1 for group in groups for slot in group),
            "rollout/forebay/filled_slots": sum(slot[0].is_filler for group in groups for slot in group),
        }

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    # --- the run

    def _find(self, args: SlimeArgs) -> bool:
        """Attach to the newest run with this name, if its task type and group size match. Returns whether it did."""
        # Runs are listed oldest first; older ones were abandoned for the newest, even if they still have groups.
        named = self._client.runs(self._name)
        if not named or not _is_alike(named[-1], args):
            return False
        self._client.attach(named[-1].run_id)
        logger.info("resuming run %s, which is %s", named[-1].run_id, named[-1].state)
        return True

    def _start(self, args: SlimeArgs) -> None:
        started = self._client.start(**start_fields(args))
        logger.info("started run %s with the name %s", started.run_id, self._name)

    def _go_back(self, args: SlimeArgs, rollout_id: int) -> None:
        """Rewind what was returned for ``rollout_id`` and later, which the model that slime has now did not see."""
        steps = [checkpoint.step for checkpoint in self._client.checkpoints()]
        step = max((step for step in steps if step < rollout_id), default=None)
        if steps and rollout_id and step != rollout_id - 1:
            logger.warning("rollout %d begins, but the last checkpoint before it is %s", rollout_id, step)
        try:
            undone = self._client.rewind(step)
        except BodiesGone as error:
            if step is not None:
                raise
            logger.warning("run %s cannot be rewound, starting another one: %s", self._client.run_id, error)
            self._start(args)
            return
        if undone.num_groups:
            logger.info("%d groups of later rollouts are ready again", undone.num_groups)
        if step is None and _is_spent(self._client.stats()):
            logger.warning("run %s ended without groups, starting another one", self._client.run_id)
            self._start(args)

    def _has_enough(self, args: SlimeArgs) -> bool:
        """Whether a full rollout is ready, after a rewind: another step would keep the shared GPUs busy."""
        return shares_gpus(args) and self._client.stats().groups.get("ready", 0) >= args.rollout_batch_size

    # --- groups

    def _collect(self, args: SlimeArgs, rollout_id: int, batches: list[Batch]) -> tuple[list[Group], list[Unusable]]:
        """Lease whole groups, no more than needed, until enough of them are usable."""
        groups: list[Group] = []
        unusable: list[Unusable] = []
        while missing := args.rollout_batch_size - len(groups):
            batches.append(self._next_batch(missing, rollout_id, unusable))
            for group in groups_of(batches[-1], args):
                if isinstance(group, Unusable):
                    unusable.append(group)
                    logger.warning("skipping a group of %r: %s", group.instance_id, group.reason)
                else:
                    groups.append(group)
            _check_progress(args, unusable)
        return groups, unusable

    def _next_batch(self, num_groups: int, rollout_id: int, unusable: Sequence[Unusable]) -> Batch:
        wait_s = 0.0
        while True:
            with suppress(RunEnded):  # raised below, with more detail
                batch = self._client.read(num_groups, wait_s=wait_s, step=rollout_id)
                if batch is not None:
                    return batch
            stats = self._client.stats()
            if stats.has_ended and stats.groups.get("ready", 0) < num_groups:
                raise _ended(stats, num_groups, rollout_id)
            if wait_s and stats.is_held and unusable:  # the server counts unusable groups and makes no others this step
                raise _useless(unusable)
            if wait_s:
                waiting = "the engine" if stats.is_waiting_for_engine else f"{num_groups} groups"
                logger.info("waiting for %s: %s, discarded %s", waiting, stats.groups, stats.discarded)
            wait_s = WAIT_S


def _ended(stats: RunStats, num_groups: int, rollout_id: int) -> ForebayError:
    left = f"{stats.groups.get('ready', 0)} groups are left, rollout {rollout_id} needs {num_groups}"
    why = f" ({stats.reason.partition(chr(10))[0]})" if stats.reason else ""
    hint = "raise --num-epoch for more groups, or set another rollout_buffer_name for another run"
    return make_error("run_ended", f"run {stats.run_id!r} is {stats.state}{why}: {left}", hint=hint)


def _is_alike(run: RunStats, args: SlimeArgs) -> bool:
    return (run.task_type, run.settings.get("group_size")) == (args.rollout_task_type, args.n_samples_per_prompt)


def _is_spent(stats: RunStats) -> bool:
    """Whether a run failed or was stopped, and has no groups."""
    return stats.state in ("failed", "stopped") and not stats.groups.get("ready") and not stats.groups.get("open")


def _check_progress(args: SlimeArgs, unusable: Sequence[Unusable]) -> None:
    if len(unusable) > MAX_UNUSABLE * args.rollout_batch_size:
        raise _useless(unusable)


def _useless(unusable: Sequence[Unusable]) -> InvalidInput:
    return InvalidInput(
        f"slime can use none of {len(unusable)} groups; the last, {unusable[-1].instance_id!r}: {unusable[-1].reason}",
        hint="they were released to the buffer; fix the generator or its hooks",
    )


def _metrics(batches: Sequence[Batch], unusable: Sequence[Unusable], wait_s: float) -> dict[str, Any]:
    """Metrics for slime's log. The reward is the mean over all samples, before any filter."""
    counts = [batch.meta_info.get("total_samples") or 0 for batch in batches]
    total = sum(counts)
    # Each batch has the mean of the samples that arrived since the previous batch.
    reward = sum(
        (batch.meta_info.get("avg_reward") or 0.0) * count for batch, count in zip(batches, counts, strict=True)
    )
    metrics = {"total_samples": total, "unusable_groups": len(unusable), "wait_s": wait_s}
    if total:
        metrics["avg_reward_unfiltered"] = reward / total
    return {f"rollout/forebay/{name}": value for name, value in metrics.items()}
