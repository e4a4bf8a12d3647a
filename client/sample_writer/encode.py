"""Encoding of samples for a write: token arrays as raw numbers, everything else as JSON."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from forebay.core.binary_sample import SAMPLES_TYPE, TYPE_CODES, join_samples, number_bytes, pack

__all__ = ["SAMPLES_TYPE", "encode_sample", "join_samples"]

_NUMPY_TYPES = {"i": "<i4", "f": "<f4", "B": "u1"}


def encode_sample(sample: Mapping[str, Any]) -> bytes:
    """Encode ``sample`` as the body of a write: binary if it has ``tokens``, else JSON.

    ``tokens`` (int32), ``logprobs`` (float32; None becomes NaN) and ``loss_mask`` (0 to 255, also as floats) may be
    lists, NumPy arrays or torch tensors of one dimension. A sample in which one of them has other values is sent
    unchanged as JSON. Raises ``TypeError`` if the sample is not representable in JSON.
    """
    # An array whose values do not fit is None here. Then all arrays go as JSON: the buffer judges the whole sample.
    arrays = {
        name: array_bytes(sample[name], code) for name, code in TYPE_CODES.items() if sample.get(name) is not None
    }
    tokens = arrays.get("tokens")
    if tokens is None or None in arrays.values():
        return _json(dict(sample))
    rest = {name: value for name, value in sample.items() if name not in arrays}
    return pack(_json(rest), tokens, arrays.get("logprobs"), arrays.get("loss_mask"))


def _json(fields: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(fields, enc_hook=_as_list)
    except (ValueError, RecursionError) as error:  # a lone surrogate, an infinite number, nesting too deep
        raise TypeError(f"sample {fields.get('uid')!r} is not representable in JSON: {error}") from error


def array_bytes(values: Any, code: str) -> bytes | None:
    """The bytes of a sequence, NumPy array or tensor as an array of type ``code``; None if its values do not fit."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        return None
    if hasattr(values, "detach"):
        values = plain_tensor(values)
    if (data := _same_type(values, code)) is not None:
        return data
    if hasattr(values, "astype"):
        return _numpy_bytes(values, code)
    return number_bytes(values, code)


def _same_type(values: Any, code: str) -> bytes | None:
    """The bytes of an array that already has this type, without examining its items; None for any other."""
    try:
        view = memoryview(values)
    except TypeError:
        return None
    return view.tobytes() if view.format == code and view.ndim == 1 else None


def plain_tensor(tensor: Any) -> Any:
    """A torch tensor as a NumPy array, or as a list if NumPy is not installed."""
    tensor = tensor.detach().cpu()
    if tensor.is_floating_point():
        tensor = tensor.float()  # NumPy has no bfloat16
    try:
        return tensor.numpy()
    except RuntimeError:
        return tensor.tolist()


def _numpy_bytes(values: Any, code: str) -> bytes | None:
    if values.ndim != 1 or values.dtype.kind not in "biuf":
        return None
    if code != "f" and values.dtype.kind == "f":  # a loss mask of floats: only whole numbers fit
        return number_bytes(values.tolist(), code)
    # astype wraps numbers that are too large without a warning.
    converted = values.astype(_NUMPY_TYPES[code])
    if code != "f" and not (converted == values).all():
        return None
    return bytes(converted.tobytes())


def _as_list(value: Any) -> object:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not a JSON value")
