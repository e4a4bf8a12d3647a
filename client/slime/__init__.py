"""slime's rollout function, for ``--rollout-function-path forebay.client.slime.generate_rollout``.

Each rollout is a marked step of the run (``client/trainer/marked_steps.py``) with the number ``rollout_id``. When slime
restarts, ``start_rollout_id`` identifies the steps that its model has seen.

``args.py`` translates slime's arguments. ``samples.py``, ``tokens.py`` and ``arrays.py`` turn rows into slime's
samples. ``evaluation.py`` implements evaluation: one run per data set, in which every sample counts.
"""

import logging
import time
from typing import Any

from forebay.client.model import Batch
from forebay.client.slime.args import SlimeArgs, buffer_url, check_args, run_name, shares_gpus, start_fields
from forebay.client.slime.arrays import read_names
from forebay.client.slime.evaluation import evaluate
from forebay.client.slime.samples import Group, groups_of, slime_module, to_slime
from forebay.client.trainer.buffer_client import BufferClient
from forebay.client.trainer.marked_steps import LeasedStep, MarkedSteps, Unusable

logger = logging.getLogger(__name__)

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
        self._steps = MarkedSteps(self._client)
        self._name = name

    def rollout(self, args: SlimeArgs, rollout_id: int) -> tuple[list[list[Any]], dict[str, Any]]:
        """slime's samples for one rollout, by group, and metrics for its log."""
        begun_s = time.monotonic()
        self._begin(args, rollout_id)
        if not self._has_enough(args):
            self._client.set_weight_version(rollout_id)  # begins a step, in which a paused run resumes
        with self._steps.step(rollout_id) as step:
            groups = step.collect(args.rollout_batch_size, lambda batch: self._groups(batch, args))
            samples = to_slime(groups, args, rollout_id * args.rollout_batch_size)
        return samples, {
            **_metrics(step, time.monotonic() - begun_s),
            "rollout/forebay/forks": sum(len(slot) - 1 for group in groups for slot in group),
            "rollout/forebay/filled_slots": sum(slot[0].is_filler for group in groups for slot in group),
        }

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _begin(self, args: SlimeArgs, rollout_id: int) -> None:
        """Resume the run with this name, or start one."""

        def start() -> None:
            started = self._client.start(**start_fields(args))
            logger.info("started run %s with the name %s", started.run_id, self._name)

        alike = (args.rollout_task_type, args.n_samples_per_prompt)
        if self._client.run_id or self._steps.find(self._name, *alike):
            self._steps.begin(rollout_id, start)
        else:
            start()

    def _has_enough(self, args: SlimeArgs) -> bool:
        """Whether a full rollout is ready, after a rewind: another step would keep the shared GPUs busy."""
        return shares_gpus(args) and self._client.stats().groups.get("ready", 0) >= args.rollout_batch_size

    def _groups(self, batch: Batch, args: SlimeArgs) -> list[Group | Unusable]:
        names = read_names(args)
        side = self._client.arrays(batch, batch.rows, names) if names else ()
        return groups_of(batch, args, side, self._client.images(batch, batch.rows))


def _metrics(step: LeasedStep, wait_s: float) -> dict[str, Any]:
    """Metrics for slime's log. The reward is the mean over all samples, before any filter."""
    counts = [batch.meta_info.get("total_samples") or 0 for batch in step.batches]
    total = sum(counts)
    # Each batch has the mean of the samples that arrived since the previous batch.
    reward = sum(
        (batch.meta_info.get("avg_reward") or 0.0) * count for batch, count in zip(step.batches, counts, strict=True)
    )
    metrics = {"total_samples": total, "unusable_groups": len(step.unusable), "wait_s": wait_s}
    if total:
        metrics["avg_reward_unfiltered"] = reward / total
    return {f"rollout/forebay/{name}": value for name, value in metrics.items()}
