"""Dumps of verl's ``DataProto``, and dumps written by verl: trainers need ``import forebay.replay.skip.verl``.

The import registers codecs for ``DataProto``, ``TensorDict`` and the values in them. A dump is not trusted: loading it
never creates objects of a class named only in the dump, not even from verl's pickles.
"""

import dataclasses
import importlib
import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy
import torch
from PIL import Image
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.protocol import DataProto

from forebay.replay.skip.values import Entries, register_codec

_PLAIN: dict[type, type] = {each: each for each in (str, bytes, int, float, list, tuple, set, frozenset)}
_PLAIN |= {bytearray: bytes, Mapping: dict, Sequence: list}


def plain_form(value: Any) -> tuple[Any, str] | None:
    """The value to store in place of ``value``, and the name of the loaded type if it differs; None if impossible."""
    if isinstance(value, Image.Image):
        return value.copy(), ""  # an opened file has a class of its own
    if isinstance(value, Enum):
        return value.value, "its value"
    for base, kind in _PLAIN.items():
        if isinstance(value, base):
            return kind(value), kind.__name__
    if dataclasses.is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}, "dict"
    return (value.model_dump(), "dict") if hasattr(value, "model_dump") else None


def _of_data_proto(data: Any) -> dict[str, Any]:
    entries = {name: Entries(getattr(data, name), plain_form) for name in ("non_tensor_batch", "meta_info")}
    return {"batch": data.batch, **entries}


def _of_tensor_dict(tensors: Any) -> dict[str, Any]:
    return {"batch_size": tuple(tensors.batch_size), "tensors": Entries(dict(tensors.items()), plain_form)}


def _of_image(image: Any) -> bytes:
    image.save(file := io.BytesIO(), "PNG", compress_level=1)
    return file.getvalue()


_JAGGED = type(torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged))

register_codec(DataProto, _of_data_proto, lambda tree: DataProto(**tree))
register_codec(TensorDict, _of_tensor_dict, lambda tree: TensorDict(tree["tensors"], batch_size=tree["batch_size"]))
register_codec(NonTensorData, lambda v: (v.data, tuple(v.batch_size)), lambda t: NonTensorData(t[0], batch_size=t[1]))
register_codec(NonTensorStack, lambda stack: stack.tolist(), NonTensorStack.from_list)
register_codec(_JAGGED, list, lambda rows: torch.nested.as_nested_tensor(rows, layout=torch.jagged))
register_codec(Image.Image, _of_image, lambda png: Image.open(io.BytesIO(png), formats=["PNG"]).copy())
register_codec(OrderedDict, lambda value: list(value.items()), OrderedDict)
register_codec(datetime, datetime.isoformat, datetime.fromisoformat)
for _kind in (UUID, type(Path()), torch.device):
    register_codec(_kind, str, _kind)


def read_gen_batch(path: Path) -> Any:
    """The ``DataProto`` in a ``gen_batch.dp``. Raises ``pickle.UnpicklingError`` if the file names anything else."""
    with path.open("rb") as file:
        state = _Reader(file).load().state
    # The only function named in verl's files: it builds a TensorDict from bytes and numbers, and nothing else.
    rebuild = importlib.import_module("tensordict._reductions")._rebuild_tensordict_files_consolidated
    with torch.serialization.safe_globals([rebuild]):
        batch = torch.load(io.BytesIO(state[0]), map_location="cpu", weights_only=True)
    return DataProto(batch, {key: numpy.asarray(array) for key, array in state[1].items()}, state[2])


class _DataProto:
    """The state of a ``DataProto``."""

    def __setstate__(self, state: tuple[bytes, Any, Any]) -> None:
        self.state = state


class _Dtype:
    """An array type, parsed from its name alone: NumPy would trust the flags in a pickle."""

    def __init__(self, name: str, *_: object) -> None:
        if not re.fullmatch("[biufcSUO][0-9]+", name):
            raise pickle.UnpicklingError(f"it contains an array of the unsupported type {name}")
        self.dtype = numpy.dtype(name)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array(numpy.ndarray[Any, Any]):
    """An array whose type does not come from the pickle."""

    def __new__(cls, *_: object) -> "_Array":
        return super().__new__(cls, 0)

    def __setstate__(self, state: Any, /) -> None:
        version, shape, dtype, is_fortran, data = state
        super().__setstate__((version, shape, dtype.dtype, is_fortran, data))


_STAND_INS = {
    "verl.protocol.DataProto": _DataProto,
    "numpy.ndarray": _Array,
    "numpy.dtype": _Dtype,
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray.scalar": lambda dtype, data: numpy.frombuffer(data, dtype.dtype)[0],
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        found = _STAND_INS.get(f"{module}.{name}".replace("numpy.core.", "numpy._core."))
        if found is None:
            raise pickle.UnpicklingError(f"it contains {module}.{name}; only tensors, arrays, texts and numbers load")
        return found
