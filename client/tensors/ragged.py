"""The concatenated arrays of all rows of a batch, whether it was read as JSON or as tensors."""

import warnings
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from forebay.client.calls.flow import read_json
from forebay.client.model import Batch, Row
from forebay.client.sample_writer.encode import encode_sample
from forebay.core.batch_tensors import Piece, TokenRow, columns, token_row
from forebay.core.binary_sample import check_arrays, is_binary, unpack
from forebay.core.errors import InvalidInput, MissingExtra
from forebay.core.parts import numpy_module
from forebay.core.safetensors_format import NUMPY_TYPES, Dtype, Tensor, read_blob

if TYPE_CHECKING:
    import numpy
    import torch


class Ragged:
    """The arrays of all rows, concatenated."""

    def __init__(self, views: Mapping[str, Tensor]) -> None:
        self._views = views

    @classmethod
    def of(cls, samples: Batch | Sequence[Row]) -> "Ragged":
        if isinstance(samples, Batch):
            if samples.content:
                return cls(read_blob(samples.content))
            return cls._of_rows(samples.rows, samples.group_sizes)
        return cls._of_rows(samples, [len(list(rows)) for _, rows in groupby(samples, _group_key)])

    @classmethod
    def _of_rows(cls, rows: Sequence[Row], group_sizes: Sequence[int]) -> "Ragged":
        made = [_encoded(row) for row in rows]
        rest = b'{"data":[' + b",".join(row.rest for row in made) + b"]}"
        made_columns = columns(made, group_sizes, [rest])
        return cls({each.name: Tensor(each.dtype, (each.num_items,), b"".join(each.pieces)) for each in made_columns})

    @cached_property
    def rows(self) -> list[Row]:
        """The samples without their arrays."""
        rows: list[Row] = read_json(self._views["rest"].data)["data"]
        return rows

    def tensor(self, name: str) -> "torch.Tensor":
        """One of the tensors, as a view of the received bytes."""
        torch = torch_module()
        view = self._views[name]
        dtype = _torch_type(view.dtype)
        if not view.data:  # torch rejects an empty buffer
            return torch.empty(0, dtype=dtype)
        # torch warns about read-only memory, such as a reply. Nothing is written to it without a copy.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return torch.frombuffer(view.data, dtype=dtype)

    def numpy(self, name: str) -> "numpy.ndarray[Any, Any]":
        """One of the tensors as a NumPy array, a read-only view of the received bytes."""
        view = self._views[name]
        made: numpy.ndarray[Any, Any] = numpy_module().frombuffer(view.data, NUMPY_TYPES[view.dtype])
        return made

    def numbers(self, name: str, code: str) -> "array[Any]":
        """One of the tensors as an array of type ``code``, without torch."""
        values: array[Any] = array(code)
        values.frombytes(self._views[name].data)
        return values

    def split(self, name: str) -> "list[torch.Tensor]":
        """The array ``name`` of each row."""
        lengths = self.tensor("offsets").diff().tolist()
        return list(self.tensor(name).split(lengths)) if lengths else []


def _encoded(row: Row) -> TokenRow[Piece]:
    body = encode_sample(row)
    if is_binary(body):
        check_arrays(unpack(body))
    return token_row((body,))


def check_without_tokens(row: Row) -> None:
    """Raise ``InvalidInput`` if a row has invalid arrays, which must not be treated as missing ones."""
    if row.get("tokens"):  # the encoder left them as JSON because their values do not fit
        hint = "tokens are integers, logprobs numbers, loss_mask 0 or 1; see docs/tensors.md for their lengths"
        raise InvalidInput(f"the arrays of sample {row.get('uid')!r} are invalid", hint=hint, field="tokens")


def _group_key(row: Row) -> tuple[object, object]:
    # Not encoded: 1 and 1.0 are ids of the same instance.
    return row.get("instance_id"), row.get("epoch")


def _torch_type(dtype: Dtype) -> "torch.dtype":
    torch = torch_module()
    kinds = {"I64": torch.int64, "F64": torch.float64, "I32": torch.int32, "F32": torch.float32, "U8": torch.uint8}
    return kinds[dtype]


def torch_module() -> Any:
    """torch, imported where it is used. Raises ``MissingExtra``."""
    try:
        import torch
    except ImportError:
        raise MissingExtra("torch", "torch") from None
    return torch
