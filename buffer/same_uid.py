"""A sample with a known uid but a different body, over slime's routes, is a new sample, as in slime's buffer.

Generators there may reuse uids in every pass over the input. The native routes compare uids alone.
"""

from contextlib import suppress
from hashlib import blake2b
from typing import Any

import msgspec

from forebay.buffer.run_buffer import RunBuffer
from forebay.core.binary_sample import as_json
from forebay.core.fields import read_flag
from forebay.core.ids import OTHER_UID_DIGITS, other_uid
from forebay.core.sample import Incoming

LEFT_OUT = (
    *("uid", "tokens", "loss_mask", "logprobs", "token_spans", "weight_version", "weight_versions", "retokenized"),
    "asked_models",
)
"""The uid, which may be `7` or `"7"`; in captured runs also fields that the gateway adds only to the first sample."""

_decode = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder(order="sorted").encode


async def distinct_uid(buffer: RunBuffer, sample: Incoming) -> str:
    """Return the sample's uid, extended by a digest of its body if a different body is stored under the uid.

    Raises ``StorageFailed``.
    """
    if sample.uid not in buffer.uids:
        return sample.uid
    digest = _digest(buffer, sample.body)
    if await _stored_digest(buffer, sample.uid) == digest:
        return sample.uid
    return other_uid(sample.uid, digest)


async def _stored_digest(buffer: RunBuffer, uid: str) -> str:
    """Digest of the body stored under ``uid``; "" if retention has removed it."""
    group_id = buffer.uids.group_of(uid)  # before any await, because it may be evicted meanwhile
    await buffer.store.catch_up()
    for stored in await buffer.store.samples(buffer.run.run_id, group_id):
        if stored.row.uid == uid and buffer.store.holds(stored.location):
            [body] = await buffer.store.read([stored.location])
            return _digest(buffer, as_json(body))
    return ""


def _digest(buffer: RunBuffer, body: bytes) -> str:
    is_captured = read_flag("capture", buffer.run.payload.get("capture"))
    left_out = LEFT_OUT if is_captured else LEFT_OUT[:1]
    with suppress(msgspec.DecodeError, RecursionError):  # numbers too large for float64, or lists too deep
        fields = {name: value for name, value in _decode(body).items() if name not in left_out}
        body = _encode(fields)
    return blake2b(body, digest_size=OTHER_UID_DIGITS // 2).hexdigest()
