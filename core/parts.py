"""Parts and side arrays: immutable bytes stored beside the samples of a group, and the rows that samples name in them.

A part is a safetensors blob with arrays, or any other bytes. Samples name parts by digest. In a request, a frame of a
part (``NamedPart``) stands before the samples that name it. An array has one row for each token that it covers; the
sample's JSON says where these rows are::

    "parts": ["9f0c…", "03ab…"],
    "arrays": {"routed_experts": {"dtype": "U8", "shape": [384], "rows": [[0, 0, 0, 812], [1, 0, 812, 1650]]}}

Each entry of ``rows`` has the number of the part, the first row in the part's tensor of that name, the first token, and
the token after the last. In a ragged array (``shape`` is ``[null]``) each row has any number of items: the tensor is
flat, and the tensor ``NAME.lengths`` (I32) has the number of items of each row.
"""

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from forebay.core.binary_sample import Field
from forebay.core.errors import Conflict, InvalidInput, MissingExtra, NotFound
from forebay.core.safetensors_format import ITEM_BYTES, NUMPY_TYPES, Dtype, Tensor, blob_head, read_blob

if TYPE_CHECKING:
    import numpy
    from numpy.typing import DTypeLike

MAGIC = b"\xf8FBP"
"""Begins a part's frame in a request of samples; then follow the digest and the bytes."""
PARTS_TYPE = "application/vnd.forebay.parts"
"""Content type of a reply with parts, each after its length (``PART_LENGTH``)."""
PART_LENGTH = struct.Struct("<Q")
DIGEST_BYTES = 16
MAX_ARRAYS = 16
"""Arrays that a sample may have."""
MAX_HEADER_BYTES = 1 << 20
"""Maximum length of the JSON in a part that has arrays."""
IMAGE_URL = "forebay-part:"
"""Begins the URL of an image in a message that is a part; its digest follows."""
LENGTHS = ".lengths"
"""Ends the name of the tensor with the number of items of each row of a ragged array."""

_HEAD_BYTES = len(MAGIC) + DIGEST_BYTES
_is_name = re.compile(r"[a-z][a-z0-9_]{0,63}").fullmatch
_is_digest = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}").fullmatch

Tensors = Mapping[str, Tensor]
"""The tensors of a part, by name."""
Stretch = tuple[int, int, int, int]
"""Number of the part, first row in its tensor, first token, and the token after the last."""


class PartNotFound(NotFound):
    """The batch or the group has no part with this digest."""

    code = "part_not_found"


class PartsGone(Conflict):
    """Retention has removed parts of samples."""

    code = "parts_gone"


class ArrayRows(msgspec.Struct, frozen=True):
    """Where the rows of one array of a sample are: the value of ``arrays[NAME]`` in its JSON."""

    dtype: Dtype
    shape: tuple[int | None, ...]
    """Shape of one row; ``[null]`` for a ragged array."""
    rows: list[Stretch]
    """In the order of tokens."""

    @property
    def is_ragged(self) -> bool:
        """Whether rows have different numbers of items."""
        return self.shape == (None,)


class SideArrays(NamedTuple):
    """The fields ``parts`` and ``arrays`` of a sample."""

    digests: Sequence[str] = ()
    arrays: Mapping[str, ArrayRows] = {}


NO_ARRAYS = SideArrays()


class Rows(NamedTuple):
    """One side array of a sample. Row i of ``data`` belongs to the i-th of the tokens that ``tokens`` lists."""

    data: "numpy.ndarray[Any, Any]"
    """[rows, \\*shape]; of a ragged array all items, [items]."""
    tokens: Sequence[tuple[int, int]]
    """The tokens that have rows, in order: the first of each stretch, and the one after its last."""
    lengths: "numpy.ndarray[Any, Any] | None" = None
    """Number of items of each row of a ragged array [rows]; otherwise None."""

    def dense(self, num_tokens: int, fill: float = -1, dtype: "DTypeLike | None" = None) -> "numpy.ndarray[Any, Any]":
        """Return one row per token [num_tokens, \\*shape], with ``fill`` where a row is missing.

        Without ``dtype``, the array keeps its type if ``fill`` fits; otherwise it gets a wider one. Raises
        ``InvalidInput`` for a ragged array.
        """
        np = numpy_module()
        if self.lengths is not None:
            raise InvalidInput("a ragged array has no dense form", hint="use csr")
        if dtype is None:
            fits = np.asarray(fill).astype(self.data.dtype) == fill
            dtype = self.data.dtype if fits else np.result_type(self.data, np.min_scalar_type(fill))
        made: numpy.ndarray[Any, Any] = np.full((num_tokens, *self.data.shape[1:]), fill, dtype)
        made[self._has_row(num_tokens)] = self.data
        return made

    def csr(self, num_tokens: int, start: int = 0) -> "tuple[numpy.ndarray[Any, Any], numpy.ndarray[Any, Any]]":
        """Return the items of the tokens from ``start`` on, and their offsets [num_tokens - start + 1] (int32).

        A token without a row has no items. This is the form of kept sets in slime and vLLM. Raises ``InvalidInput``
        for an array that is not ragged.
        """
        np = numpy_module()
        if self.lengths is None:
            raise InvalidInput("only a ragged array has offsets", hint="use dense")
        counts = np.zeros(num_tokens, np.int32)
        counts[self._has_row(num_tokens)] = self.lengths
        offsets = np.zeros(num_tokens - start + 1, np.int32)
        counts[start:].cumsum(out=offsets[1:])
        return self.data[len(self.data) - offsets[-1] :], offsets

    def _has_row(self, num_tokens: int) -> "numpy.ndarray[Any, Any]":
        found: numpy.ndarray[Any, Any] = numpy_module().zeros(num_tokens, bool)
        for first, end in self.tokens:
            found[first:end] = True
        return found


class NamedPart(NamedTuple):
    """A part by its digest, which is computed once for all samples that share it."""

    digest: str
    """The first 16 bytes of the SHA-256 of its bytes, in hexadecimal."""
    frame: bytes
    """Its frame in a request of samples (``join_samples``)."""

    @classmethod
    def of(cls, *pieces: bytes | memoryview) -> "NamedPart":
        """The part made of these pieces, which are copied once."""
        digest = bytes.fromhex(digest_of(*pieces))
        return cls(digest.hex(), b"".join((MAGIC, digest, *pieces)))

    @classmethod
    def read(cls, frame: bytes) -> "NamedPart":
        """The part in a frame, with the digest that the frame states."""
        return cls(read_part_frame(frame)[0], frame)

    @property
    def data(self) -> memoryview:
        """Its bytes."""
        return read_part_frame(self.frame)[1]


def digest_of(*pieces: bytes | memoryview) -> str:
    """The name of the part made of these pieces."""
    made = sha256()
    for piece in pieces:
        made.update(piece)
    return made.digest()[:DIGEST_BYTES].hex()


def is_part_frame(frame: bytes | memoryview) -> bool:
    """Whether a frame of a request is a part."""
    return frame[: len(MAGIC)] == MAGIC


def read_part_frame(frame: bytes | memoryview) -> tuple[str, memoryview]:
    """The digest that a frame states, and its part."""
    view = memoryview(frame)
    return bytes(view[len(MAGIC) : _HEAD_BYTES]).hex(), view[_HEAD_BYTES:]


def pack_arrays(tensors: Tensors) -> NamedPart:
    """Make a part of these tensors, each of the shape ``(rows, *shape of a row)``."""
    # Larger items first, so that each tensor begins at a multiple of its item size.
    ordered = sorted(tensors.items(), key=lambda named: -ITEM_BYTES[named[1].dtype])
    head = blob_head([(name, each.dtype, each.shape) for name, each in ordered], {"format": "forebay"})
    return NamedPart.of(head, *(each.data for _, each in ordered))


def read_fields(parts: Field, arrays: Field) -> SideArrays:
    """Decode the fields ``parts`` and ``arrays`` of a sample's JSON. Raises ``InvalidInput`` that names the field."""
    if parts is arrays is msgspec.UNSET:
        return NO_ARRAYS
    digests: list[str] = _decoded(parts, list[str], "parts") or []
    if wrong := next((digest for digest in digests if not _is_digest(digest)), None):
        raise _wrong("parts", f"must be digests of 32 hexadecimal digits (got {wrong[:40]!r})")
    named: dict[str, msgspec.Raw] = _decoded(arrays, dict[str, msgspec.Raw], "arrays") or {}
    if len(named) > MAX_ARRAYS:
        raise _wrong("arrays", f"must have at most {MAX_ARRAYS} arrays (got {len(named)})")
    for name in named:
        if not _is_name(name):
            raise _wrong(f"arrays.{name[:80]}", "must have a name of 1 to 64 letters a to z, digits, underscores")
    return SideArrays(digests, {name: _decoded(raw, ArrayRows, f"arrays.{name}") for name, raw in named.items()})


def _decoded(raw: Field, kind: Any, field: str) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind) if isinstance(raw, msgspec.Raw) and bytes(raw) != b"null" else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _wrong(field, str(error)) from None


class CheckedPart(NamedTuple):
    """A part and what samples are checked against, which is counted once for all of them."""

    data: memoryview
    tensors: Tensors
    """Empty for a part that is not a safetensors blob."""
    ragged: Mapping[str, tuple[int, int]]
    """Of each ragged array, the number of its rows and of its items; -1 items if a row has less than none."""

    @classmethod
    def of(cls, data: memoryview) -> "CheckedPart":
        """Read a part and count its rows. For millions of rows this takes long; other threads can run meanwhile."""
        tensors = _tensors(data)
        lengths = {name: each for name, each in tensors.items() if name.endswith(LENGTHS) and each.dtype == "I32"}
        return cls(data, tensors, {name.removesuffix(LENGTHS): _counted(each.data) for name, each in lengths.items()})


def _tensors(part: memoryview) -> Tensors:
    if int.from_bytes(part[:8], "little") > MAX_HEADER_BYTES:
        return {}
    try:
        tensors = read_blob(part)
    except InvalidInput:
        return {}
    # Tensors that overlap could name the same bytes thousands of times.
    return tensors if sum(len(each.data) for each in tensors.values()) <= len(part) else {}


def _counted(lengths: bytes | memoryview) -> tuple[int, int]:
    view, total = memoryview(lengths).cast("i"), 0
    for count in view:  # not with ``sum``, within which no other thread runs
        if count < 0:
            return len(view), -1
        total += count
    return len(view), total


def check_arrays(fields: SideArrays, parts: Sequence[CheckedPart], num_tokens: int) -> None:
    """Raise ``InvalidInput`` unless every row exists and belongs to one of the tokens. Rows may be missing.

    ``parts`` has each part that ``fields`` names.
    """
    for name, given in fields.arrays.items():
        field, at = f"arrays.{name}", 0
        if not given.rows or not num_tokens:
            raise _wrong(field, f"must have rows, for a sample with tokens (got {num_tokens} tokens)")
        for number, first, start, end in given.rows:
            if not at <= start < end <= num_tokens:
                raise _wrong(field, f"tokens {start} to {end} must lie between {at} and {num_tokens}, in order")
            if not 0 <= number < len(parts):
                raise _wrong(field, f"part {number} must be one of {len(parts)} parts")
            num_rows = _num_rows(parts[number], name, given, field)
            if not 0 <= first <= num_rows - (end - start):
                raise _wrong(field, f"rows {first} to {first + end - start} must be among {num_rows} rows")
            at = end


def _num_rows(part: CheckedPart, name: str, given: ArrayRows, field: str) -> int:
    """Number of rows of an array in a part. Raises ``InvalidInput`` unless its tensors are as ``given`` says."""
    found = part.tensors.get(name)
    if found is None:
        raise _wrong(field, f"must be a tensor of its part, which has {sorted(part.tensors)[:MAX_ARRAYS]}")
    is_as_given = len(found.shape) == 1 if given.is_ragged else found.shape[1:] == given.shape and found.shape
    if found.dtype != given.dtype or not is_as_given:
        what = f"{given.dtype} of shape {[None, *given.shape[given.is_ragged :]]}"
        raise _wrong(field, f"its tensor must be {what} (got {found.dtype} of shape {list(found.shape)})")
    if not given.is_ragged:
        return found.shape[0]
    num_rows, num_items = part.ragged.get(name, (0, 0))
    if num_items != found.shape[0]:
        got = "a negative one" if num_items < 0 else num_items
        raise _wrong(field, f"{name}{LENGTHS} (I32) must add up to {found.shape[0]} items (got {got})")
    return num_rows


def gather_rows(fields: SideArrays, parts: Mapping[str, Tensors], names: Iterable[str]) -> dict[str, Rows]:
    """Put the rows of these arrays of a sample together, from its parts by digest. It may lack some of ``names``."""
    named = [parts.get(digest, {}) for digest in fields.digests]
    return {name: _rows(fields.arrays[name], name, named) for name in names if name in fields.arrays}


def _rows(given: ArrayRows, name: str, parts: Sequence[Tensors]) -> Rows:
    data, lengths, tokens = [], [], list[tuple[int, int]]()
    for number, first, start, end in given.rows:
        part, at, size = parts[number], first, end - start
        if given.is_ragged:
            counts = _as_numpy(part[name + LENGTHS])
            lengths.append(counts[first : first + size])
            at, size = int(counts[:first].sum()), int(lengths[-1].sum())
        data.append(_as_numpy(part[name])[at : at + size])
        # Adjacent stretches are one to their reader.
        joined = tokens.pop()[0] if tokens and tokens[-1][1] == start else start
        tokens.append((joined, end))
    return Rows(_joined(data), tokens, _joined(lengths) if given.is_ragged else None)


def _joined(pieces: "list[numpy.ndarray[Any, Any]]") -> Any:
    # Most arrays are in one piece, which stays a view of the reply.
    return pieces[0] if len(pieces) == 1 else numpy_module().concatenate(pieces)


def _as_numpy(tensor: Tensor) -> "numpy.ndarray[Any, Any]":
    made: numpy.ndarray[Any, Any] = numpy_module().frombuffer(tensor.data, NUMPY_TYPES[tensor.dtype])
    return made.reshape(tensor.shape)


def _wrong(field: str, what: str) -> InvalidInput:
    return InvalidInput(f"{field}: {what}", field=field)


def numpy_module() -> Any:
    """NumPy, imported where it is used. Raises ``MissingExtra``."""
    try:
        import numpy
    except ImportError:
        raise MissingExtra("numpy", "torch") from None
    return numpy
