"""Conversion of a batch's groups to slime's samples."""

import io
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from itertools import count, groupby
from typing import Any, TypeAlias

from forebay.client.model import Batch, Row
from forebay.client.slime.args import SlimeArgs, does_slime_normalise
from forebay.client.slime.arrays import with_arrays
from forebay.client.slime.tokens import Tokens, arrays_of_row, tokens_of
from forebay.client.tensors.batch_groups import (
    RowArrays,
    arrays_of_batch,
    rows_of_batch,
    slots_of,
    without_copies,
)
from forebay.client.tensors.tokenize import Tokenizer
from forebay.client.trainer.marked_steps import Unusable
from forebay.client.trainer.read_arrays import Image
from forebay.core.errors import InvalidInput, MissingExtra
from forebay.core.outcome import RolloutOutcome, reward_parts_of
from forebay.core.parts import Rows
from forebay.core.sample import fork_number

STATUSES = {"length": "TRUNCATED", "abort": "ABORTED", "error": "FAILED", "failed": "FAILED"}
"""slime's status by finish reason; for any other reason it is ``COMPLETED``."""
OUTCOME_STATUSES = {
    RolloutOutcome.TRUNCATED.value: "TRUNCATED",
    RolloutOutcome.CANCELLED.value: "ABORTED",
    **{outcome.value: "FAILED" for outcome in RolloutOutcome if outcome.value.endswith("_failure")},
}
"""slime's status by outcome, which takes precedence; for ``ok``, the finish reason decides."""
UNIFORM = ("round_number",)
"""Metadata that slime reads from every sample if the first one has it."""
FORK_INDEX = 1 << 40
"""The k-th fork's ``index`` is its main sample's plus k times this: unique within the training."""


@dataclass(frozen=True, slots=True)
class Usable:
    """A row that slime can train on."""

    row: Row
    tokens: Tokens
    reward: float
    raw_reward: float
    arrays: Mapping[str, Any] = field(default_factory=dict)
    """Fields of slime's sample with one item per token, or per image."""
    is_filler: bool = False
    """Whether it only fills a failed slot; it is not trained on."""


Group: TypeAlias = list[list[Usable]]
"""The slots of a group, each with a main sample and the forks of its rollout."""


def groups_of(
    batch: Batch, args: SlimeArgs, side: Sequence[Mapping[str, Rows]], images: Sequence[Sequence[Image]]
) -> list[Group | Unusable]:
    """The groups of a batch read with tensors; usable ones have exactly ``n_samples_per_prompt`` slots.

    ``side`` has the side arrays of each row, if slime needs any; ``images`` has the images of each row.
    """
    arrays, numbers = arrays_of_batch(batch)
    given = rows_of_batch(batch)
    groups: list[Group | Unusable] = []
    for _, adjacent in groupby(range(len(numbers)), numbers.__getitem__):
        places = list(adjacent)
        try:
            slots = _slots(given, places, args)
            group = [
                [_usable(given[at], arrays[at], args, side[at] if side else None, images[at]) for at in slot]
                for slot in slots
            ]
            # slime counts rollouts and aborts the training if some are missing.
            groups.append(group + [[_filler(group[0][0])]] * (args.n_samples_per_prompt - len(group)))
        except InvalidInput as error:
            groups.append(Unusable(given[places[0]]["instance_id"], str(error)))
    return groups


def usable_row(row: Row, args: SlimeArgs) -> Usable:
    """Convert a sample as written. Raises ``InvalidInput`` if slime cannot use it."""
    return _usable(row, arrays_of_row(row), args)


def _slots(rows: Sequence[Row], places: Sequence[int], args: SlimeArgs) -> list[list[int]]:
    """The row indices of a group by slot, each main sample before its forks. Raises ``InvalidInput``."""
    size, has_forks = args.n_samples_per_prompt, any(fork_number(rows[at].get("fork")) for at in places)
    if has_forks and does_slime_normalise(args):  # fillers replace copies that a hook put into failed slots
        places = without_copies(rows, places)
    slots = slots_of(rows, places)
    if len(slots) > size or (len(slots) < size and not has_forks):
        raise InvalidInput(f"it has {len(slots)} samples, n_samples_per_prompt is {size}")
    return slots


def _usable(
    row: Row,
    arrays: RowArrays,
    args: SlimeArgs,
    side: Mapping[str, Rows] | None = None,
    images: Sequence[Image] = (),
) -> Usable:
    reward, raw_reward = (_float(row.get(name)) for name in ("reward", "raw_reward"))
    if math.isnan(reward):
        raise InvalidInput(f"sample {row.get('uid')!r} has no reward", field="reward")
    raw_reward = reward if math.isnan(raw_reward) else raw_reward  # an evaluation reads samples as written
    try:
        tokens, fields = tokens_of(row, arrays, lambda: _tokenizer(args.hf_checkpoint)), dict[str, Any]()
        if side is not None:
            tokens, fields = with_arrays(tokens, side, args)
        if images:
            fields["multimodal_inputs"] = {"images": [_opened(image) for image in images]}
    except InvalidInput as error:
        raise InvalidInput(f"sample {row.get('uid')!r}: {error}", field=error.field) from error
    return Usable(row, tokens, raw_reward if does_slime_normalise(args) else reward, raw_reward, fields)


def _filler(item: Usable) -> Usable:
    tokens = replace(item.tokens, loss_mask=[0] * item.tokens.response_length)
    return replace(item, tokens=tokens, is_filler=True)


def _opened(image: Image) -> Any:
    """A PIL image, as slime's processors take it, or the URL of an image whose bytes are unknown.

    Raises ``InvalidInput`` for a format that Pillow does not read.
    """
    if not image.data:
        return image.url
    from PIL import Image as Pillow  # which slime needs for images

    try:
        return Pillow.open(io.BytesIO(image.data))
    except OSError:
        raise InvalidInput(f"Pillow cannot read an image of type {image.media_type!r}", field="messages") from None


def _float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


@cache
def _tokenizer(path: str) -> Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingExtra("transformers", "local") from None
    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    return tokenizer


# --- slime's classes


def slime_module(name: str) -> Any:
    """A module of slime, or of its fork miles: the package that called us is already loaded."""
    package = next((each for each in ("slime", "miles") if each in sys.modules), "slime")
    return import_module(f"{package}.{name}")


def to_slime(groups: Sequence[Group], args: SlimeArgs, first_group: int) -> list[list[Any]]:
    """Groups of slime's ``Sample``, one per slot, numbered from ``first_group``.

    If any rollout has forks, each slot is a list of the main sample and its forks.
    """
    # slime checks the first sample for a field and then reads it from all: so all have these fields, or none.
    items = [item for group in groups for slot in group for item in slot]
    has_logprobs = all(item.tokens.logprobs is not None for item in items)
    uniform = {name for name in UNIFORM if all(name in _extra_info(item.row) for item in items)}
    is_nested = any(len(slot) > 1 for group in groups for slot in group)
    numbers = count(first_group * args.n_samples_per_prompt)
    made: list[list[Any]] = []
    for group_index, group in enumerate(groups, first_group):
        slots = [[_sample(item, args, uniform) for item in slot] for slot in group]
        for slot, index in zip(slots, numbers, strict=False):
            for fork, sample in enumerate(slot):
                sample.index, sample.group_index, sample.rollout_id = fork * FORK_INDEX + index, group_index, index
                sample.rollout_log_probs = sample.rollout_log_probs if has_logprobs else None
        made.append(slots if is_nested else [sample for [sample] in slots])
    return made


def _sample(item: Usable, args: SlimeArgs, uniform: Iterable[str]) -> Any:
    sample_class, row, tokens = slime_module("utils.types").Sample, item.row, item.tokens
    extra = {name: value for name, value in _extra_info(row).items() if name not in UNIFORM or name in uniform}
    origin = {"uid": row["uid"], "instance_id": row["instance_id"], "raw_reward": item.raw_reward}
    if parts := reward_parts_of(row):
        origin["reward_parts"] = parts
    key = getattr(args, "reward_key", None)
    prompt, response = _texts(row["messages"])
    return sample_class(
        prompt=prompt,
        response=response,
        tokens=tokens.ids,
        response_length=tokens.response_length,
        loss_mask=tokens.loss_mask,
        rollout_log_probs=tokens.logprobs,
        label=row.get("label", extra.get("label")),
        reward={key: item.reward} if key else item.reward,
        weight_versions=_weight_versions(row),
        status=sample_class.Status[status_of(row)],
        metadata={**extra, **origin, "retokenized": tokens.is_retokenized},
        **item.arrays,
    )


def status_of(row: Row) -> str:
    """The name of slime's status for a sample."""
    status = OUTCOME_STATUSES.get(str(row.get("outcome")))
    if status or row.get("status") == "failed":
        return status or "FAILED"
    reason = _extra_info(row).get("finish_reason", row.get("finish_reason"))
    if isinstance(reason, dict):  # the form of SGLang's native API
        reason = reason.get("type")
    return STATUSES.get(str(reason), "COMPLETED")


def _extra_info(row: Row) -> dict[str, Any]:
    extra = row.get("extra_info")
    return extra if isinstance(extra, dict) else {}


def _weight_versions(row: Row) -> list[str]:
    versions = row.get("weight_versions")
    if isinstance(versions, list):
        return [str(version) for version in versions]
    version = row.get("weight_version")
    return [] if version is None else [str(version)]


def _texts(messages: Sequence[Any]) -> tuple[list[Any], str]:
    """The messages before the assistant's first, and the text of its last."""
    said = [n for n, message in enumerate(messages) if isinstance(message, dict) and message.get("role") == "assistant"]
    if not said:
        return list(messages), ""
    text = messages[said[-1]].get("content")
    return list(messages[: said[0]]), text if isinstance(text, str) else ""
