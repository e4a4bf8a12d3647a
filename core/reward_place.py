"""Where a body has its reward, and another reward in that place."""

import ctypes
from functools import lru_cache

import msgspec

from forebay.core.binary_sample import is_binary, json_start

Parts = tuple[bytes | memoryview, ...]
"""A body in pieces that are copied once, when they are sent."""

Span = tuple[int, int]
"""Where a reward's number begins and ends in its body."""

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


class _Buffer(ctypes.Structure):
    """Python's ``Py_buffer``, as its stable ABI lays it out."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("owner", ctypes.py_object),
        ("num_bytes", ctypes.c_ssize_t),
        ("item_size", ctypes.c_ssize_t),
        ("is_readonly", ctypes.c_int),
        ("num_dimensions", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_Buffer),)
_release_buffer.restype = None


def find_field(body: bytes, field: msgspec.Raw) -> Span | None:
    """Where ``field`` stands in the ``body`` that it was decoded from.

    The decoder has found the field already, wherever it stands and however its key is spelt, and what it hands out is a
    view of the body: so the distance of two addresses says where, and nothing is read a second time (2 µs, whatever the
    size). None if ``field`` is a copy.
    """
    start = _address(field) - _address(body)
    text = bytes(field)
    # Nothing but this comparison has to be believed: a view of something else cannot pass for a place in the body.
    is_there = start > 0 and body[start : start + len(text)] == text
    return (start, start + len(text)) if is_there else None


def _address(readable: bytes | msgspec.Raw) -> int:
    buffer = _Buffer()
    _get_buffer(readable, buffer, 0)
    address: int = buffer.address
    _release_buffer(buffer)
    return address


def set_reward(body: bytes | memoryview, span: Span | None, reward: float | None, raw_reward: float | None) -> Parts:
    """``body`` with its reward replaced, and ``raw_reward`` set unless None. Everything else stays byte for byte.

    ``span`` is what ``find_field`` says; without one the body is decoded one level deep and encoded again.
    """
    if span is None:
        return (_set_reward_slowly(bytes(body), reward, raw_reward),)
    start, end = span
    # Slices of a view copy nothing; those of bytes would, megabytes for each row.
    view = body if isinstance(body, memoryview) else memoryview(body)
    return view[:start], rewards_text(reward, raw_reward), view[end:]


# Most rewards of a batch are among a few numbers, and each is written once for every row.
@lru_cache(maxsize=4_096)
def rewards_text(reward: float | None, raw_reward: float | None) -> bytes:
    """What stands in a row in the place of the reward's number."""
    return _encode(reward) if raw_reward is None else b'%b,"raw_reward":%b' % (_encode(reward), _encode(raw_reward))


def _set_reward_slowly(body: bytes, reward: float | None, raw_reward: float | None) -> bytes:
    if is_binary(body):
        start = json_start(body)
        return b"".join((body[:start], _set_reward_slowly(body[start:], reward, raw_reward)))
    fields = _decode_fields(body)
    fields["reward"] = msgspec.Raw(_encode(reward))
    if raw_reward is not None:
        fields["raw_reward"] = msgspec.Raw(_encode(raw_reward))
    return _encode(fields)
