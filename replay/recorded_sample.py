"""A recorded sample as a write, and checks that a file contains only what a write over HTTP would have stored."""

from functools import partial
from typing import Any

from forebay.core.binary_sample import is_binary
from forebay.core.errors import InvalidInput
from forebay.core.ids import MAX_ID_LENGTH, OTHER_UID_DIGITS, group_id, other_uid
from forebay.core.outcome import RolloutOutcome
from forebay.core.records.rows import ColumnsRow, GroupRow, SampleRow
from forebay.core.sample import MAX_EPOCH, MAX_SLOT, Incoming, read_any_sample, read_sample

MAX_DEPTH = 200
_RECORDED = [name for name in Incoming.__struct_fields__ if name not in ("num_tokens", "side", "parts")]
"""Fields of a write that its recorded columns determine."""


def incoming(sample: SampleRow, body: bytes) -> Incoming:
    """A recorded sample as a write, built from its columns without decoding the body."""
    ended = RolloutOutcome.OK if sample.reward is not None else RolloutOutcome.AGENT_FAILURE
    return Incoming(
        sample.uid,
        sample.instance_id,
        sample.reward,
        sample.epoch,
        None if sample.slot < 0 else sample.slot,
        sample.error,
        body,
        (sample.reward_start, sample.reward_end) if sample.reward_end else None,
        sample.rollout_id,
        sample.oldest_version,
        sample.fork,
        RolloutOutcome(sample.rollout_outcome) if sample.rollout_outcome else ended,
        sample.is_foreign,
        num_tokens=sample.num_tokens,
        reward_parts=sample.reward_parts,
    )


def check_payload(payload: dict[str, Any]) -> None:
    """Raise ``ValueError`` if a payload is nested too deeply for recursive functions."""
    level: list[Any] = [payload]
    for _ in range(MAX_DEPTH):
        dicts = [item for each in level if isinstance(each, dict) for item in each.values()]
        level = dicts + [item for each in level if isinstance(each, list) for item in each]
    if level:
        raise ValueError(f"its payload is nested more than {MAX_DEPTH} levels deep")


def check_group(row: GroupRow | ColumnsRow) -> None:
    """Raise ``ValueError`` unless its id matches its instance and epoch, and a write may use these."""
    text = str(row.instance_id)
    if not 0 < len(text) <= MAX_ID_LENGTH or "\0" in text:
        raise ValueError("its instance_id is empty, too long, or has a NUL character")
    if not 0 <= row.epoch <= MAX_EPOCH:
        raise ValueError(f"its epoch must be from 0 to {MAX_EPOCH} (got {row.epoch})")
    if row.group_id != group_id(row.instance_id, row.epoch):
        raise ValueError("its group_id does not match its instance_id and epoch")


def check_sample(sample: SampleRow, body: bytes) -> None:
    """Raise ``ValueError`` unless a write over HTTP accepts the body, and the body matches the recorded columns."""
    if not -1 <= sample.slot <= MAX_SLOT:
        raise ValueError(f"its slot must be from -1 to {MAX_SLOT} (got {sample.slot})")
    recorded = incoming(sample, body)
    try:
        # Either route may have accepted a JSON body. The lenient one reads what the strict one accepts in the same way.
        lenient = partial(read_sample, is_lenient=True, is_foreign=sample.is_foreign)
        found = read_any_sample(body) if is_binary(body) else lenient(body)
    except InvalidInput as error:
        raise ValueError(f"its body would be rejected by a write: {error.message}") from None
    if found.epoch is None:  # then the buffer chose its group and slot, and perhaps changed its uid
        found.epoch, found.slot = recorded.epoch, None
        digest = recorded.uid[-OTHER_UID_DIGITS:]
        if digest.isalnum() and recorded.uid == other_uid(found.uid, digest):
            found.uid = recorded.uid
    if found.slot is None:
        found.slot = recorded.slot
    wrong = [name for name in _RECORDED if getattr(found, name) != getattr(recorded, name)]
    if wrong:
        raise ValueError(f"its body does not match its recorded {', '.join(wrong)}")
