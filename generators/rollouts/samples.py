"""Conversion of a rollout function's result to samples."""

import logging
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from forebay.client.sample_writer.encode_parts import take_parts
from forebay.core.errors import InvalidInput
from forebay.core.ids import InstanceId
from forebay.core.outcome import RolloutOutcome
from forebay.core.parts import Rows
from forebay.core.task_row import Message
from forebay.generators.rewards import RewardOutcome

if TYPE_CHECKING:
    from forebay.client.sample_writer.outbox import Sample
    from forebay.generators.rollouts.open_group import GroupPlan
    from forebay.generators.rollouts.rollout import Rollout

logger = logging.getLogger(__name__)

SampleArrays = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Rows]]]
"""Returns arrays per token of one finished sample by name, for example those of a teacher."""
NOT_IN_EXTRA_INFO = frozenset({"uid", "instance_id", "prompt", "messages", "reward", "extra_info"})
MAX_FOR_REWARD_BYTES = 64 << 10
"""Maximum size of a rollout's ``for_reward`` as JSON for a sample to keep it."""
TRUNCATED_REASONS = frozenset({"length", "max_tokens", "max_turns"})
"""Finish reasons of rollouts that were ended by a limit on tokens or turns."""


class RolloutHead(Protocol):
    """The attributes of a ``Rollout`` that its samples contain."""

    uid: str
    instance_id: InstanceId
    epoch: int
    slot: int
    attempt: int
    rollout_id: str
    prompt: list[Message]


class Unbegun:
    """Sample head of a rollout whose function never ran, or whose worker is gone."""

    def __init__(self, plan: "GroupPlan", uid: str, number: int, slot: int, attempt: int) -> None:
        self.uid, self.slot, self.attempt = uid, slot, attempt
        self.instance_id: InstanceId = plan.row.instance_id
        self.epoch = plan.epoch
        self.rollout_id = f"{plan.group_id}-{number:04x}"
        self.prompt: list[Message] = plan.row.prompt


@dataclass(frozen=True)
class Returned:
    """Result of a rollout function: its messages as plain JSON values, and the finish reason."""

    messages: list[Message]
    finish_reason: str

    @classmethod
    def of(cls, result: object) -> "Returned":
        """Check a rollout function's result. Raises ``InvalidInput``."""
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise InvalidInput(f"rollout_func must return (messages, finish_reason), got {result!r:.200}")
        messages = plain(result[0])
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise InvalidInput(f"rollout_func must return a list of messages first, got {messages!r:.200}")
        return cls(messages, plain(str(result[1])))

    @property
    def outcome(self) -> RolloutOutcome:
        """Outcome of the rollout, provided that it gets a reward."""
        return RolloutOutcome.TRUNCATED if self.finish_reason in TRUNCATED_REASONS else RolloutOutcome.OK


def plain(value: object) -> Any:
    """Convert ``value`` to JSON values; messages of the openai package become objects. Raises ``TypeError``."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=_plain_other))


def _plain_other(value: Any) -> object:
    for name, options in (("model_dump", {"exclude_none": True, "warnings": False}), ("tolist", {})):
        convert = getattr(value, name, None)
        if callable(convert):
            return convert(**options)
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def reward_item(rollout: "Rollout", returned: Returned) -> dict[str, Any]:
    """Return the item for a reward function: the row's fields plus uid, instance, messages and finish reason."""
    return {
        **rollout.row,
        **rollout.for_reward,
        "uid": rollout.uid,
        "instance_id": rollout.instance_id,
        "messages": returned.messages,
        "finish_reason": returned.finish_reason,
    }


def finished_samples(
    rollout: "Rollout", returned: Returned, sampling_params: dict[str, Any], judged: RewardOutcome
) -> "list[Sample]":
    """Return the samples of a completed rollout: its forks, then the main one.

    All have the same reward. Without a reward, there is only the main sample, as failed.
    """
    # A rollout without calls has no turns: its sample contains the returned messages, without tokens.
    *forks, main = rollout.trajectory.sample_fields() or [{}]
    # A recorded conversation with only other models has nothing to train on.
    forks = [fork for fork in forks if not fork.get("token_spans") or 1 in fork["loss_mask"]]
    sample = {**main, **_head(rollout), "messages": returned.messages}
    sample["extra_info"] = _extra_info(rollout, returned, sampling_params)
    if rollout.for_reward:
        sample["for_reward"] = _kept_for_reward(rollout.for_reward)
    if judged.kind:
        error = judge_error(judged)
        return [{**sample, "status": "failed", "outcome": RolloutOutcome.JUDGE_FAILURE.value, "error": error}]
    sample |= {"outcome": returned.outcome.value, "reward": judged.reward, "status": "completed"}
    if judged.parts:
        sample["reward_parts"] = judged.parts
    return _with_forks(sample, forks) if forks else [sample]


async def with_own_arrays(function: SampleArrays, sample: dict[str, Any]) -> dict[str, Any]:
    """Add what ``function`` returns to a sample with tokens. After an error, the sample goes out without it."""
    if not sample.get("tokens"):
        return sample
    try:
        made = _checked(await function(sample))
    except Exception:  # user code may raise anything, and the rollout is paid for
        logger.exception("sample_arrays failed: sample %s is sent without its arrays", sample["uid"])
        return sample
    return {**sample, "arrays": {**sample.get("arrays", {}), **made}}


def _checked(made: Mapping[str, Rows] | None) -> Mapping[str, Rows]:
    """Raise for arrays that the writer would refuse together with their sample."""
    if wrong := sorted(name for name, rows in (made or {}).items() if not isinstance(rows, Rows)):
        raise InvalidInput(f"sample_arrays must return a Rows for each name (got others for {wrong})")
    take_parts({"arrays": made})
    return made or {}


def _kept_for_reward(given: dict[str, Any]) -> dict[str, Any] | None:
    """Return ``given`` without the agent's folder, which will be gone, for later scoring; None if too large."""
    agent = given.get("agent")
    if isinstance(agent, dict):
        given = {**given, "agent": {name: value for name, value in agent.items() if name != "folder"}}
    return given if len(msgspec.json.encode(given)) <= MAX_FOR_REWARD_BYTES else None


def judge_error(judged: RewardOutcome) -> dict[str, str]:
    """Return the ``error`` field of a sample without a reward."""
    return {"type": judged.kind, "message": _sendable(judged.message), "traceback": _sendable(judged.traceback)}


def _with_forks(main: "Sample", forks: list[dict[str, Any]]) -> "list[Sample]":
    # The mark separates the forks of this execution from those of one that ended before its main sample was sent.
    mark = secrets.token_hex(4)
    main = {**main, "rollout_id": f"{main['rollout_id']}-{mark}"}
    made = []
    for number, fork in enumerate(forks, 1):
        extra_info = {**main["extra_info"], "round_number": _num_rounds(fork["messages"])}
        own = {"uid": f"{main['uid']}-f{number}-{mark}", "fork": number, "extra_info": extra_info}
        head, ending = ({name: main[name] for name in names if name in main} for names in (HEAD, ENDING))
        made.append({**fork, **head, **own, **ending})
    return [*made, main]


def failed_sample(rollout: "RolloutHead", error: BaseException, outcome: RolloutOutcome) -> "Sample":
    """Return the sample of a rollout whose last attempt raised ``error``. It has no reward, not a reward of 0."""
    problem = {
        "type": type(error).__name__,
        "message": text_of(error)[:4_000],
        "traceback": _sendable("".join(traceback.format_exception(error)))[-16_000:],
    }
    extra_info = {"finish_reason": "error", "timestamp": str(time.time())}
    ending = {"status": "failed", "outcome": outcome.value, "error": problem}
    return {**_head(rollout), "messages": rollout.prompt, "extra_info": extra_info, **ending}


def text_of(error: BaseException) -> str:
    """Return the text of ``error``, even if its ``__str__``, which may be user code, raises."""
    try:
        return _sendable(str(error))
    except Exception:  # noqa: BLE001 - user code may raise anything
        return "its __str__ raises"


def _sendable(text: str) -> str:
    # Lone surrogates, which file names may contain, are not valid in JSON.
    return text.encode("utf-8", "replace").decode()


HEAD = ("uid", "instance_id", "epoch", "slot", "attempt", "rollout_id")
"""Fields of a sample about its rollout."""
ENDING = ("outcome", "reward", "reward_parts", "status")
"""Fields of a sample about the rollout's ending."""


def _head(rollout: "RolloutHead") -> "Sample":
    return {name: getattr(rollout, name) for name in HEAD}


def _extra_info(rollout: "Rollout", returned: Returned, sampling_params: dict[str, Any]) -> dict[str, Any]:
    """Return ``extra_info`` in slime's format: other row fields, sampling parameters, and the rollout's ending."""
    fields = {name: value for name, value in rollout.row.items() if name not in NOT_IN_EXTRA_INFO}
    # Later entries win: the rollout's own values override the row and the sampling parameters.
    own = rollout.row.get("extra_info")
    counters = {name: number for name, number in rollout.trajectory.counters.items() if number}
    return {
        "row": rollout.row_digest,  # first, so that a row field of this name wins
        **(own if isinstance(own, dict) else {}),
        **fields,
        **sampling_params,
        **rollout.extra_info,
        **({"capture": counters} if counters else {}),
        "rollout_index": 1,
        "timestamp": str(time.time()),
        "round_number": _num_rounds(returned.messages),
        "finish_reason": returned.finish_reason,
    }


def _num_rounds(messages: list[Message]) -> int:
    return sum(1 for message in messages if message.get("role") == "assistant")
