"""Evaluations beside a training run: what its start declares, and the start of each evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from forebay.core.errors import InvalidInput
from forebay.core.starts.run_start import EVALUATION_FIELDS, OF_ONE_START

GROUP_SIZES = frozenset({"group_size", "num_repeat_per_sample"})
LIMITS = frozenset({"max_tokens", "max_completion_tokens"})
HINTS = {
    "evaluate": 'it looks like {"tasks": {"aime": {"input_file": "aime.jsonl"}}, "every": 10}',
    "evaluate.tasks": 'give --evaluate FILE, or an object by name: {"aime": {"input_file": "aime.jsonl"}}',
}


class Evaluate(BaseModel):
    """The evaluations of a training run."""

    # A misspelt field would otherwise be ignored silently.
    model_config = ConfigDict(frozen=True, extra="forbid")

    tasks: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,32}$")], dict[str, Any]] = Field(min_length=1)
    """By name: the fields of a start in which the evaluation differs from the training run."""
    every: int | None = Field(default=None, ge=1)
    """The server evaluates all tasks at every Nth checkpoint; None for only on request."""
    on_update: Literal["finish", "hold"] = "finish"
    """Whether a weight update stops the evaluations in progress, or waits for them."""
    hold_s: float = Field(default=60.0, gt=0, le=600)
    """Maximum seconds that a weight update waits with ``hold``."""

    @model_validator(mode="after")
    def _tasks_are_starts(self) -> Self:
        for name, fields in self.tasks.items():
            if wrong := sorted(OF_ONE_START & fields.keys()):
                raise ValueError(f"task {name!r} cannot set {wrong[0]}, which belongs to the training run")
        return self

    def payload(self, training: Mapping[str, Any], task: str) -> dict[str, Any]:
        """The start payload of an evaluation of the run that was started with ``training``. Raises ``InvalidInput``."""
        own = self.tasks[task]
        # The training's concurrency is not inherited: an evaluation uses what the engines have left.
        replaced = OF_ONE_START | {"num_process"} | (GROUP_SIZES if GROUP_SIZES & own.keys() else set())
        kept = {name: value for name, value in training.items() if name not in replaced}
        inherited, params = _sampling(training), _sampling(own)
        if LIMITS & (own.keys() | params.keys()):  # the training's would win
            inherited = {name: value for name, value in inherited.items() if name not in LIMITS}
        return {**kept, **EVALUATION_FIELDS, **own, "sampling_params": inherited | params}


def _sampling(fields: Mapping[str, Any]) -> dict[str, Any]:
    params = fields.get("sampling_params") or {}
    if not isinstance(params, dict):
        raise InvalidInput(f"sampling_params must be an object (got {params!r:.100})", field="sampling_params")
    return params


@dataclass(frozen=True, slots=True)
class Evaluates:
    """What a run evaluates."""

    run_id: str
    """The training run."""
    task: str
    step: int
    """The training step."""
    weight_version: int | None
    """The announced version whose rollouts count; None if the trainer announces none."""
    is_undone: bool = False
    """Whether the trainer has rewound to before the step."""
