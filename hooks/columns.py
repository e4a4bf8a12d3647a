"""The built-in answers for a group whose index columns are enough: the same numbers as ``defaults``, without items."""

from collections.abc import Sequence
from functools import lru_cache

from forebay.core.run import Normaliser
from forebay.hooks.arithmetic import num_copies, share, valid_advantages
from forebay.hooks.types import Contract, Processed, Row, Sizes, Verdict


def judge(rewards: Sequence[float], sizes: Sizes, contract: Contract) -> Verdict:
    """What ``is_valid_group`` answers."""
    if contract == "B":
        is_valid = len(rewards) >= sizes.group_size
    else:
        is_valid = len(rewards) >= sizes.min_valid_group_size and min(rewards) != max(rewards)
    return Verdict(is_valid, is_valid)


def process(
    rewards: Sequence[float], rollout_ids: Sequence[str], sizes: Sizes, contract: Contract, normaliser: Normaliser
) -> Processed:
    """What filter, normalise and pad make of a group (A), or transform (B), out of the columns of a ``HookInput``."""
    is_forked = len(set(rollout_ids)) < len(rollout_ids)
    return _process(tuple(rewards), tuple(rollout_ids) if is_forked else (), sizes, contract, normaliser)


@lru_cache(maxsize=1_024)
def _process(
    rewards: Sequence[float], rollout_ids: Sequence[str], sizes: Sizes, contract: Contract, normaliser: Normaliser
) -> Processed:
    """Kept for the next groups: where rewards are 0 or 1, many have the same ones in the same order."""
    if contract == "B":
        rows = [Row(n, reward, None, None) for n, reward in enumerate(rewards)]
        return Processed(rows, len(rows), is_filtered=False)
    kept = [n for n, reward in enumerate(rewards) if 0 <= reward <= 1]
    if len(kept) < sizes.min_valid_item_size:
        return Processed([], len(kept), is_filtered=True)
    if len(kept) < len(rewards):
        rewards = [rewards[n] for n in kept]
        rollout_ids = [rollout_ids[n] for n in kept] if rollout_ids else ()
    made = valid_advantages(rewards, rollout_ids, normaliser)
    rows = [Row(n, made[place], rewards[place], None) for place, n in enumerate(kept)]
    return Processed(_padded(rows, sizes.group_size), len(kept), is_filtered=False)


def _padded(rows: list[Row], group_size: int) -> list[Row]:
    if not rows or len(rows) == group_size:
        return rows
    copies = num_copies(len(rows), group_size)
    shared = [
        Row(row.source, share(row.reward or 0.0, len(rows), group_size, num), row.raw_reward, None)
        for row, num in zip(rows, copies, strict=True)
    ]
    return shared + [shared[n % len(rows)] for n in range(max(0, group_size - len(rows)))]
