"""Scoring recorded rollouts again, for ``rewards: "again"`` and ``forebay compare --reward``."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from forebay.core.backoff import Backoff
from forebay.core.outcome import RolloutOutcome
from forebay.core.records.reward_place import set_reward
from forebay.core.task_row import TaskRow
from forebay.generators.rewards import Rewarder, RewardFunc, RewardOutcome
from forebay.generators.rollouts.replayed_samples import ReplayedRollout, ReplayedSample
from forebay.generators.rollouts.samples import Returned, judge_error
from forebay.replay.errors import FolderNotRecorded, NotRecorded

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0


class Rejudge:
    """Scores recorded rollouts again with ``rewarder``, at most ``at_once`` at a time.

    A failing reward function is retried ``num_retries`` times. A rollout that still has no reward has failed.
    """

    def __init__(self, rewarder: Rewarder, *, num_retries: int, at_once: int) -> None:
        self._rewarder = rewarder
        self._num_retries = num_retries
        self.at_once = at_once
        self._places = asyncio.Semaphore(at_once)

    async def judged(self, rollout: ReplayedRollout, row: TaskRow) -> ReplayedRollout:
        """Return the rollout with its new reward; if its reward function failed, as failed and without its forks."""
        return replace(rollout, samples=(await judged_again(rollout.samples, row, self._asked)).samples)

    async def _asked(self, item: dict[str, Any]) -> RewardOutcome:
        async with self._places:
            left, pause = self._num_retries, Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
            while True:
                judged = await self._rewarder.reward(item)
                if not judged.kind:
                    return judged
                logger.warning("reward of recorded sample %s: %s: %s", item["uid"], judged.kind, judged.message)
                if not left:
                    return judged
                left -= 1
                await pause.wait()


@dataclass(frozen=True)
class JudgedAgain:
    """The samples of a rollout, and the new reward outcome; None if there was nothing to score."""

    samples: tuple[ReplayedSample, ...]
    outcome: RewardOutcome | None


async def judged_again(
    samples: Sequence[ReplayedSample], row: TaskRow | None, ask: Callable[[dict[str, Any]], Awaitable[RewardOutcome]]
) -> JudgedAgain:
    """Score the samples of a rollout, the main one last, with the reward that ``ask`` returns for its item.

    Without a new reward, only the main sample remains, as failed. Rollouts that failed before they could be scored stay
    unchanged. Without ``row``, the fields of the sample's ``extra_info`` are used. If the input of the reward function
    was not recorded, the rollout fails without calling ``ask``.
    """
    main = samples[-1]
    if main.record.reward is None and main.record.rollout_outcome != RolloutOutcome.JUDGE_FAILURE:
        return JudgedAgain(tuple(samples), None)
    fields = main.fields
    messages = fields.get("messages")
    returned = Returned(messages if isinstance(messages, list) else [], str(_info(fields).get("finish_reason", "")))
    if not main.record.is_foreign and (returned.messages is not messages or _is_given_lost(fields, row)):
        judged = RewardOutcome(None, NotRecorded.code, "the input of its reward function was not recorded")
    else:
        judged = await ask(_item(main, fields, returned, row))
    if judged.kind or judged.reward is None:
        return JudgedAgain((_failed(main, judged),), judged)
    outcome = returned.outcome
    return JudgedAgain(tuple(_rewarded(each, judged.reward, judged.parts, outcome) for each in samples), judged)


def check_judge(judge: RewardFunc) -> None:
    """Raise ``FolderNotRecorded`` if the reward function reads the agent's folder, which is not recorded."""
    if getattr(judge, "needs_folder", False):
        raise FolderNotRecorded


def _info(fields: dict[str, Any]) -> dict[str, Any]:
    info = fields.get("extra_info")
    return info if isinstance(info, dict) else {}


def _is_given_lost(fields: dict[str, Any], row: TaskRow | None) -> bool:
    """Whether the rollout may have passed values to the reward function that were too large or not kept."""
    if "for_reward" in fields:
        return fields["for_reward"] is None
    # Writers that keep `for_reward` also keep the row's digest. Without ``row``, only the sample is available.
    return "agent" in (info := _info(fields)) or (row is not None and "row" not in info)


def _item(main: ReplayedSample, fields: dict[str, Any], returned: Returned, row: TaskRow | None) -> dict[str, Any]:
    """Return the original input of the reward function, with the current row."""
    given, info = fields.get("for_reward"), _info(fields)
    return {
        **({**info, "extra_info": info} if row is None else row.fields),
        **(given if isinstance(given, dict) else {}),
        "uid": main.record.uid,
        "instance_id": main.record.instance_id if row is None else row.instance_id,
        "messages": returned.messages,
        "finish_reason": returned.finish_reason,
    }


def _rewarded(
    sample: ReplayedSample, reward: float, parts: dict[str, float], outcome: RolloutOutcome
) -> ReplayedSample:
    # The number's length may change, and its position is rarely needed, so it is cleared.
    about: dict[str, Any] = {"reward": reward, "reward_parts": parts or None, "reward_start": 0, "reward_end": 0}
    record = msgspec.structs.replace(sample.record, **about)
    span = (sample.record.reward_start, sample.record.reward_end)
    names = sample.names()
    has_raw = not isinstance(names.raw_reward, msgspec.UnsetType)
    if span[1] and not has_raw and not parts and isinstance(names.reward_parts, msgspec.UnsetType):
        return ReplayedSample(record, b"".join(set_reward(sample.body, span, reward, None)))
    changes: dict[str, Any] = {"reward": reward, **({"raw_reward": reward} if has_raw else {})}
    if parts:
        changes["reward_parts"] = parts
    if sample.record.reward is not None:
        return ReplayedSample(record, sample.edited(changes, removed=("reward_parts",)).body)
    ending = {"status": "completed", "outcome": outcome.value}
    record = msgspec.structs.replace(record, error="", rollout_outcome=outcome.value)
    return ReplayedSample(record, sample.edited(changes | ending, removed=("error", "reward_parts")).body)


def _failed(main: ReplayedSample, judged: RewardOutcome) -> ReplayedSample:
    outcome, error = RolloutOutcome.JUDGE_FAILURE.value, judge_error(judged)
    ending = {"status": "failed", "outcome": outcome, "error": error}
    edited = main.edited(ending, removed=("reward", "raw_reward", "reward_parts"))
    about = {"error": error["message"], "rollout_outcome": outcome, "reward_start": 0, "reward_end": 0}
    return ReplayedSample(msgspec.structs.replace(main.record, reward=None, reward_parts=None, **about), edited.body)
