"""Translation of slime's arguments to fields of a start."""

import hashlib
import os
from pathlib import Path
from typing import Any, TypeAlias

from forebay.client.trainer.buffer_client import DEFAULT_URL
from forebay.core.errors import InvalidInput
from forebay.core.starts.asked_arrays import MAX_KEPT

SlimeArgs: TypeAlias = Any
"""The namespace of slime's command line; its arguments depend on slime's version."""

NUM_EPOCHS = 3
"""The default of slime's own client."""
NUM_PROCESSES = 100
ROUTES, MASKS = "routed_experts", "sampling_mask"


def buffer_url(args: SlimeArgs) -> str:
    """Forebay's address: ``--rollout-buffer-url``, else ``FOREBAY_URL``."""
    return str(
        _first(args, "rollout_buffer_url", "agent_rollout_buffer_url") or os.environ.get("FOREBAY_URL", DEFAULT_URL)
    )


def run_name(args: SlimeArgs) -> str:
    """The name by which a restarted training finds its run: ``rollout_buffer_name``, else derived from ``--save``."""
    if name := _first(args, "rollout_buffer_name"):
        return str(name)
    # The folder of the models stays the same when a training is restarted.
    folder = _first(args, "save")
    return f"slime-{hashlib.sha256(str(Path(folder).absolute()).encode()).hexdigest()[:12]}" if folder else "slime"


def start_fields(args: SlimeArgs) -> dict[str, Any]:
    """The fields of a start, set like slime's own client sets them; ``rollout_buffer_settings`` adds to them."""
    arrays = needed_arrays(args)
    return {
        "num_process": _first(args, "rollout_num_process") or NUM_PROCESSES,
        "num_epoch": _first(args, "num_epoch") or NUM_EPOCHS,
        "remote_engine_url": f"http://{args.sglang_router_ip}:{args.sglang_router_port}",
        "max_tokens": args.rollout_max_response_len,
        "sampling_params": {
            "max_tokens": args.rollout_max_response_len,
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
            **({"top_k": args.rollout_top_k} if MASKS in arrays else {}),
        },
        **({"arrays": arrays} if arrays else {}),
        "tokenizer_path": args.hf_checkpoint,
        "keep_checkpoints": _checkpoints_to_keep(args),
        "input_file": args.prompt_data,
        **_limits(args),
        **_settings(args),  # before the fields that must match slime's arguments, so that it cannot override them
        "task_type": args.rollout_task_type,
        "group_size": args.n_samples_per_prompt,
        "name": run_name(args),
    }


def needed_arrays(args: SlimeArgs) -> list[str]:
    """The arrays per token that slime needs with these arguments, as in the field ``arrays`` of a start."""
    routes = [ROUTES] if _first(args, "use_rollout_routing_replay") else []
    return routes + ([MASKS] if _first(args, "rollout_top_p") not in (None, 1.0) else [])


def check_args(args: SlimeArgs) -> None:
    """Raise ``InvalidInput`` if no engine could return the arrays that slime needs."""
    top_k = _first(args, "rollout_top_k")
    if MASKS in needed_arrays(args) and not (isinstance(top_k, int) and 1 < top_k <= MAX_KEPT):
        raise InvalidInput(
            f"with --rollout-top-p, --rollout-top-k must be from 2 to {MAX_KEPT} (got {top_k!r})",
            hint="SGLang does not tell the tokens that top-p alone keeps; --rollout-top-k 4096 changes little",
            field="--rollout-top-k",
        )


def shares_gpus(args: SlimeArgs) -> bool:
    """Whether engines and trainer take turns on the same GPUs."""
    return bool(_first(args, "colocate"))


def _limits(args: SlimeArgs) -> dict[str, Any]:
    """Limits on how far the generator may run ahead of the training."""
    if shares_gpus(args):  # slime waits until the engine is idle, which only a limit per step ensures
        # Like slime itself: no rollout continues under other weights, unless --partial-rollout is set.
        leftover = "keep" if _first(args, "partial_rollout") else "defer"
        return {"oversampling": {"groups_per_step": args.rollout_batch_size, "leftover": leftover}}
    return {"max_buffer_size": 2 * args.rollout_batch_size * args.n_samples_per_prompt}


def _checkpoints_to_keep(args: SlimeArgs) -> int | None:
    # Every rollout is a checkpoint. slime may return to the model before the one it is saving, and fetches one rollout
    # early. It never needs an older checkpoint.
    interval = _first(args, "save_interval")
    return 2 * int(interval) + 2 if interval else None


def _settings(args: SlimeArgs) -> dict[str, Any]:
    given = _first(args, "rollout_buffer_settings") or {}
    if not isinstance(given, dict):
        raise InvalidInput(
            f"rollout_buffer_settings must be a mapping of start fields (got {given!r})",
            hint="write it as a mapping in the file of slime's --custom-config-path",
            field="rollout_buffer_settings",
        )
    return given


def does_slime_normalise(args: SlimeArgs) -> bool:
    """Whether slime normalises rewards itself, as it does by default, and therefore needs raw rewards."""
    return bool(getattr(args, "rewards_normalization", True))


def _first(args: SlimeArgs, *names: str) -> Any:
    return next((value for name in names if (value := getattr(args, name, None)) is not None), None)
