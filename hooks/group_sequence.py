"""The fixed order in which a read calls the hooks for one group."""

import json
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from itertools import zip_longest

from forebay.core.group import SLIME_REWARD_RANGE, RewardRange
from forebay.core.ids import InstanceId, read_uid
from forebay.core.sample import rollout_id
from forebay.hooks import advantages, answer_checks, defaults
from forebay.hooks.manager import BUILT_IN, HookManager
from forebay.hooks.specs import CONTRACT_HOOKS
from forebay.hooks.types import Contract, Group, Item, Processed, Row, Sizes

_ROW = "row"


@dataclass(slots=True)
class Outcome:
    """The items of a group after the hooks."""

    items: list[Item]
    num_kept: int
    is_filtered: bool
    is_out_of_range: bool = False


def index_items(
    instance_id: InstanceId, rewards: Sequence[float], rollout_ids: Sequence[str], forks: Sequence[int] = ()
) -> list[Item]:
    """Return items of index columns only, for use if all hooks are built in; ``row`` is each item's index."""
    columns = enumerate(zip_longest(rewards, rollout_ids or [""] * len(rewards), forks, fillvalue=0))
    return [
        {"instance_id": instance_id, "reward": reward, "rollout_id": rollout, "fork": fork, "messages": [], _ROW: row}
        for row, (reward, rollout, fork) in columns
    ]


def full_items(bodies: Sequence[bytes]) -> list[Item]:
    """Decode samples. Rewards of true and false become 1 and 0."""
    return [_with_numbers(json.loads(body)) for body in bodies]


def _with_numbers(item: Item) -> Item:
    for name in ("reward", "raw_reward"):
        if isinstance(item.get(name), bool):
            item[name] = float(item[name])
    return item


def uid_of(item: Item) -> str | None:
    """Return the uid of an item in the buffer's form; None if a user's hook left none."""
    uid = item.get("uid")
    try:
        return read_uid(uid) if isinstance(uid, str | int | float) and not isinstance(uid, bool) else None
    except ValueError:
        return None


def foreign_ids(items: Sequence[Item], rollout_ids: Sequence[str]) -> frozenset[str]:
    """Return values of ``rollout_id`` that the buffer does not know, because an unregistered writer set them."""
    written = (rollout_id(item.get("rollout_id")) for item in items)
    return frozenset(name for name, known in zip(written, rollout_ids, strict=False) if name and not known)


def process(
    hooks: HookManager,
    group: Group,
    sizes: Sizes,
    contract: Contract,
    reward_range: RewardRange | None = SLIME_REWARD_RANGE,
    *,
    has_own_filter: bool = False,
) -> Outcome:
    """Filter, normalise and pad (A), or transform (B). Raises ``HookFailed``.

    With ``has_own_filter``, a filter of the file dropped the samples on purpose, whatever their reward.
    """
    if contract == "B":
        items = hooks.transform_group(group)[1]
        return Outcome(items, len(items), is_filtered=False)
    kept, dropped = list[Item](), list[Item]()
    for item in group[1]:
        (kept if hooks.filter_item(item) else dropped).append(item)
    num_kept = advantages.num_rollouts(*defaults.columns_of(kept))
    if num_kept < sizes.min_valid_item_size:
        outside = [item for item in dropped if not advantages.is_valid_reward(item.get("reward"), reward_range)]
        num_otherwise = advantages.num_rollouts(*defaults.columns_of([*kept, *outside]))
        is_out_of_range = not has_own_filter and num_otherwise >= sizes.min_valid_item_size
        return Outcome([], num_kept, is_filtered=True, is_out_of_range=is_out_of_range)
    normalized = hooks.normalize_group_data((group[0], kept))
    padded = hooks.pad_group_data(normalized, sizes.group_size)
    return Outcome(padded[1], num_kept, is_filtered=False)


def index_rows(outcome: Outcome) -> Processed:
    """Return the rows for index items, each pointing to its sample."""
    rows = [Row(item[_ROW], item["reward"], item.get("raw_reward"), None) for item in outcome.items]
    return Processed(rows, outcome.num_kept, outcome.is_filtered, outcome.is_out_of_range)


def full_rows(outcome: Outcome, sources: Sequence[tuple[str | None, int]], hook: str) -> Processed:
    """Return encoded rows of full items. ``sources`` are the samples' uids and numbers of tokens.

    Side arrays of an item with another number of tokens are removed: their rows would belong to other tokens. Errors in
    the encoding name ``hook``.
    """
    # A user's hook may have reordered, copied or created items, so the uid identifies an item's sample.
    order = {uid: row for row, (uid, _) in enumerate(sources) if uid is not None}
    lengths = dict(sources)
    moved = [item for item in outcome.items if item.get("arrays") and lengths.get(uid_of(item)) != num_tokens(item)]
    for item in moved:
        item["arrays"] = None
    rows = [_full_row(_with_numbers(item), order, hook) for item in outcome.items]
    return Processed(rows, outcome.num_kept, outcome.is_filtered, outcome.is_out_of_range, bool(moved))


def num_tokens(item: Item) -> int:
    """Number of tokens of a full item."""
    tokens = item.get("tokens")
    return len(tokens) if isinstance(tokens, Sized) else 0


def _full_row(item: Item, order: dict[str, int], hook: str) -> Row:
    uid = uid_of(item)
    source = None if uid is None else order.get(uid)
    body = answer_checks.encode(hook, item)
    return Row(source, answer_checks.as_reward(item, "reward"), answer_checks.as_reward(item, "raw_reward"), body)


def last_outside(implementations: dict[str, list[str]], contract: Contract) -> str | None:
    """Return the last hook of a contract with an implementation besides the built-in one; None if there is none."""
    outside = [hook for hook in CONTRACT_HOOKS[contract] if implementations[hook] != [BUILT_IN]]
    return outside[-1] if outside else None
