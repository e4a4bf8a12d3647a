"""The built-in behaviour: a plugin like any other, asked last.

Numbers are those of slime's rollout buffer (contract A: the version of July 2025, B: that of 2026).

The built-in answers for a group whose index columns are enough: the same numbers as ``defaults``, without items.
"""

import copy
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from forebay.core.group import Normaliser
from forebay.core.ids import InstanceId
from forebay.core.sample import fork_number, rollout_id
from forebay.hooks import advantages
from forebay.hooks.advantages import Padding, num_rollouts, share, valid_advantages
from forebay.hooks.contract import ContractChoice
from forebay.hooks.specs import hookimpl
from forebay.hooks.types import Contract, Group, HookInput, Item, Processed, Row, Sizes, Verdict


class Defaults:
    """Answers every read hook. Works on items with a body and on items that have only their index columns."""

    def __init__(self, choice: ContractChoice, normaliser: Normaliser = "grpo") -> None:
        self._choice = choice
        self._normaliser = normaliser

    @hookimpl(trylast=True)
    def get_group_data_meta_info(self, temp_data: dict[InstanceId, list[Item]]) -> dict[str, Any]:
        """Counts of samples and groups, and the statistics of their rewards."""
        rewards = (item.get("reward") for items in temp_data.values() for item in items)
        return meta_info(len(temp_data), sum(map(len, temp_data.values())), rewards)

    @hookimpl(trylast=True)
    def is_valid_group(self, group: Group, group_size: int, min_valid_group_size: int) -> tuple[bool, bool]:
        """A: enough samples, and rewards that are not all equal. B: as many samples as the group has slots.

        A short group that is not valid is not finished either: more samples may come.
        """
        items = group[1]
        if self._choice.current == "B":
            is_valid = len(items) >= group_size
        else:
            is_valid = len(items) >= min_valid_group_size and _differ(items)
        return is_valid, is_valid

    @hookimpl(trylast=True)
    def filter_item(self, item: Item) -> bool:
        """Keep an item that has an instance, a list of messages, and a reward within [0, 1]."""
        return (
            "instance_id" in item
            and isinstance(item.get("messages"), list)
            and advantages.is_valid_reward(item.get("reward"))
        )

    @hookimpl(trylast=True)
    def normalize_group_data(self, group: Group) -> Group:
        """Replace each reward by its advantage, as the run's normaliser says; as it was it goes to ``raw_reward``."""
        items = group[1]
        rewards = [item.get("reward") for item in items]
        rollout_ids, _ = columns_of(items)
        made = advantages.advantages(rewards, rollout_ids, self._normaliser)
        for item, raw, advantage in zip(items, rewards, made, strict=True):
            item["reward"] = advantage
            item["raw_reward"] = raw
        return group

    @hookimpl(trylast=True)
    def pad_group_data(self, group: Group, group_size: int) -> Group:
        """Scale rewards by ``group_size / kept`` and copy rows in arrival order until there are ``group_size``.

        An original shares its reward equally with its copies: the sum over the rows is the sum over the kept ones,
        scaled. Forks are neither counted nor copied.
        """
        instance_id, items = group
        padding = advantages.Padding.of(*columns_of(items), group_size)
        if not items or padding.num_kept == group_size:
            return group
        for item, num in zip(items, padding.copies, strict=True):
            if advantages.is_number(item.get("reward")):
                item["reward"] = advantages.share(item["reward"], padding.num_kept, group_size, num)
        return instance_id, items + [copy.deepcopy(items[place]) for place in padding.added]

    @hookimpl(trylast=True)
    def transform_group(self, group: Group) -> Group:
        """Leave the group as it is."""
        return group


def columns_of(items: Sequence[Item]) -> tuple[list[str], list[int]]:
    """The rollout id of each item, and which fork of the rollout it is."""
    rollout_ids = [rollout_id(item.get("rollout_id")) for item in items]
    forks = [(fork_number(item.get("fork")) or 0) if told else 0 for item, told in zip(items, rollout_ids, strict=True)]
    return rollout_ids, forks


def meta_info(num_groups: int, num_samples: int, rewards: Iterable[object]) -> dict[str, Any]:
    """slime's ``meta_info`` without ``finished_groups``; ``reward_std`` is the population deviation.

    Rewards that are not numbers are left out. Without any, the statistics are 0.
    """
    numbers = [float(reward) for reward in rewards if isinstance(reward, int | float) and advantages.is_number(reward)]
    return {
        "total_samples": num_samples,
        "num_groups": num_groups,
        "avg_group_size": num_samples / num_groups if num_groups else 0,
        "avg_reward": advantages.mean(numbers),
        "reward_std": advantages.deviation(numbers),
        "reward_min": min(numbers, default=0.0),
        "reward_max": max(numbers, default=0.0),
    }


def _differ(items: list[Item]) -> bool:
    return any(item.get("reward") != items[0].get("reward") for item in items)


T = TypeVar("T")


def judge(rewards: Sequence[float], sizes: Sizes, contract: Contract) -> Verdict:
    """What ``is_valid_group`` answers."""
    if contract == "B":
        is_valid = len(rewards) >= sizes.group_size
    else:
        is_valid = len(rewards) >= sizes.min_valid_group_size and min(rewards) != max(rewards)
    return Verdict(is_valid, is_valid)


def process(group: HookInput, sizes: Sizes, contract: Contract, normaliser: Normaliser) -> Processed:
    """What filter, normalise and pad make of a group (A), or transform (B), out of its columns.

    The result is shared with other groups, and not to be changed.
    """
    ids, forks = group.rollout_ids, group.forks if any(group.forks) else []
    if not forks and (not any(ids) or len(set(ids)) == len(ids)):
        return _process_unrelated(tuple(group.rewards), sizes, contract, normaliser)
    return _process(group.rewards, ids, forks, sizes, contract, normaliser)


@lru_cache(maxsize=1_024)
def _process_unrelated(rewards: Sequence[float], sizes: Sizes, contract: Contract, normaliser: Normaliser) -> Processed:
    """For samples of which no two are of one rollout. Kept: rewards of 0 and 1 have few different orders."""
    return _process(list(rewards), [], [], sizes, contract, normaliser)


def _process(
    rewards: list[float],
    rollout_ids: list[str],
    forks: list[int],
    sizes: Sizes,
    contract: Contract,
    normaliser: Normaliser,
) -> Processed:
    if contract == "B":
        rows = [Row(n, reward, None, None) for n, reward in enumerate(rewards)]
        return Processed(rows, len(rows), is_filtered=False)
    kept = [n for n, reward in enumerate(rewards) if 0 <= reward <= 1]
    if len(kept) < len(rewards):
        rewards, rollout_ids, forks = _picked(rewards, kept), _picked(rollout_ids, kept), _picked(forks, kept)
    num_kept = num_rollouts(rollout_ids, forks) if forks else len(kept)
    if num_kept < sizes.min_valid_item_size:
        return Processed([], num_kept, is_filtered=True)
    made = valid_advantages(rewards, rollout_ids, normaliser)
    rows = [Row(n, made[place], rewards[place], None) for place, n in enumerate(kept)]
    if num_kept != sizes.group_size:
        padding = Padding.of(rollout_ids or [""] * num_kept, forks or [0] * num_kept, sizes.group_size)
        rows = _padded(rows, padding, sizes.group_size)
    return Processed(rows, num_kept, is_filtered=False)


def _picked(column: list[T], places: Sequence[int]) -> list[T]:
    return [column[place] for place in places] if column else column


def _padded(rows: list[Row], padding: Padding, group_size: int) -> list[Row]:
    shared = [
        Row(row.source, share(row.reward or 0.0, padding.num_kept, group_size, num), row.raw_reward, None)
        for row, num in zip(rows, padding.copies, strict=True)
    ]
    return shared + [shared[place] for place in padding.added]
