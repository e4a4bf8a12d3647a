"""What of slime our function meets, with the fields and checks of the real one.

Looked at in THUDM/slime: ``slime/utils/types.py`` at 0d234f3e (and ``Sample.rollout_id``, which later ones have),
``slime/rollout/base_types.py`` at 2bdd8de2, ``slime/ray/rollout.py`` at a51f0714, ``train.py`` at 1651b26e,
``train_async.py`` at d29976de, ``slime/rollout/data_source.py`` at 018ff18f, ``slime/rollout/sglang_rollout.py`` at
0044b40d, ``slime_plugins/rollout_buffer/rollout_buffer_example.py`` at 23113228.
"""

import sys
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


@dataclass
class Sample:
    """``slime.utils.types.Sample``, without what concerns teachers."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None

    def get_reward_value(self, args: Any) -> Any:
        return self.reward if not args.reward_key else self.reward[args.reward_key]  # type: ignore[index]


@dataclass
class RolloutFnTrainOutput:
    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def modules() -> dict[str, ModuleType]:
    """For ``sys.modules``."""
    made = {name: ModuleType(name) for name in ("slime", "slime.utils", "slime.rollout")}
    types, base_types = ModuleType("slime.utils.types"), ModuleType("slime.rollout.base_types")
    types.__dict__["Sample"] = Sample
    base_types.__dict__.update(RolloutFnTrainOutput=RolloutFnTrainOutput, RolloutFnEvalOutput=RolloutFnEvalOutput)
    return made | {types.__name__: types, base_types.__name__: base_types}


def install() -> None:
    sys.modules.update(modules())


def arguments(url: str, **changes: Any) -> Any:
    """The arguments that our function looks at, as slime's command line has them."""
    given = {
        "rollout_buffer_url": url,
        "rollout_task_type": "idle",
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "global_batch_size": 4,
        "prompt_data": None,
        "num_epoch": None,
        "num_rollout": 6,
        "start_rollout_id": 0,
        "save": None,
        "save_interval": 2,
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": 9,
        "rollout_max_response_len": 32,
        "rollout_temperature": 0.8,
        "rollout_top_p": 1.0,
        "hf_checkpoint": "no-model",
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "reward_key": None,
        "log_passrate": False,
        "n_samples_per_eval_prompt": 1,
    }
    return SimpleNamespace(**{**given, **changes})


class DataSource:
    """``RolloutDataSourceWithBuffer``: our function must not need more of it than that it is there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, rollout_id: int) -> None:
        (self._folder / f"global_dataset_state_dict_{rollout_id}.pt").write_text("")


def train_data(args: Any, output: RolloutFnTrainOutput) -> dict[str, list[Any]]:
    """``RolloutManager._get_rollout_data`` and ``_convert_samples_to_train_data``, with what they assert."""
    assert isinstance(output, RolloutFnTrainOutput)
    assert all(len(group) == args.n_samples_per_prompt for group in output.samples)
    samples: Any = output.samples
    while isinstance(samples[0], list):
        for siblings in samples if isinstance(samples[0][0], Sample) and samples is not output.samples else ():
            assert len({sample.rollout_id for sample in siblings}) == 1, "siblings share a rollout_id"
        samples = list(chain.from_iterable(samples))
    num_rollouts = len({sample.rollout_id for sample in samples})
    assert num_rollouts >= args.global_batch_size, f"num_rollouts ({num_rollouts}) < {args.global_batch_size}"
    assert num_rollouts % args.global_batch_size == 0, "slime would trim them"
    for sample in samples:
        assert len(sample.loss_mask or []) == sample.response_length
        assert 0 < sample.response_length < len(sample.tokens)
    data = {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [sample.get_reward_value(args) for sample in samples],
        "raw_reward": [sample.metadata["raw_reward"] for sample in samples],
        "truncated": [int(sample.status == Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": [sample.rollout_id for sample in samples],
        "loss_masks": [sample.loss_mask for sample in samples],
    }
    if "round_number" in samples[0].metadata:
        data["round_number"] = [sample.metadata["round_number"] for sample in samples]
    if samples[0].rollout_log_probs is not None:
        data["rollout_log_probs"] = [sample.rollout_log_probs for sample in samples]
        for sample in samples:
            assert len(sample.rollout_log_probs or []) == sample.response_length
    return data
