"""Asking the reward function about rollouts that were recorded: ``rewards: "again"``."""

import asyncio
import logging
from dataclasses import replace
from typing import Any

import msgspec

from forebay.core.backoff import Backoff
from forebay.core.errors import InvalidInput
from forebay.core.outcome import RolloutOutcome
from forebay.core.reward_place import set_reward
from forebay.core.task_row import TaskRow
from forebay.generators.rewards import Rewarder, RewardFunc, RewardOutcome
from forebay.generators.rollouts.replayed_samples import ReplayedRollout, ReplayedSample
from forebay.generators.rollouts.samples import Returned, judge_error
from forebay.replay.errors import NotRecorded

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0


class Rejudge:
    """Gives recorded rollouts the reward that ``rewarder`` tells now; ``at_once`` of them at a time.

    A judge that fails is asked again ``num_retries`` times. A rollout without a reward has failed then, as ever.
    """

    def __init__(self, rewarder: Rewarder, *, num_retries: int, at_once: int) -> None:
        self._rewarder = rewarder
        self._num_retries = num_retries
        self._places = asyncio.Semaphore(at_once)

    async def judged(self, rollout: ReplayedRollout, row: TaskRow) -> ReplayedRollout:
        """The same rollout with the reward of now, or without its forks as one whose judge failed."""
        record, fields = rollout.main.record, rollout.main.fields
        if record.reward is None and record.rollout_outcome != RolloutOutcome.JUDGE_FAILURE:
            return rollout  # it failed before there was anything to judge
        messages = fields.get("messages")
        returned = Returned(messages if isinstance(messages, list) else [], _finish_reason(fields))
        if returned.messages is not messages or _is_given_lost(fields):
            judged = RewardOutcome(None, NotRecorded.code, "what its reward function was given was not recorded")
        else:
            async with self._places:
                judged = await self._asked(_item(rollout, fields, returned, row))
        if judged.kind or judged.reward is None:
            return replace(rollout, samples=(_failed(rollout.main, judged),))
        reward, outcome = judged.reward, returned.outcome
        return replace(rollout, samples=tuple(_rewarded(each, reward, outcome) for each in rollout.samples))

    async def _asked(self, item: dict[str, Any]) -> RewardOutcome:
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


def check_judge(judge: RewardFunc) -> None:
    """Raise ``InvalidInput`` for a judge that looks at what an agent left in its folder: that is not recorded."""
    if getattr(judge, "needs_folder", False):
        raise InvalidInput(
            "the verifier looks into the folder of the agent, and no recording has that",
            hint="replay with the recorded rewards, or judge by what a reward function finds in its item",
            field="replay.rewards",
        )


def _is_given_lost(fields: dict[str, Any]) -> bool:
    """Whether its rollout had handed something to the reward function that is too large to be kept, or of before."""
    info = fields.get("extra_info")
    is_agents = isinstance(info, dict) and "agent" in info
    return fields.get("for_reward", {} if not is_agents else None) is None


def _item(rollout: ReplayedRollout, fields: dict[str, Any], returned: Returned, row: TaskRow) -> dict[str, Any]:
    """What the reward function was given then, with the row as it is now."""
    given = fields.get("for_reward")
    return {
        **row.fields,
        **(given if isinstance(given, dict) else {}),
        "uid": rollout.main.record.uid,
        "instance_id": row.instance_id,
        "messages": returned.messages,
        "finish_reason": returned.finish_reason,
    }


def _finish_reason(fields: dict[str, Any]) -> str:
    info = fields.get("extra_info")
    return str(info.get("finish_reason", "")) if isinstance(info, dict) else ""


def _rewarded(sample: ReplayedSample, reward: float, outcome: RolloutOutcome) -> ReplayedSample:
    record = msgspec.structs.replace(sample.record, reward=reward)
    span = (sample.record.reward_start, sample.record.reward_end)
    has_raw = not isinstance(sample.names().raw_reward, msgspec.UnsetType)
    if span[1] and not has_raw:
        return ReplayedSample(record, b"".join(set_reward(sample.body, span, reward, None)))
    changes = {"reward": reward, **({"raw_reward": reward} if has_raw else {})}
    ending = {"status": "completed", "outcome": outcome.value}
    return ReplayedSample(record, sample.edited(changes | ending, removed=("error",)).body)


def _failed(main: ReplayedSample, judged: RewardOutcome) -> ReplayedSample:
    ending = {"status": "failed", "outcome": RolloutOutcome.JUDGE_FAILURE.value, "error": judge_error(judged)}
    edited = main.edited(ending, removed=("reward", "raw_reward"))
    return ReplayedSample(msgspec.structs.replace(main.record, reward=None), edited.body)
