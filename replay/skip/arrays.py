"""Arrays of NumPy and tensors of torch as bytes, and back, without a copy; neither is imported before it is met."""

import sys
from typing import Any, NamedTuple

from forebay.core.errors import MissingExtra
from forebay.core.safetensors_format import AnyDtype, Tensor

_NUMPY_NAMES: dict[AnyDtype, str] = {
    "BOOL": "bool", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64",
    "F16": "float16", "F32": "float32", "F64": "float64", "C64": "complex64",
}  # fmt: skip
_TORCH_NAMES: dict[AnyDtype, str] = {
    **_NUMPY_NAMES, "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
_OF_NUMPY: dict[str, AnyDtype] = {name: dtype for dtype, name in _NUMPY_NAMES.items()}
_OF_TORCH: dict[str, AnyDtype] = {f"torch.{name}": dtype for dtype, name in _TORCH_NAMES.items()}
_SCALARS = frozenset(_OF_NUMPY) - {"complex64"} | {"str_"}


class ObjectArray(NamedTuple):
    """An array of NumPy whose items are Python objects, or texts."""

    dtype: str
    shape: tuple[int, ...]
    items: list[Any]


class Scalar(NamedTuple):
    """One item of an array of NumPy."""

    dtype: str
    value: Any


def of_numpy(value: Any) -> Tensor | ObjectArray | Scalar | None:
    """None for what is not NumPy's, and for types that have no form: dates, records, classes derived from arrays."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.generic):
        name = type(value).__name__ if isinstance(value, numpy.str_) else value.dtype.name
        return Scalar(name, value.item()) if name in _SCALARS else None
    if type(value) is not numpy.ndarray:
        return None
    if value.dtype.kind in "OU":
        name = "O" if value.dtype.kind == "O" else f"<U{value.dtype.itemsize // 4}"
        return ObjectArray(name, value.shape, list(value.reshape(-1)) if name == "O" else value.reshape(-1).tolist())
    if value.dtype.name not in _OF_NUMPY:
        return None
    flat = numpy.ascontiguousarray(value, value.dtype.newbyteorder("<")).reshape(-1)
    return Tensor(_OF_NUMPY[value.dtype.name], value.shape, flat.view(numpy.uint8).data)


def of_torch(value: Any) -> Tensor | None:
    """None for what is no dense tensor of torch."""
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not torch.Tensor:
        return None
    is_dense = value.layout == torch.strided and not value.is_nested and value.device.type != "meta"
    if not is_dense or str(value.dtype) not in _OF_TORCH:
        return None
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return Tensor(_OF_TORCH[str(value.dtype)], tuple(value.shape), plain.reshape(-1).view(torch.uint8).numpy().data)


def to_numpy(tensor: Tensor) -> Any:
    """The array, over the same bytes."""
    numpy = numpy_module()
    return numpy.frombuffer(tensor.data, numpy.dtype(_NUMPY_NAMES[tensor.dtype])).reshape(tensor.shape)


def to_object_array(array: ObjectArray) -> Any:
    """The array of these items."""
    made = numpy_module().empty(len(array.items), array.dtype)
    # One by one: items that are lists would become further dimensions.
    for number, item in enumerate(array.items):
        made[number] = item
    return made.reshape(array.shape)


def to_scalar(scalar: Scalar) -> Any:
    """The scalar; ``KeyError`` for a type that none is stored of."""
    if scalar.dtype not in _SCALARS:
        raise KeyError(scalar.dtype)
    numpy = numpy_module()
    return numpy.bool_(scalar.value) if scalar.dtype == "bool" else getattr(numpy, scalar.dtype)(scalar.value)


def to_torch(tensor: Tensor) -> Any:
    """The tensor, over the same bytes, on the CPU."""
    try:
        import torch
    except ImportError:
        raise MissingExtra("torch", "torch") from None
    dtype = getattr(torch, _TORCH_NAMES[tensor.dtype])
    if not tensor.data:  # torch refuses a buffer of no bytes
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(tensor.data, dtype=dtype).reshape(tensor.shape)


def numpy_module() -> Any:
    """NumPy, or ``MissingExtra``."""
    try:
        import numpy
    except ImportError:
        raise MissingExtra("numpy", "torch") from None
    return numpy
