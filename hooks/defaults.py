"""The built-in behaviour: a plugin like any other, asked last.

Numbers are those of slime's rollout buffer (contract A: the version of July 2025, B: that of 2026).
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from forebay.core.ids import InstanceId
from forebay.core.normaliser import Normaliser
from forebay.core.sample import fork_number, rollout_id
from forebay.hooks import arithmetic
from forebay.hooks.contract import ContractChoice
from forebay.hooks.specs import hookimpl
from forebay.hooks.types import Group, Item


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
            and arithmetic.is_valid_reward(item.get("reward"))
        )

    @hookimpl(trylast=True)
    def normalize_group_data(self, group: Group) -> Group:
        """Replace each reward by its advantage, as the run's normaliser says; as it was it goes to ``raw_reward``."""
        items = group[1]
        rewards = [item.get("reward") for item in items]
        rollout_ids, _ = columns_of(items)
        made = arithmetic.advantages(rewards, rollout_ids, self._normaliser)
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
        padding = arithmetic.Padding.of(*columns_of(items), group_size)
        if not items or padding.num_kept == group_size:
            return group
        for item, num in zip(items, padding.copies, strict=True):
            if arithmetic.is_number(item.get("reward")):
                item["reward"] = arithmetic.share(item["reward"], padding.num_kept, group_size, num)
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
    numbers = [float(reward) for reward in rewards if isinstance(reward, int | float) and arithmetic.is_number(reward)]
    return {
        "total_samples": num_samples,
        "num_groups": num_groups,
        "avg_group_size": num_samples / num_groups if num_groups else 0,
        "avg_reward": arithmetic.mean(numbers),
        "reward_std": arithmetic.deviation(numbers),
        "reward_min": min(numbers, default=0.0),
        "reward_max": max(numbers, default=0.0),
    }


def _differ(items: list[Item]) -> bool:
    return any(item.get("reward") != items[0].get("reward") for item in items)
