"""The built-in behaviour, implemented once on columns: rewards, rollout ids, forks.

If all hooks are built in, ``judge`` and ``process`` answer for a whole group without decoding bodies. Together with
users' hooks, ``Defaults`` is a plugin like any other, called last: it extracts the columns from the items and writes
the answers back. The results equal those of slime's rollout buffer (contract A: the version of July 2025, B: 2026).
"""

import copy
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, TypeVar

from forebay.core.group import SLIME_REWARD_RANGE, Normaliser, RewardRange
from forebay.core.ids import InstanceId
from forebay.core.sample import fork_number, rollout_id
from forebay.hooks import advantages
from forebay.hooks.advantages import Padding
from forebay.hooks.contract import ContractChoice
from forebay.hooks.specs import hookimpl
from forebay.hooks.types import Contract, Group, HookInput, Item, Processed, Row, Sizes, Verdict

T = TypeVar("T")


def judge(rewards: Sequence[object], sizes: Sizes, contract: Contract) -> Verdict:
    """Decide ``is_valid_group``. A: enough samples, and rewards that are not all equal. B: no slot is empty.

    An invalid group is never finished, because more samples may arrive.
    """
    if contract == "B":
        is_valid = len(rewards) >= sizes.group_size
    else:
        differ = any(reward != rewards[0] for reward in rewards)
        is_valid = len(rewards) >= sizes.min_valid_group_size and differ
    return Verdict(is_valid, is_finished=is_valid)


def process(
    group: HookInput,
    sizes: Sizes,
    contract: Contract,
    normaliser: Normaliser,
    reward_range: RewardRange | None = SLIME_REWARD_RANGE,
) -> Processed:
    """Filter, normalise and pad a group (A), or transform it (B).

    The result is shared with other groups and must not be changed.
    """
    # Forks of one rollout count together, so the result depends on more than the rewards.
    ids, forks = group.rollout_ids, group.forks if any(group.forks) else []
    if not forks and (not any(ids) or len(set(ids)) == len(ids)):
        return _process_unrelated(tuple(group.rewards), sizes, contract, normaliser, reward_range)
    return _process(group.rewards, ids, forks, sizes, contract, normaliser, reward_range)


@lru_cache(maxsize=1_024)
def _process_unrelated(
    rewards: Sequence[float],
    sizes: Sizes,
    contract: Contract,
    normaliser: Normaliser,
    reward_range: RewardRange | None,
) -> Processed:
    # No two samples belong to one rollout. Worth caching, because rewards of 0 and 1 have few different orders.
    return _process(list(rewards), [], [], sizes, contract, normaliser, reward_range)


def _process(
    rewards: list[float],
    rollout_ids: list[str],
    forks: list[int],
    sizes: Sizes,
    contract: Contract,
    normaliser: Normaliser,
    reward_range: RewardRange | None,
) -> Processed:
    if contract == "B":
        rows = [Row(n, reward, None, None) for n, reward in enumerate(rewards)]
        return Processed(rows, len(rows), is_filtered=False)
    num_all = advantages.num_rollouts(rollout_ids, forks) if forks else len(rewards)
    kept = [n for n, reward in enumerate(rewards) if advantages.is_valid_reward(reward, reward_range)]
    if len(kept) < len(rewards):
        rewards, rollout_ids, forks = _picked(rewards, kept), _picked(rollout_ids, kept), _picked(forks, kept)
    num_kept = advantages.num_rollouts(rollout_ids, forks) if forks else len(kept)
    if num_kept < sizes.min_valid_item_size:
        return Processed([], num_kept, is_filtered=True, is_out_of_range=num_all >= sizes.min_valid_item_size)
    made = advantages.valid_advantages(rewards, rollout_ids, normaliser)
    # The usual case: nothing to pad, and every share would be scaled by 1.
    if num_kept == sizes.group_size:
        rows = [Row(n, made[place], rewards[place], None) for place, n in enumerate(kept)]
        return Processed(rows, num_kept, is_filtered=False)
    padding = Padding.of(rollout_ids or [""] * num_kept, forks or [0] * num_kept, sizes.group_size)
    shares = padding.shares(made)
    rows = [Row(kept[place], shares[place], rewards[place], None) for place in (*range(len(kept)), *padding.added)]
    return Processed(rows, num_kept, is_filtered=False)


def _picked(column: list[T], places: Sequence[int]) -> list[T]:
    return [column[place] for place in places] if column else column


def meta_info(num_groups: int, num_samples: int, rewards: Iterable[object]) -> dict[str, Any]:
    """Return slime's ``meta_info`` without ``finished_groups``; ``reward_std`` is the population deviation.

    Rewards that are not numbers are left out. Without any numbers, the statistics are 0.
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


class Defaults:
    """Implements every read hook, for items with a body and for items with index columns only."""

    def __init__(
        self,
        choice: ContractChoice,
        normaliser: Normaliser = "grpo",
        reward_range: RewardRange | None = SLIME_REWARD_RANGE,
    ) -> None:
        self._choice = choice
        self._normaliser = normaliser
        self._reward_range = reward_range

    @hookimpl(trylast=True)
    def get_group_data_meta_info(self, temp_data: dict[InstanceId, list[Item]]) -> dict[str, Any]:
        """Return counts of samples and groups, and statistics of their rewards."""
        rewards = (item.get("reward") for items in temp_data.values() for item in items)
        return meta_info(len(temp_data), sum(map(len, temp_data.values())), rewards)

    @hookimpl(trylast=True)
    def is_valid_group(self, group: Group, group_size: int, min_valid_group_size: int) -> tuple[bool, bool]:
        """Decide by contract. A: enough samples, and rewards that are not all equal. B: one sample per slot."""
        sizes = Sizes(group_size, min_valid_group_size, min_valid_item_size=0)
        verdict = judge([item.get("reward") for item in group[1]], sizes, self._choice.current)
        return verdict.is_valid, verdict.is_finished

    @hookimpl(trylast=True)
    def filter_item(self, item: Item) -> bool:
        """Keep an item that has an instance, a list of messages, and a reward within the run's ``reward_range``."""
        return (
            "instance_id" in item
            and isinstance(item.get("messages"), list)
            and advantages.is_valid_reward(item.get("reward"), self._reward_range)
        )

    @hookimpl(trylast=True)
    def normalize_group_data(self, group: Group) -> Group:
        """Replace each reward by its advantage under the run's normaliser, and keep the original in ``raw_reward``."""
        items = group[1]
        rewards = [item.get("reward") for item in items]
        rollout_ids, _ = columns_of(items)
        made = advantages.advantages(rewards, rollout_ids, self._normaliser, self._reward_range)
        for item, raw, advantage in zip(items, rewards, made, strict=True):
            item["reward"] = advantage
            item["raw_reward"] = raw
        return group

    @hookimpl(trylast=True)
    def pad_group_data(self, group: Group, group_size: int) -> Group:
        """Scale rewards by ``group_size / kept`` and copy rows in arrival order until there are ``group_size``.

        An original shares its reward equally with its copies, so the sum over all rows is the scaled sum over the kept
        rows. Forks are neither counted nor copied.
        """
        instance_id, items = group
        padding = Padding.of(*columns_of(items), group_size)
        if not items or padding.num_kept == group_size:
            return group
        shares = padding.shares([item.get("reward") for item in items])
        for item, share in zip(items, shares, strict=True):
            if "reward" in item:  # a user's filter may keep items without one
                item["reward"] = share
        # Deep copies, because a later plugin may change one row and not the other.
        return instance_id, items + [copy.deepcopy(items[place]) for place in padding.added]

    @hookimpl(trylast=True)
    def transform_group(self, group: Group) -> Group:
        """Return the group unchanged."""
        return group


_foreign_ids: ContextVar[Collection[str]] = ContextVar("_foreign_ids", default=())


@contextmanager
def foreign_ids(rollout_ids: Collection[str]) -> Iterator[None]:
    """Inside this context, ignore these values of ``rollout_id``, which unregistered writers use differently."""
    token = _foreign_ids.set(rollout_ids)
    try:
        yield
    finally:
        _foreign_ids.reset(token)


def columns_of(items: Sequence[Item]) -> tuple[list[str], list[int]]:
    """Return the rollout id of each item, and the number of its fork."""
    foreign = _foreign_ids.get()
    rollout_ids = [rollout_id(item.get("rollout_id")) for item in items]
    rollout_ids = ["" if rollout in foreign else rollout for rollout in rollout_ids] if foreign else rollout_ids
    forks = [
        (fork_number(item.get("fork")) or 0) if rollout else 0 for item, rollout in zip(items, rollout_ids, strict=True)
    ]
    return rollout_ids, forks
