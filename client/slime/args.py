"""What slime's arguments mean to Forebay."""

import hashlib
import os
from pathlib import Path
from typing import Any, TypeAlias

from forebay.client.trainer.buffer_client import DEFAULT_URL
from forebay.core.errors import InvalidInput

SlimeArgs: TypeAlias = Any
"""The namespace of slime's command line; which arguments there are depends on slime's version."""

NUM_EPOCHS = 3
"""As slime's own client has it where the command line says nothing."""
NUM_PROCESSES = 100


def buffer_url(args: SlimeArgs) -> str:
    """Where Forebay listens: ``--rollout-buffer-url``, else ``FOREBAY_URL``."""
    return str(
        _first(args, "rollout_buffer_url", "agent_rollout_buffer_url") or os.environ.get("FOREBAY_URL", DEFAULT_URL)
    )


def run_name(args: SlimeArgs) -> str:
    """The name under which a training finds its run again: ``rollout_buffer_name``, else made of ``--save``."""
    if name := _first(args, "rollout_buffer_name"):
        return str(name)
    # Where models are saved is what stays the same when a training is started again.
    folder = _first(args, "save")
    return f"slime-{hashlib.sha256(str(Path(folder).absolute()).encode()).hexdigest()[:12]}" if folder else "slime"


def start_fields(args: SlimeArgs) -> dict[str, Any]:
    """The fields of a start, as slime's own client fills them; ``rollout_buffer_settings`` adds to them."""
    return {
        "num_process": _first(args, "rollout_num_process") or NUM_PROCESSES,
        "num_epoch": _first(args, "num_epoch") or NUM_EPOCHS,
        "remote_engine_url": f"http://{args.sglang_router_ip}:{args.sglang_router_port}",
        "max_tokens": args.rollout_max_response_len,
        "sampling_params": {
            "max_tokens": args.rollout_max_response_len,
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
        },
        "tokenizer_path": args.hf_checkpoint,
        "keep_checkpoints": _checkpoints_to_keep(args),
        "input_file": args.prompt_data,
        **_limits(args),
        **_settings(args),  # in the middle: what follows must agree with slime's own idea of the run
        "task_type": args.rollout_task_type,
        "group_size": args.n_samples_per_prompt,
        "name": run_name(args),
    }


def check_args(args: SlimeArgs) -> None:
    """Raise ``InvalidInput`` if slime will ask for what no sample has: arrays with an item for each token."""
    if _first(args, "rollout_top_p") not in (None, 1.0):
        option, needed = "--rollout-top-p", "the tokens that top-p left to choose from"
    elif _first(args, "use_rollout_routing_replay"):
        option, needed = "--use-rollout-routing-replay", "the experts"
    else:
        return
    raise InvalidInput(
        f"with {option} slime needs {needed} for each token, which samples from Forebay do not have yet",
        hint="leave the option out",
        field=option,
    )


def shares_gpus(args: SlimeArgs) -> bool:
    """Whether engines and trainer take turns on the same GPUs."""
    return bool(_first(args, "colocate"))


def _limits(args: SlimeArgs) -> dict[str, Any]:
    """How far the generator may run ahead of the training."""
    if shares_gpus(args):  # slime waits until the engine is idle, which nothing else brings about
        # As slime itself: no rollout goes on under other weights, unless partial ones are asked for.
        leftover = "keep" if _first(args, "partial_rollout") else "defer"
        return {"oversampling": {"groups_per_step": args.rollout_batch_size, "leftover": leftover}}
    return {"max_buffer_size": 2 * args.rollout_batch_size * args.n_samples_per_prompt}


def _checkpoints_to_keep(args: SlimeArgs) -> int | None:
    # Every rollout is a checkpoint. slime may go back to the model before the one that it is just saving, and has
    # fetched one rollout early: none older is ever asked for.
    interval = _first(args, "save_interval")
    return 2 * int(interval) + 2 if interval else None


def _settings(args: SlimeArgs) -> dict[str, Any]:
    given = _first(args, "rollout_buffer_settings") or {}
    if not isinstance(given, dict):
        raise InvalidInput(
            f"rollout_buffer_settings are fields of a start, got {given!r}",
            hint="write them as a mapping into the file of slime's --custom-config-path",
            field="rollout_buffer_settings",
        )
    return given


def does_slime_normalise(args: SlimeArgs) -> bool:
    """Whether rewards are to go to slime as they are: it makes advantages of them unless its arguments say no."""
    return bool(getattr(args, "rewards_normalization", True))


def _first(args: SlimeArgs, *names: str) -> Any:
    return next((value for name in names if (value := getattr(args, name, None)) is not None), None)
