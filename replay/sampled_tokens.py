"""How many tokens of a stored sample an engine had sampled: what a replay need not pay for again."""

import msgspec

from forebay.core.binary_sample import Field, is_binary, unpack, value_of

MAX_MASK_BYTES = 16 << 20
"""Of a mask in JSON that is counted: as objects it takes sixteen times as much."""
_ZERO = b"\0"


class _Counted(msgspec.Struct):
    loss_mask: Field = msgspec.UNSET
    response_length: Field = msgspec.UNSET


_decode_counted = msgspec.json.Decoder(_Counted).decode
_decode_mask = msgspec.json.Decoder(list[float]).decode


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
