"""The binary form of a sample: its token arrays as raw numbers, then a JSON object with everything else.

    magic, number of tokens, of logprobs, of loss mask values   4 bytes each, little-endian; ``ABSENT`` for no array
    tokens                                                      int32, little-endian
    logprobs                                                    float32, little-endian
    loss mask                                                   uint8
    a JSON object without these three, to the end               UTF-8, begins with "{"

The JSON is last and has no length field. So the reward of a binary sample is replaced like that of any other
body: by replacing the bytes of its number.
"""

import struct
from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import msgspec

from forebay.core.errors import InvalidInput

BytesLike = bytes | bytearray | memoryview
Body = TypeVar("Body", bytes, memoryview)

SAMPLES_TYPE = "application/vnd.forebay.samples"
"""Content type of a request with binary samples, each preceded by its length as 4 bytes, little-endian."""
MAGIC = b"\xf8FBS"
"""Begins with a byte that never occurs in UTF-8, and thus not in a JSON body."""
ABSENT = 0xFFFF_FFFF
ARRAYS = ("tokens", "logprobs", "loss_mask")
"""Fields of a sample that may be arrays, in the order in which they are stored."""
ITEM_SIZES = {"tokens": 4, "logprobs": 4, "loss_mask": 1}
TYPE_CODES = {"tokens": "i", "logprobs": "f", "loss_mask": "B"}
"""Type codes of the module ``array``."""

Field = msgspec.Raw | msgspec.UnsetType
"""An undecoded field of a JSON object."""

_HEAD = struct.Struct("<4sIII")
HEAD_BYTES = _HEAD.size
_LENGTH = struct.Struct("<I")
_encode = msgspec.json.Encoder().encode


class Unpacked(NamedTuple):
    """The parts of a binary sample. Arrays are given as bytes, None if absent."""

    tokens: memoryview
    logprobs: memoryview | None
    loss_mask: memoryview | None
    json: memoryview


class FieldOffsets(msgspec.Struct, frozen=True, gc=False):
    """Offsets of a binary sample's parts. The tokens begin at ``HEAD_BYTES``."""

    num_tokens: int
    logprobs: int
    loss_mask: int
    json: int
    has_logprobs: bool
    has_loss_mask: bool


class _Named(msgspec.Struct):
    """The array-related fields in the JSON of a binary sample."""

    tokens: Field = msgspec.UNSET
    logprobs: Field = msgspec.UNSET
    loss_mask: Field = msgspec.UNSET
    response_length: Field = msgspec.UNSET


_decode_named = msgspec.json.Decoder(_Named).decode


def is_samples(content_type: bytes) -> bool:
    """Whether a Content-Type header means binary samples."""
    return content_type.partition(b";")[0].strip().lower() == SAMPLES_TYPE.encode()


def is_binary(body: BytesLike) -> bool:
    """Whether ``body`` is a binary sample."""
    return body[:4] == MAGIC


def is_raw(frame: BytesLike) -> bool:
    """Whether a frame of a request is a binary sample or a part, which only a binary request can hold."""
    return frame[:1] == MAGIC[:1]


def head_of(body: BytesLike) -> bytes:
    """The head of a binary sample, for ``read_offsets``; b"" for a JSON body."""
    return bytes(body[:HEAD_BYTES]) if is_binary(body) else b""


def pack(json: bytes, tokens: bytes, logprobs: bytes | None = None, loss_mask: bytes | None = None) -> bytes:
    """Make a binary sample from these arrays, given as bytes, and the JSON object ``json``."""
    arrays = (tokens, logprobs, loss_mask)
    sizes = ITEM_SIZES.values()
    counts = (ABSENT if data is None else len(data) // size for data, size in zip(arrays, sizes, strict=True))
    return b"".join((_HEAD.pack(MAGIC, *counts), *(data for data in arrays if data is not None), json))


def unpack(body: BytesLike) -> Unpacked:
    """Split a binary sample into views of its parts. Raises ``InvalidInput`` if it is too short."""
    offsets = read_offsets(body)
    # The arrays are contiguous, so all of them are within the body if the start of the JSON is.
    if offsets.json > len(body):
        raise InvalidInput(f"a binary sample of {len(body)} bytes has arrays up to byte {offsets.json}", field="body")
    view = memoryview(body)
    return Unpacked(
        view[HEAD_BYTES : offsets.logprobs],
        view[offsets.logprobs : offsets.loss_mask] if offsets.has_logprobs else None,
        view[offsets.loss_mask : offsets.json] if offsets.has_loss_mask else None,
        view[offsets.json :],
    )


def read_offsets(head: BytesLike) -> FieldOffsets:
    """Read the offsets of a binary sample's parts from its first ``HEAD_BYTES``. Raises ``InvalidInput``."""
    try:
        _, num_tokens, num_logprobs, num_masked = _HEAD.unpack_from(head)
    except struct.error:
        raise InvalidInput("the head of a binary sample is incomplete", field="body") from None
    if num_tokens == ABSENT:
        raise InvalidInput("a binary sample must have tokens", field="tokens", hint="send other samples as JSON")
    logprobs = HEAD_BYTES + 4 * num_tokens
    loss_mask = logprobs + (0 if num_logprobs == ABSENT else 4 * num_logprobs)
    json = loss_mask + (0 if num_masked == ABSENT else num_masked)
    return FieldOffsets(num_tokens, logprobs, loss_mask, json, num_logprobs != ABSENT, num_masked != ABSENT)


def check_arrays(sample: Unpacked) -> None:
    """Raise ``InvalidInput`` unless the arrays have valid lengths, and none is also in the JSON.

    ``logprobs`` and ``loss_mask`` have the length of ``tokens``, or that of the integer ``response_length``, and then
    belong to the last tokens.
    """
    named = _decode_named(sample.json)
    num_tokens = len(sample.tokens) // 4
    allowed = {num_tokens, response_length(value_of(named.response_length), num_tokens)}
    for name, data in zip(ARRAYS, sample[:3], strict=True):
        if isinstance(raw := getattr(named, name), msgspec.Raw) and bytes(raw) != b"null":
            raise InvalidInput(f"{name}: must not be in a binary sample's JSON", field=name, hint="send it as an array")
        # Arrays may cover only the response: the prompt's tokens were not sampled and are not trained on.
        if data is not None and (count := len(data) // ITEM_SIZES[name]) not in allowed:
            raise InvalidInput(
                f"{name}: {count} values for {num_tokens} tokens",
                field=name,
                hint="send as many as tokens, or as response_length says",
            )


def value_of(raw: Field | None) -> Any:
    """Decode a field; None also if it cannot be decoded, for example a string with half a surrogate pair."""
    try:
        return msgspec.json.decode(raw) if isinstance(raw, msgspec.Raw) else None
    except (msgspec.DecodeError, RecursionError):
        return None


def response_length(value: object, num_tokens: int) -> int | None:
    """Number of last tokens that are the response, if ``value`` is an integer within their number; otherwise None."""
    return value if type(value) is int and 0 <= value <= num_tokens else None


def as_json(body: Body) -> bytes | Body:
    """Convert ``body`` to JSON: a binary sample's arrays become lists, other bodies are returned unchanged.

    A logprob that is not finite becomes null.
    """
    if not is_binary(body):
        return body
    sample = unpack(body)
    # msgspec writes null for NaN and infinities, as JSON requires.
    pieces: list[bytes | memoryview] = [b"{"]
    for name, data in zip(ARRAYS, sample[:3], strict=True):
        if data is not None:
            pieces.append(b'"%s":%s,' % (name.encode(), _encode(_numbers(data, TYPE_CODES[name]))))
    # A field always follows the last comma, because every sample has a uid.
    return b"".join((*pieces, sample.json[1:]))


def _numbers(data: memoryview, code: str) -> list[Any]:
    values: array[Any] = array(code)
    values.frombytes(data)
    return values.tolist()


def json_start(body: BytesLike) -> int:
    """Offset of the JSON in a binary sample."""
    return len(body) - len(unpack(body).json)


def join_samples(samples: Iterable[bytes]) -> bytes:
    """Make the body of a request with ``samples``, binary and JSON ones in any order."""
    return b"".join(piece for sample in samples for piece in (_LENGTH.pack(len(sample)), sample))


def split_samples(body: Body) -> list[Body]:
    """Split a request's body into its frames. Raises ``InvalidInput``."""
    samples, at = list[Body](), 0
    while at < len(body):
        if at + _LENGTH.size > len(body):
            raise InvalidInput("the length before the last sample is incomplete", field="body")
        start = at + _LENGTH.size
        at = start + _LENGTH.unpack_from(body, at)[0]
        samples.append(body[start:at])
    if at > len(body):
        raise InvalidInput(f"the last sample is incomplete: it ends at byte {at} of {len(body)}", field="body")
    return samples


def number_bytes(values: Iterable[Any], code: str) -> bytes | None:
    """Encode ``values`` as an array of type ``code``, one of ``TYPE_CODES``; None if a value does not fit."""
    if code == "f":
        return float_bytes(values)
    return mask_bytes(values) if code == TYPE_CODES["loss_mask"] else int_bytes(values, code)


def int_bytes(values: Iterable[int], code: str) -> bytes | None:
    """Encode ``values`` as an array of type ``code``; None if one is not an integer in its range."""
    try:
        return array(code, values).tobytes()
    except (TypeError, OverflowError):
        return None


def mask_bytes(values: Iterable[Any]) -> bytes | None:
    """Encode ``values`` as uint8, accepting whole floats; None if one is not an integer in the range."""
    values = list(values)
    data = int_bytes(values, "B")
    return int_bytes(map(_as_int, values), "B") if data is None else data


def _as_int(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def float_bytes(values: Iterable[Any]) -> bytes | None:
    """Encode ``values`` as float32, with NaN for None; None if one is not a number."""
    values = list(values)
    # All at once first, in C; one by one only if a value does not fit.
    try:
        return array("f", values).tobytes()
    except (TypeError, OverflowError):
        pass
    try:
        return array("f", (float("nan") if value is None else value for value in values)).tobytes()
    except (TypeError, OverflowError):
        return None
