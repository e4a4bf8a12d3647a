"""Rows of a run as TRL's lists of tokens."""

from collections.abc import Iterable
from typing import Any, TypeAlias

from forebay.client.model import Batch
from forebay.client.tensors.batch_groups import SlotGroup, SlotRow, arrays_of_batch, groups_by_slot, rows_of_batch
from forebay.client.trainer.marked_steps import Unusable
from forebay.client.trainer.read_arrays import shown_images
from forebay.core.outcome import reward_parts_of
from forebay.core.parts import numpy_module

TrlRow: TypeAlias = dict[str, Any]
"""``prompt_ids``, ``completion_ids``, ``logprobs``, ``env_mask``, ``raw_reward`` and ``reward_parts`` of one sample."""


def trained_rows(batch: Batch, token_budget: int) -> list[SlotRow] | Unusable:
    """The rows with a token to train on of a batch of one group, or why ``AsyncGRPOTrainer`` cannot use the group."""
    rows = [SlotRow(*each) for each in zip(rows_of_batch(batch), arrays_of_batch(batch)[0], strict=True)]
    # TRL fails on a micro-batch without a token to train on, and drops rows above its budget.
    trained = [item for item in rows if item.arrays.loss_mask[1:].any()]
    if why := _unusable(rows):
        return why
    for item in trained:
        if 0 < token_budget < (num_tokens := len(item.arrays.ids)):
            return _because(item, f"has {num_tokens} tokens, token_budget is {token_budget}")
    return trained or Unusable(batch.group_ids[0], "no sample has a token to train on")


def groups_of(batch: Batch, size: int) -> list[list[TrlRow] | Unusable]:
    """The groups of a batch with exactly ``size`` rows each, one per rollout: forks have no place in them."""
    return [_group(group, size) for group in groups_by_slot(batch)]


def _unusable(rows: Iterable[SlotRow]) -> Unusable | None:
    for item in rows:
        if not item.arrays.is_scored:
            return _because(item, "has no tokens or no logprobs")
        if any(shown_images(item.row.get("messages"))):
            return _because(item, "shows an image, which TRL would not be given")
    return None


def _because(item: SlotRow, why: str) -> Unusable:
    return Unusable(item.row["instance_id"], f"sample {item.row['uid']!r} {why}")


def _group(group: SlotGroup, size: int) -> list[TrlRow] | Unusable:
    mains = [slot[0] for slot in group.slots]
    if len(mains) > size:
        return Unusable(group.instance_id, f"it has {len(mains)} rollouts, num_generations is {size}")
    if why := _unusable(mains):
        return why
    # TRL leaves rows whose reward is None out of the group's baseline, and a masked row out of every loss.
    filler = _row(mains[0], None)
    return [_row(item, item.row.get("raw_reward")) for item in mains] + [filler] * (size - len(mains))


def _row(item: SlotRow, reward: float | None) -> TrlRow:
    ids, mask = item.arrays.ids, item.arrays.loss_mask.astype(bool)
    # The completion begins with the first token that is trained on. The very first token has no prediction.
    start = max(1, int(mask.argmax())) if mask.any() else len(mask) - 1
    return {
        "prompt_ids": ids[:start].tolist(),
        "completion_ids": ids[start:].tolist(),
        "logprobs": numpy_module().where(mask, item.arrays.logprobs, 0.0)[start:].tolist(),
        "env_mask": (mask[start:] & (reward is not None)).astype(int).tolist(),
        "raw_reward": reward,
        "reward_parts": {} if reward is None else reward_parts_of(item.row),
    }
