"""The arguments of TRL's ``GRPOTrainer`` that make it train on a run."""

import json
import math
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from datasets import Dataset
from packaging.version import Version
from transformers import TrainerCallback
from trl import GRPOTrainer as _GRPOTrainer

from forebay.client.trainer.buffer_client import BufferClient
from forebay.client.trainer.marked_steps import MarkedSteps
from forebay.client.trl.rows import TrlRow, groups_of
from forebay.core.errors import InvalidInput

NUM_PROMPTS = 1 << 16
"""Rows of the placeholder data set: at least one per group of a generation batch."""


class GRPOTrainer(_GRPOTrainer):  # type: ignore[misc]
    """TRL's ``GRPOTrainer`` with the engine's logprobs as those of the old policy."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = super()._generate_and_score_completions(inputs)
        # TRL itself uses the engine's logprobs only with its own vLLM. Without them, the policy of this step would be
        # the old one, and off-policy samples would pass for on-policy.
        return {**made, "old_per_token_logps": made["sampling_per_token_logps"]}


class Rollouts(TrainerCallback):  # type: ignore[misc]
    """The groups of a run for ``GRPOTrainer``::

        rollouts = Rollouts(client, weights="/shared/policy")
        trainer = GRPOTrainer(model, args=config, **rollouts.arguments)
        trainer.train(resume_from_checkpoint=last_checkpoint(config.output_dir))

    ``client`` is attached to the run. Each group has one row per rollout: forks are left out, and a failed rollout is
    a masked row without a reward. TRL computes the advantages from the raw rewards. Groups that TRL cannot train on are
    passed over, logged, and counted as ``forebay/unusable_groups``.

    ``weights`` is a folder that the engines can read: before each generation batch the model is saved there, and the
    engines load it. Without it, load each step's weights yourself, and announce their version.
    """

    def __init__(self, client: BufferClient, weights: str | Path | None = None) -> None:
        """Raise ``InvalidInput`` if the installed TRL is too old."""
        check_trl()
        self._client = client
        self._steps = MarkedSteps(client)
        self._weights = weights
        self._loaded: int | None = None
        """The step whose weights the engines have."""
        self._metrics: list[dict[str, float]] = []
        self._has_begun = False

    @property
    def arguments(self) -> dict[str, Any]:
        """``rollout_func``, ``reward_funcs``, ``callbacks``, and a placeholder as ``train_dataset``."""
        return {
            "rollout_func": self.rollout_func,
            "reward_funcs": [self.raw_reward],
            "callbacks": [self],
            "train_dataset": Dataset.from_dict({"prompt": [""] * NUM_PROMPTS}),
        }

    def rollout_func(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Return one row for each of ``prompts``, in which TRL repeats each prompt ``num_generations`` times.

        Raises ``RunEnded`` when the run has too few groups left, and ``InvalidInput``.
        """
        _check_trainer(trainer)
        if self._weights:
            trainer.save_model(str(self._weights))  # in all processes: each may have a part of the model
        made: list[Any] = [self._lease(trainer) if trainer.accelerator.is_main_process else None]
        broadcast_object_list(made)
        if isinstance(made[0], Exception):
            raise made[0]
        # The groups of a generation batch lie across processes, in their order.
        start = trainer.accelerator.process_index * len(prompts)
        rows: list[TrlRow] = made[0][start : start + len(prompts)]
        return {name: [row[name] for row in rows] for name in rows[0]}

    def raw_reward(self, *, raw_reward: list[float | None], log_metric: Any, **_: Any) -> list[float | None]:
        """The rewards that came with the rows; also puts numbers about their batches into TRL's log."""
        while self._metrics:
            for name, value in self._metrics.pop().items():
                log_metric(name, value)
        return raw_reward

    def on_train_begin(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Check the trainer's arguments, and rewind the run to the loaded checkpoint. Raises ``InvalidInput``."""
        if not state.is_world_process_zero:
            return
        num_micro_steps, accumulated = args.steps_per_generation * args.num_iterations, args.gradient_accumulation_steps
        # Otherwise the mark of a step could lie in the middle of a generation batch.
        is_aligned = num_micro_steps % accumulated == 0 or accumulated % num_micro_steps == 0
        why = f"times num_iterations must divide gradient_accumulation_steps={accumulated}, or be a multiple of it"
        group_size = self._client.stats().settings["group_size"]
        check_args(
            self._client,
            args,
            state,
            ("num_generations", args.num_generations != group_size, f"must be the run's group_size, {group_size}"),
            ("use_vllm", args.use_vllm, "must be False: the run has its own engines"),
            ("eval_strategy", args.eval_strategy != "no", "must be 'no': a run's groups are for training"),
            ("steps_per_generation", not is_aligned, why),
            steps_per_mark=_steps_per_mark(args),
        )
        self._steps.begin(state.global_step + 1)
        self._has_begun = True

    def _lease(self, trainer: GRPOTrainer) -> list[TrlRow] | Exception:
        args, global_step = trainer.args, trainer.state.global_step
        try:
            check_begun(has_begun=self._has_begun)
            if self._weights and self._loaded != global_step:
                self._client.update_weights(global_step, self._weights)
                self._loaded = global_step
            # A training that resumes before the last step on this generation batch gets the batch again.
            with self._steps.step(global_step + _steps_per_mark(args)) as step:
                size = args.num_generations
                groups = step.collect(args.generation_batch_size // size, lambda batch: groups_of(batch, size))
                self._metrics = [self._client.metrics(batch) for batch in step.batches]
        except Exception as error:  # noqa: BLE001 - of any kind: the other processes wait for what is broadcast
            return error
        self._metrics.append({"forebay/unusable_groups": len(step.unusable)})
        return [row for group in groups for row in group]


def last_checkpoint(output_dir: str | Path) -> str | None:
    """The newest complete checkpoint that TRL saved, for ``resume_from_checkpoint``; None if there is none.

    A killed training may leave an incomplete one, which TRL itself would choose.
    """
    states = Path(output_dir).glob("checkpoint-*/trainer_state.json")  # which TRL writes last
    for path in sorted(states, key=lambda path: int(path.parent.name.rpartition("-")[2]), reverse=True):
        with suppress(ValueError):
            json.loads(path.read_bytes())
            return str(path.parent)
    return None


def _steps_per_mark(args: Any) -> int:
    """Optimiser steps in which a generation batch is trained on."""
    return max(1, int(args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps))


def _check_trainer(trainer: Any) -> None:
    if not isinstance(trainer, GRPOTrainer):
        hint = "use forebay.client.trl.GRPOTrainer"
        raise InvalidInput("TRL's own GRPOTrainer ignores the engine's logprobs", hint=hint)
    if not trainer.model.training:
        raise InvalidInput("a run's groups are for training, not for an evaluation", field="eval_strategy")


# --- what cannot work is refused before anything is leased


def check_trl() -> None:
    """Raise ``InvalidInput`` if the installed TRL is too old."""
    found = version("trl")
    if Version(found) < Version("1.16"):
        raise InvalidInput(f"forebay.client.trl needs TRL 1.16 or later (found {found})", hint="pip install -U trl")


def check_begun(*, has_begun: bool) -> None:
    """Raise ``InvalidInput`` if a training reads although TRL has not called our callback: its run was not rewound."""
    if not has_begun:
        hint = "pass all arguments to the trainer: **rollouts.arguments, or **worker.arguments"
        raise InvalidInput("the trainer lacks the callback that rewinds the run", hint=hint, field="callbacks")


def check_args(
    client: BufferClient, args: Any, state: Any, *more: tuple[str, bool, str], steps_per_mark: int = 1
) -> None:
    """Raise ``InvalidInput`` for arguments of a trainer with which it cannot train on the run, or not resume.

    ``more`` has a field of them, whether its value is wrong, and what it must be.
    """
    stats = client.stats()
    # Marked steps since the last checkpoint of TRL, and that of the checkpoint itself.
    needs = math.ceil(state.save_steps / steps_per_mark) + 1 if args.save_strategy == "steps" else 1
    kept, sampled = stats.settings["keep_checkpoints"], stats.sampling_params.get("temperature", args.temperature)
    too_few = f"needs keep_checkpoints={needs}, the run has {kept}: lower it, or start a run with more"
    checks = (
        ("max_steps", args.max_steps <= 0, "must be set: the number of groups is not known beforehand"),
        ("save_strategy", args.save_strategy not in ("steps", "no"), "must be 'steps', or 'no' never to resume"),
        ("save_steps", kept < needs, too_few),
        ("temperature", args.temperature != sampled, f"must be that of the run's sampling_params, {sampled}"),
    )
    for field, is_wrong, why in (*checks, *more):
        if is_wrong:
            raise InvalidInput(f"{field} {why} (got {getattr(args, field)!r})", field=field)
