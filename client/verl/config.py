"""verl's configuration: checks, and the fields of a start."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

from forebay.client.trainer.buffer_client import BufferClient
from forebay.client.trainer.marked_steps import MarkedSteps
from forebay.core.errors import InvalidInput

VerlConfig: TypeAlias = Any
"""verl's whole configuration, an omegaconf ``DictConfig``."""

OLDEST = "0.9.1"
"""The oldest version of verl that both classes work with."""
MODE = "separate_async"
NUM_EPOCHS = 1_000
"""verl decides when the training ends; a run that ended before it would leave the trainer without groups."""


@dataclass
class VerlTraining:
    """What the two classes of a process share, since verl makes each of them on its own."""

    steps: MarkedSteps
    max_tokens: int = 0
    """Length of the longest sample that verl's settings allow; 0 until the run has begun."""


@cache
def training_at(url: str) -> VerlTraining:
    """The training of this process at a server; verl's ``sampler_kwargs`` may have the ``url``."""
    return VerlTraining(MarkedSteps(BufferClient(url, as_tensors=True)))


def check_sampler(trainer_mode: str, max_off_policy_strategy: str, sampler_kwargs: Mapping[str, Any]) -> None:
    """Raise ``InvalidInput`` for what the sampler's own arguments already show to be wrong."""
    # In the other modes, engines sleep after each `sample`: calls of a run beside them would hang.
    if trainer_mode != MODE:
        raise wrong("trainer.v1.trainer_mode", trainer_mode, MODE, "its engines sleep while verl trains")
    from packaging.version import Version

    installed = version("verl")
    if Version(installed) < Version(OLDEST):
        raise InvalidInput(f"verl {installed} is too old: pip install 'verl>={OLDEST}'", field="verl")
    if max_off_policy_strategy != "drop":
        field = "trainer.v1.sampler.max_off_policy_strategy"
        raise wrong(field, max_off_policy_strategy, "drop", "a step does not wait for the oldest rollouts")
    if not sampler_kwargs.get("task_type"):
        # verl's `sampler_kwargs` is a closed structure: each field needs the plus sign.
        field = "+trainer.v1.sampler.sampler_kwargs.task_type"
        raise wrong(field, None, "my_task", "the run needs a generator")


def check_config(config: VerlConfig) -> None:
    """Raise ``InvalidInput`` if the manager cannot work with verl's other parts."""
    sampler = config.trainer.v1.sampler
    check_sampler(config.trainer.v1.trainer_mode, sampler.max_off_policy_strategy, sampler.sampler_kwargs)
    # verl imports a module only with `pkg://`; any other path is that of a file.
    for name, expected in {"path": "pkg://forebay.client.verl", "name": "ReplayBuffer"}.items():
        if (given := sampler.custom_sampler.get(name)) != expected:
            raise wrong(f"trainer.v1.sampler.custom_sampler.{name}", given, expected, "verl would wait for ever")
    if config.actor_rollout_ref.get("hybrid_engine", True):
        field = "actor_rollout_ref.hybrid_engine"
        raise wrong(field, True, False, "engines on the trainer's GPUs sleep while verl trains")


def wrong(field: str, given: object, expected: object, why: str) -> InvalidInput:
    # The remedy is in the message: verl prints an error without its hint.
    return InvalidInput(f"set {field}={expected} (got {given}): {why}", field=field)


def start_fields(config: VerlConfig, addresses: Sequence[str]) -> dict[str, Any]:
    """The fields of a start on the engines at ``addresses``; ``sampler_kwargs`` adds to them."""
    from omegaconf import OmegaConf

    rollout, sampler = config.actor_rollout_ref.rollout, config.trainer.v1.sampler
    given: Any = OmegaConf.to_container(sampler.sampler_kwargs, resolve=True)
    sampling = {name: rollout[name] for name in ("temperature", "top_p", "top_k") if rollout[name] != -1}
    threshold, save_freq = sampler.max_off_policy_threshold, config.trainer.save_freq
    # The folder of the models stays the same when a training is restarted.
    folder = hashlib.sha256(str(Path(config.trainer.default_local_dir).absolute()).encode()).hexdigest()
    return {
        "name": f"verl-{folder[:12]}",
        "num_epoch": NUM_EPOCHS,
        "max_tokens": rollout.response_length,
        "sampling_params": {"max_tokens": rollout.response_length, **sampling},
        "tokenizer_path": config.actor_rollout_ref.model.path,
        "max_buffer_size": 2 * config.data.train_batch_size * rollout.n,
        # verl counts the versions that a prompt spans, and so 1 for what has the newest weights.
        **({} if threshold is None else {"max_staleness": threshold - 1}),
        # Every step is a checkpoint, and verl may return to the model before the one that it is saving.
        **({"keep_checkpoints": 2 * save_freq + 2} if save_freq > 0 else {}),
        **{name: value for name, value in given.items() if name != "url"},
        "remote_engine_url": [f"http://{address}" for address in addresses],
        "group_size": rollout.n,
    }
