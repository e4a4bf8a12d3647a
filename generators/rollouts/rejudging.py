"""Asking a reward function about recorded rollouts: ``rewards: "again"``, and ``forebay compare --reward``."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from forebay.core.backoff import Backoff
from forebay.core.outcome import RolloutOutcome
from forebay.core.reward_place import set_reward
from forebay.core.task_row import TaskRow
from forebay.generators.rewards import Rewarder, RewardFunc, RewardOutcome
from forebay.generators.rollouts.replayed_samples import ReplayedRollout, ReplayedSample
from forebay.generators.rollouts.samples import Returned, judge_error
from forebay.replay.errors import FolderNotRecorded, NotRecorded

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0


class Rejudge:
    """Gives recorded rollouts the reward that ``rewarder`` tells now; ``at_once`` of them at a time.

    A judge that fails is asked again ``num_retries`` times. A rollout without a reward has failed then, as ever.
    """

    def __init__(self, rewarder: Rewarder, *, num_retries: int, at_once: int) -> None:
        self._rewarder = rewarder
        self._num_retries = num_retries
        self.at_once = at_once
        self._places = asyncio.Semaphore(at_once)

    async def judged(self, rollout: ReplayedRollout, row: TaskRow) -> ReplayedRollout:
        """The same rollout with the reward of now, or without its forks as one whose judge failed."""
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
    """The samples of a rollout, and what its reward function said; None where there was nothing to be asked about."""

    samples: tuple[ReplayedSample, ...]
    outcome: RewardOutcome | None


async def judged_again(
    samples: Sequence[ReplayedSample], row: TaskRow | None, ask: Callable[[dict[str, Any]], Awaitable[RewardOutcome]]
) -> JudgedAgain:
    """The samples of a rollout, the main one last, with the reward that ``ask`` tells for its item.

    A rollout without one now is its main sample alone, which has failed. One that had failed before there was anything
    to judge stays as it is. Without ``row``, so much of it is used as the sample has in ``extra_info``. Nobody is asked
    about one whose reward function was given what was not recorded: it has failed.
    """
    main = samples[-1]
    if main.record.reward is None and main.record.rollout_outcome != RolloutOutcome.JUDGE_FAILURE:
        return JudgedAgain(tuple(samples), None)
    fields = main.fields
    messages = fields.get("messages")
    returned = Returned(messages if isinstance(messages, list) else [], str(_info(fields).get("finish_reason", "")))
    if not main.record.is_foreign and (returned.messages is not messages or _is_given_lost(fields, row)):
        judged = RewardOutcome(None, NotRecorded.code, "what its reward function was given was not recorded")
    else:
        judged = await ask(_item(main, fields, returned, row))
    if judged.kind or judged.reward is None:
        return JudgedAgain((_failed(main, judged),), judged)
    reward, outcome = judged.reward, returned.outcome
    return JudgedAgain(tuple(_rewarded(each, reward, outcome) for each in samples), judged)


def check_judge(judge: RewardFunc) -> None:
    """Raise ``FolderNotRecorded`` for a judge that looks at what an agent left in its folder: that is not recorded."""
    if getattr(judge, "needs_folder", False):
        raise FolderNotRecorded


def _info(fields: dict[str, Any]) -> dict[str, Any]:
    info = fields.get("extra_info")
    return info if isinstance(info, dict) else {}


def _is_given_lost(fields: dict[str, Any], row: TaskRow | None) -> bool:
    """Whether its rollout may have handed something to the reward function that was too large, or never kept."""
    if "for_reward" in fields:
        return fields["for_reward"] is None
    # Whoever keeps it names the row as well. Without ``row`` the sample is all that there is, whoever made it.
    return "agent" in (info := _info(fields)) or (row is not None and "row" not in info)


def _item(main: ReplayedSample, fields: dict[str, Any], returned: Returned, row: TaskRow | None) -> dict[str, Any]:
    """What the reward function was given then, with the row as it is now."""
    given, info = fields.get("for_reward"), _info(fields)
    return {
        **({**info, "extra_info": info} if row is None else row.fields),
        **(given if isinstance(given, dict) else {}),
        "uid": main.record.uid,
        "instance_id": main.record.instance_id if row is None else row.instance_id,
        "messages": returned.messages,
        "finish_reason": returned.finish_reason,
    }


def _rewarded(sample: ReplayedSample, reward: float, outcome: RolloutOutcome) -> ReplayedSample:
    # The number may be longer or shorter now, and few ask where it is.
    record = msgspec.structs.replace(sample.record, reward=reward, reward_start=0, reward_end=0)
    span = (sample.record.reward_start, sample.record.reward_end)
    has_raw = not isinstance(sample.names().raw_reward, msgspec.UnsetType)
    if span[1] and not has_raw:
        return ReplayedSample(record, b"".join(set_reward(sample.body, span, reward, None)))
    changes: dict[str, Any] = {"reward": reward, **({"raw_reward": reward} if has_raw else {})}
    if sample.record.reward is not None:
        return ReplayedSample(record, sample.edited(changes).body)
    ending = {"status": "completed", "outcome": outcome.value}
    record = msgspec.structs.replace(record, error="", rollout_outcome=outcome.value)
    return ReplayedSample(record, sample.edited(changes | ending, removed=("error",)).body)


def _failed(main: ReplayedSample, judged: RewardOutcome) -> ReplayedSample:
    outcome, error = RolloutOutcome.JUDGE_FAILURE.value, judge_error(judged)
    ending = {"status": "failed", "outcome": outcome, "error": error}
    edited = main.edited(ending, removed=("reward", "raw_reward"))
    about = {"error": error["message"], "rollout_outcome": outcome, "reward_start": 0, "reward_end": 0}
    return ReplayedSample(msgspec.structs.replace(main.record, reward=None, **about), edited.body)
