"""The safetensors format: https://github.com/huggingface/safetensors#format

The header's length as 8 bytes, the header in JSON, then the bytes of all tensors; everything is little-endian.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec

from forebay.core.errors import InvalidInput

TENSORS_TYPE = "application/vnd.safetensors"
"""Content type of a batch as tensors."""

Dtype = Literal[
    "I64", "U64", "F64", "I32", "U32", "F32", "I16", "U16", "F16", "BF16", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"
]  # fmt: skip
"""Tensor types."""
_NAMES = ["<i8", "<u8", "<f8", "<i4", "<u4", "<f4", "<i2", "<u2", "<f2", "<u2", "|i1", "|u1", "|b1", "|u1", "|u1"]
NUMPY_TYPES: dict[Dtype, str] = dict(zip(get_args(Dtype), _NAMES, strict=True))
"""NumPy's names of the types. It has no ``BF16`` and no ``F8``: there the bits are unsigned integers."""
ITEM_BYTES: dict[Dtype, int] = {dtype: int(name[2]) for dtype, name in NUMPY_TYPES.items()}

_LENGTH = struct.Struct("<Q")


class TensorInfo(msgspec.Struct):
    """One entry of the header. ``data_offsets`` are in bytes from the end of the header."""

    dtype: Dtype
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Tensor(NamedTuple):
    """A tensor and its bytes, in C order."""

    dtype: Dtype
    shape: tuple[int, ...]
    data: bytes | memoryview


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def blob_head(tensors: Sequence[tuple[str, Dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Make the bytes before ``tensors``, given in the same order as name, type and shape.

    Larger types must come first, so that each tensor starts at a multiple of its item size.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, dtype, shape in tensors:
        end = at + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = TensorInfo(dtype, shape, (at, end))
        at = end
    encoded = _encode(header)
    # The format allows spaces after the header, so that the tensors begin at a multiple of the largest item size.
    encoded += b" " * (-len(encoded) % 8)
    return _LENGTH.pack(len(encoded)) + encoded


def read_blob(blob: bytes | bytearray | memoryview) -> dict[str, Tensor]:
    """Read the tensors of a blob, as views of it. Raises ``InvalidInput`` if it is not one."""
    view = memoryview(blob)
    try:
        start = _LENGTH.size + _LENGTH.unpack_from(view)[0]
        header = _decode(view[_LENGTH.size : start])
        # The only entry that is not a tensor.
        header.pop("__metadata__", None)
        infos = {name: msgspec.json.decode(raw, type=TensorInfo) for name, raw in header.items()}
    except (struct.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"this is not a batch of tensors: {error}", field="body") from None
    return {name: _view(view[start:], name, info) for name, info in infos.items()}


def _view(buffers: memoryview, name: str, info: TensorInfo) -> Tensor:
    start, end = info.data_offsets
    # Checked here, because slicing a view beyond its end silently gives a shorter tensor.
    is_whole = 0 <= start <= end <= len(buffers) and min(info.shape, default=0) >= 0
    if not is_whole or end - start != math.prod(info.shape) * ITEM_BYTES[info.dtype]:
        raise InvalidInput(f"the tensor {name} is incomplete", field=name)
    return Tensor(info.dtype, info.shape, buffers[start:end])


def is_blob(content: bytes) -> bool:
    """Whether a reply is a batch as tensors: the high bytes of its header's length are 0, unlike in JSON text."""
    return content[5:9] == b"\0\0\0{"


def blob_json(content: bytes) -> bytes:
    """The rows of a batch as in a JSON reply, but without their arrays. Raises ``InvalidInput``."""
    views = read_blob(content)
    if "rest" not in views:
        raise InvalidInput("these tensors are not a batch", field="rest")
    return bytes(views["rest"].data)
