"""The built-in answers for a group whose index columns are enough: the same numbers as ``defaults``, without items."""

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

from forebay.core.normaliser import Normaliser
from forebay.hooks.arithmetic import Padding, num_rollouts, share, valid_advantages
from forebay.hooks.types import Contract, HookInput, Processed, Row, Sizes, Verdict

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
