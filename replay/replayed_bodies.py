"""The body of a replayed sample: as it was recorded, but for its last field ``replayed_from``, which names that sample.

And how many tokens of it an engine had sampled: what a replay need not pay for again.
"""

import msgspec

from forebay.core.binary_sample import Field, is_binary, unpack, value_of

_OPENING = b',"replayed_from":{"run_id":'
_WINDOW = 16 << 10
"""The field is within so many bytes at the end: a uid of 1 024 characters takes at most 6 KiB."""
MAX_MASK_BYTES = 16 << 20
"""Of a mask in JSON that is counted: as objects it takes sixteen times as much."""
_ZERO = b"\0"


class ReplayedFrom(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which recorded sample a body is of."""

    run_id: str
    uid: str
    """As it was recorded."""
    substitute: bool
    """Whether it is of another epoch than the sample whose place it has."""


class _Tail(msgspec.Struct, forbid_unknown_fields=True):
    replayed_from: ReplayedFrom


class _Counted(msgspec.Struct):
    loss_mask: Field = msgspec.UNSET
    response_length: Field = msgspec.UNSET


_encode = msgspec.json.Encoder().encode
_decode_tail = msgspec.json.Decoder(_Tail).decode
_decode_counted = msgspec.json.Decoder(_Counted).decode
_decode_mask = msgspec.json.Decoder(list[float]).decode


def splice(body: bytes, run_id: str, uid: str, *, substitute: bool = False) -> bytes:
    """``body``, JSON or binary, with ``replayed_from`` before its last brace, in place of one that it has.

    What stands before it keeps its place, thus the span of a reward holds for both.
    """
    plain = strip(body)
    end = plain.rfind(b"}")
    field = _encode(ReplayedFrom(run_id, uid, substitute))
    return b'%b,"replayed_from":%b%b' % (plain[:end], field, plain[end:])


def strip(body: bytes) -> bytes:
    """``body`` as it was recorded: without the field that ``splice`` has set."""
    at = _field_start(body)
    return body if at is None else body[:at] + body[body.rfind(b"}") :]


def replayed_from(body: bytes) -> ReplayedFrom | None:
    """Which recorded sample it is; None for one that was generated."""
    at = _field_start(body)
    return None if at is None else _decode_tail(b"{" + body[at + 1 :]).replayed_from


def _field_start(body: bytes) -> int | None:
    at = body.rfind(_OPENING, max(0, len(body) - _WINDOW))
    if at < 0:
        return None
    try:
        # The same text in an object within the body has another brace behind it.
        _decode_tail(b"{" + body[at + 1 :])
    except msgspec.DecodeError:
        return None
    return at


def sampled_tokens(body: bytes) -> int:
    """Those that its loss mask names, else its ``response_length``; 0 where the sample tells neither."""
    if not is_binary(body):
        return _in_json(body)
    sample = unpack(body)
    if sample.loss_mask is not None:
        return len(sample.loss_mask) - bytes(sample.loss_mask).count(_ZERO)
    return _in_json(bytes(sample.json))


def _in_json(text: bytes) -> int:
    try:
        counted = _decode_counted(text)
    except (msgspec.DecodeError, RecursionError):  # stored by an earlier version, which let it pass
        return 0
    if isinstance(counted.loss_mask, msgspec.Raw):
        if memoryview(counted.loss_mask).nbytes > MAX_MASK_BYTES:
            return 0
        try:
            # Masks of zeros and ones; a weight between them is of a token that was sampled as well.
            return sum(map(bool, _decode_mask(counted.loss_mask)))
        except msgspec.DecodeError:
            return 0
    length = value_of(counted.response_length)
    return length if type(length) is int and length > 0 else 0
