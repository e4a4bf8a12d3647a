"""Groups of a batch as slime's own samples."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import count, groupby
from typing import Any

from forebay.client.model import Batch, Row
from forebay.client.slime.args import SlimeArgs, does_slime_normalise
from forebay.client.slime.tokens import Arrays, Tokens, arrays_of_batch, arrays_of_row, tokens_of
from forebay.client.tensors.tokenize import Tokenizer
from forebay.core.errors import InvalidInput, MissingExtra
from forebay.core.outcome import RolloutOutcome
from forebay.core.sample import OWN_NAMES, fork_number
from forebay.core.sample import rollout_id as id_of_rollout

STATUSES = {"length": "TRUNCATED", "abort": "ABORTED", "error": "FAILED", "failed": "FAILED"}
"""By the reason for which a rollout ended; all others are ``COMPLETED``."""
OUTCOME_STATUSES = {
    RolloutOutcome.TRUNCATED.value: "TRUNCATED",
    RolloutOutcome.CANCELLED.value: "ABORTED",
    **{outcome.value: "FAILED" for outcome in RolloutOutcome if outcome.value.endswith("_failure")},
}
"""By how the rollout ended, which counts more; of an ``ok`` one the reason tells."""
UNIFORM = ("round_number",)
"""Metadata that slime takes of every sample if the first one has it."""


@dataclass(frozen=True, slots=True)
class Usable:
    """A row that slime can train on."""

    row: Row
    tokens: Tokens
    reward: float
    raw_reward: float


@dataclass(frozen=True, slots=True)
class Unusable:
    """A group that slime cannot train on, and why."""

    instance_id: object
    reason: str


def groups_of(batch: Batch, args: SlimeArgs) -> list[list[Usable] | Unusable]:
    """The groups of a batch that came as tensors; usable ones have exactly ``n_samples_per_prompt`` rows."""
    arrays, numbers = arrays_of_batch(batch)
    given = [own_names(row) if at in batch.foreign_rows else row for at, row in enumerate(batch.rows)]
    groups: list[list[Usable] | Unusable] = []
    for _, adjacent in groupby(range(len(numbers)), numbers.__getitem__):
        places = _without_surplus_forks(given, list(adjacent), args.n_samples_per_prompt)
        rows = [given[at] for at in places]
        try:
            _check_size(rows, args.n_samples_per_prompt)
            groups.append([_usable(given[at], arrays[at], args) for at in places])
        except InvalidInput as error:
            groups.append(Unusable(rows[0]["instance_id"], str(error)))
    return groups


def own_names(row: Row) -> Row:
    """The row of a foreign writer, without the names that mean something else there. It has a reward: none failed."""
    return {name: value for name, value in row.items() if name not in OWN_NAMES and name != "status"}


def usable_row(row: Row, args: SlimeArgs) -> Usable:
    """A sample as it was written. Raises ``InvalidInput`` if slime cannot use it."""
    return _usable(row, arrays_of_row(row), args)


def _without_surplus_forks(rows: Sequence[Row], places: list[int], size: int) -> list[int]:
    """slime wants groups of one size: forks beyond it are left out, the main samples of slots never."""
    num_surplus = len(places) - size
    if num_surplus <= 0:
        return places
    forks = [at for at in places if fork_number(rows[at].get("fork"))]
    left_out = set(forks[-num_surplus:])
    return [at for at in places if at not in left_out]


def _check_size(rows: Sequence[Row], size: int) -> None:
    if len(rows) != size:
        raise InvalidInput(f"it has {len(rows)} samples, n_samples_per_prompt is {size}")


def _usable(row: Row, arrays: Arrays, args: SlimeArgs) -> Usable:
    reward, raw_reward = (_number(row.get(name)) for name in ("reward", "raw_reward"))
    if math.isnan(reward):
        raise InvalidInput(f"sample {row.get('uid')!r} has no reward", field="reward")
    raw_reward = reward if math.isnan(raw_reward) else raw_reward  # an evaluation has what was written
    try:
        tokens = tokens_of(row, arrays, lambda: _tokenizer(args.hf_checkpoint))
    except InvalidInput as error:
        raise InvalidInput(f"sample {row.get('uid')!r}: {error}", field=error.field) from error
    return Usable(row, tokens, raw_reward if does_slime_normalise(args) else reward, raw_reward)


def _number(value: object) -> float:
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
    """A module of slime, which is there when slime calls us."""
    return import_module(f"slime.{name}")


def to_slime(
    groups: Sequence[Sequence[Usable]], args: SlimeArgs, first_index: int, first_group: int
) -> list[list[Any]]:
    """Groups of slime's ``Sample``, with indices that count from ``first_index`` and ``first_group``."""
    # slime looks at the first sample, and takes of all what that one has: these are all there, or all left out.
    has_logprobs = all(item.tokens.logprobs is not None for group in groups for item in group)
    uniform = {name for name in UNIFORM if all(name in _extra_info(item.row) for group in groups for item in group)}
    numbers = count(first_index)
    made: list[list[Any]] = []
    for group_index, group in enumerate(groups, first_group):
        samples = [_sample(item, args, index, uniform) for item, index in zip(group, numbers, strict=False)]
        for sample, rollout_id in zip(samples, _rollout_ids(group, [s.index for s in samples]), strict=True):
            sample.group_index, sample.rollout_id = group_index, rollout_id
            sample.rollout_log_probs = sample.rollout_log_probs if has_logprobs else None
        made.append(samples)
    return made


def _sample(item: Usable, args: SlimeArgs, index: int, uniform: Iterable[str]) -> Any:
    sample_class, row, tokens = slime_module("utils.types").Sample, item.row, item.tokens
    extra = {name: value for name, value in _extra_info(row).items() if name not in UNIFORM or name in uniform}
    origin = {"uid": row["uid"], "instance_id": row["instance_id"], "raw_reward": item.raw_reward}
    key = getattr(args, "reward_key", None)
    prompt, response = _texts(row["messages"])
    return sample_class(
        index=index,
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
    )


def _rollout_ids(group: Sequence[Usable], indices: Sequence[int]) -> list[int]:
    """For each sample the index of the first one of its rollout."""
    firsts: dict[str, int] = {}
    seen: set[str] = set()
    ids = []
    for item, index in zip(group, indices, strict=True):
        rollout_id, uid = id_of_rollout(item.row.get("rollout_id")), item.row["uid"]
        # A uid that was there is a copy, with which a hook filled up the group: it counts as a rollout of its own.
        ids.append(index if not rollout_id or uid in seen else firsts.setdefault(rollout_id, index))
        seen.add(uid)
    return ids


def status_of(row: Row) -> str:
    """The name of slime's status for a sample."""
    status = OUTCOME_STATUSES.get(str(row.get("outcome")))
    if status or row.get("status") == "failed":
        return status or "FAILED"
    reason = _extra_info(row).get("finish_reason", row.get("finish_reason"))
    if isinstance(reason, dict):  # as SGLang's own API has it
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
