"""Rows as records of verl's TransferQueue: one for each row, with the tokens that the engine sampled."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from forebay.client.model import Batch, Row
from forebay.client.slime.tokens import response_start
from forebay.client.tensors.batch_groups import SlotGroup, SlotRow, groups_by_slot
from forebay.client.tensors.ragged import torch_module
from forebay.client.trainer.marked_steps import Unusable
from forebay.client.trainer.read_arrays import shown_images
from forebay.core.errors import InvalidInput
from forebay.core.outcome import reward_parts_of
from forebay.core.parts import numpy_module


@dataclass(frozen=True, slots=True)
class VerlRecord:
    """A row as verl stores it."""

    key: str
    """``{group}_{session}_{index}``. verl splits it at the underscores, of which a group's id has none."""
    fields: dict[str, Any]
    """One-dimensional tensors, by token of the response or of the whole sample, and plain values."""
    tag: dict[str, Any]
    """Lengths and weight versions."""


def groups_of(batch: Batch, step: int, max_tokens: int) -> list[list[VerlRecord] | Unusable]:
    """The groups of a batch read with tensors, for verl's training step ``step``.

    A group is unusable if a sample of it has more than ``max_tokens`` tokens, or lacks what verl trains on.
    """
    groups: list[list[VerlRecord] | Unusable] = []
    for group in groups_by_slot(batch):
        try:
            groups.append(list(_records(group, step, max_tokens)))
        except InvalidInput as error:
            groups.append(Unusable(group.instance_id, str(error)))
    return groups


def _records(group: SlotGroup, step: int, max_tokens: int) -> Iterator[VerlRecord]:
    # A failed slot has no session: a copy in its place would count twice in verl's baseline.
    for session, (main, *forks) in enumerate(group.slots):
        # verl gives all rows of a session the advantage of its last one.
        for index, item in enumerate([*forks, main]):
            _check(item, max_tokens)
            yield _record(f"{group.group_id}_{session}_{index}", item, step)


def _check(item: SlotRow, max_tokens: int) -> None:
    name, num_tokens = f"sample {item.row['uid']!r}", len(item.arrays.ids)
    if not 2 <= num_tokens <= max_tokens:
        raise InvalidInput(f"{name} has {num_tokens} tokens, not from 2 to {max_tokens}", field="tokens")
    if not item.arrays.is_scored:
        raise InvalidInput(f"{name} has no logprobs", field="logprobs")
    if not isinstance(item.row.get("raw_reward"), int | float):
        raise InvalidInput(f"{name} has no reward", field="raw_reward")
    if next(shown_images(item.row["messages"]), None) is not None:
        raise InvalidInput(f"{name} shows an image, without the features that verl's model needs", field="messages")


def _record(key: str, item: SlotRow, step: int) -> VerlRecord:
    numpy, torch = numpy_module(), torch_module()
    row, arrays = item.row, item.arrays
    start = response_start(arrays.loss_mask, arrays.response_length)
    ids = torch.from_numpy(arrays.ids.astype(numpy.int64))
    mask = torch.from_numpy(arrays.loss_mask[start:].astype(numpy.int64))
    logprobs = torch.from_numpy(arrays.logprobs[start:].astype(numpy.float32))
    rewards = torch.zeros(len(mask))
    # Raw, since verl normalises. On the last trained token: an estimator by token ignores those that the mask excludes.
    rewards[int(mask.nonzero()[-1]) if mask.any() else -1] = float(row["raw_reward"])
    fields = {
        "uid": key.partition("_")[0],
        "prompts": ids[:start],
        "responses": ids[start:],
        "input_ids": ids,
        "position_ids": torch.arange(len(ids)),
        "response_mask": mask,
        "loss_mask": mask,
        "rollout_log_probs": torch.where(mask.bool(), logprobs, 0.0),  # NaN for tokens that were not sampled
        "rm_scores": rewards,
        "num_turns": sum(message.get("role") != "system" for message in row["messages"]),
        "multi_modal_inputs": {},
        "extra_fields": {
            "sample_uid": row["uid"],
            "instance_id": row["instance_id"],
            "reward_extra_info": reward_parts_of(row),
        },
    }
    return VerlRecord(key, fields, _tag(row, len(ids), start, step))


def _tag(row: Row, num_tokens: int, prompt_length: int, step: int) -> dict[str, Any]:
    given = [row.get("weight_version"), *(row.get("weight_versions") or ())]
    # verl needs integers: a sample without a version counts as made by the weights of this step.
    versions = [version for version in given if type(version) is int] or [step - 1]  # type(): bool is an int
    return {
        "status": "success",
        "seq_len": num_tokens,
        "prompt_len": prompt_length,
        "response_len": num_tokens - prompt_length,
        "global_steps": step,
        "min_global_steps": min(versions),
        "max_global_steps": max(versions),
    }
