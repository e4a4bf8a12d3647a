"""The rows of a batch as tensors: each row's arrays padded to its tokens' length, and all rows concatenated."""

import math
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec

from forebay.core.binary_sample import (
    ARRAYS,
    ITEM_SIZES,
    TYPE_CODES,
    Field,
    is_binary,
    number_bytes,
    response_length,
    unpack,
    value_of,
)
from forebay.core.safetensors_format import Dtype
from forebay.core.weight_versions import oldest_version

Piece = bytes | memoryview
P = TypeVar("P")

UNKNOWN = -1
_NAN = array("f", [math.nan]).tobytes()
_CODES = {"I64": "q", "F64": "d"}
"""Type codes of the module ``array``."""

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


class _Head(msgspec.Struct):
    """The fields of a row that become tensors."""

    reward: Field = msgspec.UNSET
    raw_reward: Field = msgspec.UNSET
    response_length: Field = msgspec.UNSET
    weight_version: Field = msgspec.UNSET
    weight_versions: Field = msgspec.UNSET


_decode_head = msgspec.json.Decoder(_Head).decode


class TokenRow(msgspec.Struct, Generic[P], frozen=True, gc=False):
    """One row. Logprobs and loss mask, in pieces, are as long as its tokens. ``P`` is the type of an array's piece."""

    num_tokens: int
    tokens: P
    logprobs: Sequence[P | bytes]
    loss_mask: Sequence[P | bytes]
    has_logprobs: bool
    response_length: int
    reward: float
    raw_reward: float
    weight_version: int
    rest: bytes
    """The row as JSON without its arrays."""


class TensorColumn(NamedTuple, Generic[P]):
    """One tensor of a batch: its bytes in pieces."""

    name: str
    dtype: Dtype
    num_items: int
    pieces: Sequence[P | bytes]


class Stretch(msgspec.Struct, Generic[P], frozen=True, gc=False):
    """An array and its number of items."""

    num_items: int
    piece: P


class _Arrays(NamedTuple):
    tokens: Piece
    logprobs: Piece | None
    loss_mask: Piece | None
    rest: bytes


class Numbers(msgspec.Struct, frozen=True, gc=False):
    """Values in a row's JSON that become tensors, unchanged and of any type."""

    reward: Any
    raw_reward: Any
    response_length: Any
    oldest_version: int | None


def read_numbers(rest: bytes) -> Numbers:
    """Read the numbers in a row's JSON."""
    head = _decode_head(rest)
    oldest = oldest_version(value_of(head.weight_version), value_of(head.weight_versions))
    return Numbers(value_of(head.reward), value_of(head.raw_reward), value_of(head.response_length), oldest)


def token_row(row: Sequence[Piece]) -> TokenRow[Piece]:
    """Make a row of a batch from the pieces of a binary or JSON body.

    ``logprobs`` and ``loss_mask`` of the response alone are padded with zeros in front. Missing logprobs become NaN, so
    that using them is noticed. A missing loss mask becomes 1 for the response, or for every token if
    ``response_length`` does not say which are the response. A JSON row with invalid lists keeps them and has no tokens.
    """
    arrays = _binary_arrays(row) if is_binary(row[0]) else _json_arrays(b"".join(row))
    logprobs, loss_mask = arrays.logprobs, arrays.loss_mask
    return make_row(
        Stretch(len(arrays.tokens) // 4, arrays.tokens),
        None if logprobs is None else Stretch(len(logprobs) // 4, logprobs),
        None if loss_mask is None else Stretch(len(loss_mask), loss_mask),
        arrays.rest,
    )


def make_row(
    tokens: Stretch[P],
    logprobs: Stretch[P] | None,
    loss_mask: Stretch[P] | None,
    rest: bytes,
    numbers: Numbers | None = None,
) -> TokenRow[P]:
    """Make a row from these arrays and ``rest``, its JSON without them, as described in ``token_row``.

    ``numbers`` is the result of ``read_numbers`` for ``rest``.
    """
    numbers = numbers or read_numbers(rest)
    num_tokens, oldest = tokens.num_items, numbers.oldest_version
    response = response_length(numbers.response_length, num_tokens)
    if loss_mask is None:
        mask: Sequence[P | bytes] = _ones(num_tokens, response)
    else:
        mask = _padded(loss_mask.piece, num_tokens - loss_mask.num_items)
    return TokenRow(
        num_tokens,
        tokens.piece,
        # NaN and not 0, which would be a probability of 1: using missing values is then noticed.
        [_NAN * num_tokens] if logprobs is None else _padded(logprobs.piece, 4 * (num_tokens - logprobs.num_items)),
        mask,
        logprobs is not None,
        UNKNOWN if response is None else response,
        _number(numbers.reward),
        _number(numbers.raw_reward),
        UNKNOWN if oldest is None else oldest,
        rest,
    )


def _ones(num_tokens: int, response: int | None) -> Sequence[bytes]:
    num_trained = num_tokens if response is None else response
    return [bytes(num_tokens - num_trained), b"\1" * num_trained]


def _padded(piece: P, num_missing_bytes: int) -> Sequence[P | bytes]:
    # Two pieces, not one sum, because stored bytes are sent from where they are.
    return [bytes(num_missing_bytes), piece] if num_missing_bytes else [piece]


def _number(value: Any) -> float:
    if type(value) is float:
        return value
    # A user's hook may have left a string as reward, which is not a number; true and false become 1 and 0.
    try:
        return float(value) if isinstance(value, int) else math.nan
    except OverflowError:
        return math.nan


def _binary_arrays(row: Sequence[bytes | memoryview]) -> _Arrays:
    sample = unpack(row[0])
    # The JSON is split where a new reward was inserted; all arrays are in the first piece.
    return _Arrays(sample.tokens, sample.logprobs, sample.loss_mask, b"".join((sample.json, *row[1:])))


def _json_arrays(text: bytes) -> _Arrays:
    # Most JSON rows have no tokens, and searching the bytes avoids decoding them.
    return (b'"tokens"' in text and _lists(text)) or _Arrays(b"", None, None, text)


def _lists(text: bytes) -> _Arrays | None:
    """Convert the lists of a JSON row to arrays; None if they are invalid as arrays."""
    try:
        fields = _decode_fields(text)
    except msgspec.DecodeError:  # a key with half a surrogate pair
        return None
    given = {name: raw for name in ARRAYS if (raw := fields.get(name)) is not None and bytes(raw) != b"null"}
    arrays = {name: _list_bytes(raw, name) for name, raw in given.items()}
    # All three or none: if one cannot be an array, all stay lists.
    if (tokens := arrays.get("tokens")) is None or None in arrays.values():
        return None
    num_tokens, logprobs, loss_mask = len(tokens) // 4, arrays.get("logprobs"), arrays.get("loss_mask")
    allowed = {num_tokens, response_length(value_of(fields.get("response_length")), num_tokens)}
    if any(len(data or b"") // ITEM_SIZES[name] not in allowed for name, data in arrays.items()):
        return None
    rest = {name: raw for name, raw in fields.items() if name not in arrays}
    return _Arrays(tokens, logprobs, loss_mask, _encode(rest))


def _list_bytes(raw: msgspec.Raw, name: str) -> bytes | None:
    values = value_of(raw)
    if not isinstance(values, list):
        return None
    return number_bytes(values, TYPE_CODES[name])


def columns(rows: Sequence[TokenRow[P]], group_sizes: Iterable[int], rest: Sequence[bytes]) -> list[TensorColumn[P]]:
    """Make the tensors of a batch, those with larger items first.

    ``offsets`` [num_rows + 1] has the start of each row's tokens in ``tokens``, ``logprobs`` and ``loss_mask``.
    ``group_index``, ``weight_version``, ``response_length``, ``rewards``, ``raw_rewards`` and ``has_logprobs`` are
    [num_rows]; ``rest`` is JSON.
    """
    num_rows, offsets = len(rows), [*accumulate(map(attrgetter("num_tokens"), rows), initial=0)]
    group_index = chain.from_iterable([number] * size for number, size in enumerate(group_sizes))
    return [
        # Larger items first, so that each tensor begins at a multiple of its item size.
        TensorColumn("offsets", "I64", num_rows + 1, [array("q", offsets).tobytes()]),
        TensorColumn("group_index", "I64", num_rows, [array("q", group_index).tobytes()]),
        _numbers("weight_version", "I64", "weight_version", rows),
        _numbers("response_length", "I64", "response_length", rows),
        _numbers("rewards", "F64", "reward", rows),
        _numbers("raw_rewards", "F64", "raw_reward", rows),
        TensorColumn("tokens", "I32", offsets[-1], [row.tokens for row in rows]),
        TensorColumn("logprobs", "F32", offsets[-1], [piece for row in rows for piece in row.logprobs]),
        TensorColumn("loss_mask", "U8", offsets[-1], [piece for row in rows for piece in row.loss_mask]),
        TensorColumn("has_logprobs", "U8", num_rows, [bytes(row.has_logprobs for row in rows)]),
        TensorColumn("rest", "U8", sum(map(len, rest)), rest),
    ]


def _numbers(name: str, dtype: Literal["I64", "F64"], field: str, rows: Sequence[TokenRow[P]]) -> TensorColumn[P]:
    values: array[Any] = array(_CODES[dtype], map(attrgetter(field), rows))
    return TensorColumn(name, dtype, len(rows), [values.tobytes()])
