"""Making a sample of what a rollout function returned."""

import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from forebay.core.errors import InvalidInput
from forebay.generators.reward_worker import RewardOutcome
from forebay.generators.rows import Message

if TYPE_CHECKING:
    from forebay.generators.rollout import Rollout
    from forebay.generators.writer import Sample

NOT_IN_EXTRA_INFO = frozenset({"uid", "instance_id", "prompt", "messages", "reward", "extra_info"})


@dataclass(frozen=True)
class Trajectory:
    """What a rollout function brought: its messages, as plain JSON values, and why it ended."""

    messages: list[Message]
    finish_reason: str

    @classmethod
    def of(cls, result: object) -> "Trajectory":
        """Check a rollout function's result. Raises ``InvalidInput`` that says what was expected."""
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise InvalidInput(f"rollout_func must return (messages, finish_reason), it returned {result!r:.200}")
        messages = plain(result[0])
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise InvalidInput(f"rollout_func must return a list of messages first, it returned {messages!r:.200}")
        return cls(messages, str(result[1]))


def plain(value: object) -> Any:
    """``value`` as JSON values; messages of the openai package become objects. Raises ``TypeError`` for the rest."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=_plain_other))


def _plain_other(value: Any) -> object:
    for name, options in (("model_dump", {"exclude_none": True, "warnings": False}), ("tolist", {})):
        convert = getattr(value, name, None)
        if callable(convert):
            return convert(**options)
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def reward_item(rollout: "Rollout", trajectory: Trajectory) -> dict[str, Any]:
    """What a reward function is given: the row's fields, ``uid``, ``instance_id``, ``messages``, ``finish_reason``."""
    return {
        **rollout.row,
        "uid": rollout.uid,
        "instance_id": rollout.instance_id,
        "messages": trajectory.messages,
        "finish_reason": trajectory.finish_reason,
    }


def finished_sample(
    rollout: "Rollout", trajectory: Trajectory, sampling_params: dict[str, Any], outcome: RewardOutcome
) -> "Sample":
    """The sample of a rollout that came to its end; failed if it could not be given a reward."""
    sample = {**_head(rollout), **rollout.trace.fields()}
    sample["messages"] = trajectory.messages
    sample["extra_info"] = _extra_info(rollout, trajectory, sampling_params)
    if outcome.kind:
        error = {"type": outcome.kind, "message": _sendable(outcome.message), "traceback": _sendable(outcome.traceback)}
        return {**sample, "status": "failed", "error": error}
    return {**sample, "reward": outcome.reward, "status": "completed"}


def failed_sample(rollout: "Rollout", error: BaseException) -> "Sample":
    """The sample of a rollout whose last attempt raised ``error``: without a reward, which is not a reward of 0."""
    told = {
        "type": type(error).__name__,
        "message": _sendable(str(error))[:4_000],
        "traceback": _sendable("".join(traceback.format_exception(error)))[-16_000:],
    }
    extra_info = {"finish_reason": "error", "timestamp": str(time.time())}
    return {**_head(rollout), "messages": rollout.prompt, "extra_info": extra_info, "status": "failed", "error": told}


def _sendable(text: str) -> str:
    """Half a surrogate pair, as in a file name, is no JSON text."""
    return text.encode("utf-8", "replace").decode()


def _head(rollout: "Rollout") -> "Sample":
    return {
        "uid": rollout.uid,
        "instance_id": rollout.instance_id,
        "epoch": rollout.epoch,
        "slot": rollout.slot,
        "attempt": rollout.attempt,
        "rollout_id": rollout.rollout_id,
    }


def _extra_info(rollout: "Rollout", trajectory: Trajectory, sampling_params: dict[str, Any]) -> dict[str, Any]:
    """In slime's shape: the row's other fields, the sampling parameters, and how the rollout ended."""
    fields = {name: value for name, value in rollout.row.items() if name not in NOT_IN_EXTRA_INFO}
    own = rollout.row.get("extra_info")
    return {
        **(own if isinstance(own, dict) else {}),
        **fields,
        **sampling_params,
        **rollout.extra_info,
        "rollout_index": 1,
        "timestamp": str(time.time()),
        "round_number": sum(1 for message in trajectory.messages if message.get("role") == "assistant"),
        "finish_reason": trajectory.finish_reason,
    }
