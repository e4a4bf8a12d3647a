"""Bodies of replayed samples: the recorded body plus a last field ``replayed_from``, which names the recorded sample.

Also counts the tokens that an engine sampled, which a replay need not generate again.
"""

import msgspec

from forebay.core.binary_sample import Field, is_binary, unpack, value_of
from forebay.core.errors import InvalidInput
from forebay.core.parts import read_fields
from forebay.core.records.reward_place import find_field

_OPENING = b',"replayed_from":{"run_id":'
_WINDOW = 16 << 10
"""The field is within this many last bytes: a uid of 1 024 characters takes at most 6 KiB."""
MAX_MASK_BYTES = 16 << 20
"""The largest JSON mask that is counted: decoded, it takes sixteen times the memory."""
_ZERO = b"\0"


class ReplayedFrom(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The recorded sample from which a body comes."""

    run_id: str
    uid: str
    """The uid in the recording."""
    substitute: bool
    """Whether the sample replaces one of another epoch."""


class _Tail(msgspec.Struct, forbid_unknown_fields=True):
    replayed_from: ReplayedFrom


class _Side(msgspec.Struct):
    parts: Field = msgspec.UNSET
    arrays: Field = msgspec.UNSET


class _Counted(msgspec.Struct):
    loss_mask: Field = msgspec.UNSET
    response_length: Field = msgspec.UNSET


_encode = msgspec.json.Encoder().encode
_decode_tail = msgspec.json.Decoder(_Tail).decode
_decode_counted = msgspec.json.Decoder(_Counted).decode
_decode_side = msgspec.json.Decoder(_Side).decode
_decode_mask = msgspec.json.Decoder(list[float]).decode


def splice(body: bytes, run_id: str, uid: str, *, substitute: bool = False) -> bytes:
    """``body``, JSON or binary, with ``replayed_from`` inserted or replaced before its last brace.

    Everything before the field keeps its position, so the span of a reward stays valid.
    """
    plain = _without_arrays(strip(body))
    end = plain.rfind(b"}")
    field = _encode(ReplayedFrom(run_id, uid, substitute))
    return b'%b,"replayed_from":%b%b' % (plain[:end], field, plain[end:])


def _without_arrays(body: bytes) -> bytes:
    """``body`` with null for its parts and arrays, which a replay does not have; everything keeps its position."""
    if not (b'"parts"' in body or b'"arrays"' in body):
        return body
    text = bytes(unpack(body).json) if is_binary(body) else body
    head = body[: len(body) - len(text)]
    try:
        side = _decode_side(text)
        read_fields(side.parts, side.arrays)
    except InvalidInput:  # another writer's fields of these names
        return body
    spans = [find_field(text, raw) for raw in (side.parts, side.arrays) if isinstance(raw, msgspec.Raw)]
    for start, end in filter(None, spans):
        if end - start >= len(b"null"):  # a shorter one is empty
            text = text[:start] + b"null".ljust(end - start) + text[end:]
    return head + text


def strip(body: bytes) -> bytes:
    """``body`` without the field that ``splice`` inserts."""
    at = _field_start(body)
    return body if at is None else body[:at] + body[body.rfind(b"}") :]


def replayed_from(body: bytes) -> ReplayedFrom | None:
    """The recorded sample of a body; None if the sample was generated."""
    at = _field_start(body)
    return None if at is None else _decode_tail(b"{" + body[at + 1 :]).replayed_from


def _field_start(body: bytes) -> int | None:
    at = body.rfind(_OPENING, max(0, len(body) - _WINDOW))
    if at < 0:
        return None
    try:
        # The same text in a nested object would be followed by another brace.
        _decode_tail(b"{" + body[at + 1 :])
    except msgspec.DecodeError:
        return None
    return at


def sampled_tokens(body: bytes) -> int:
    """Sampled tokens by the loss mask, or ``response_length`` without one; 0 if the sample has neither."""
    if not is_binary(body):
        return _in_json(body)
    sample = unpack(body)
    if sample.loss_mask is not None:
        return len(sample.loss_mask) - bytes(sample.loss_mask).count(_ZERO)
    return _in_json(bytes(sample.json))


def _in_json(text: bytes) -> int:
    try:
        counted = _decode_counted(text)
    except (msgspec.DecodeError, RecursionError):  # stored by an earlier version, which did not check it
        return 0
    if isinstance(counted.loss_mask, msgspec.Raw):
        if memoryview(counted.loss_mask).nbytes > MAX_MASK_BYTES:
            return 0
        try:
            # A mask has zeros and ones; a weight in between also marks a sampled token.
            return sum(map(bool, _decode_mask(counted.loss_mask)))
        except msgspec.DecodeError:
            return 0
    length = value_of(counted.response_length)
    return length if type(length) is int and length > 0 else 0
