"""Batches as padded torch tensors.

A batch that was read with ``as_tensors`` comes as one blob with the arrays of all rows, one row after the other; any
other samples are encoded the same way first (``_Ragged``). ``collate`` splits the arrays by row, makes tokens for rows
without (``tokenize.py``), masks those of older weights (``older_tokens.py``), and pads all to one length (``_Padder``).
``numpy_arrays`` gives the arrays as they came. torch and NumPy are imported where they are used: a trainer that wants
neither needs neither.
"""

import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from forebay.client.calls.flow import read_json
from forebay.client.model import Batch, Row
from forebay.client.sample_writer.encode import encode_sample
from forebay.client.tensors.older_tokens import without_older
from forebay.client.tensors.tokenize import Tokenizer, chat_tokens
from forebay.core.batch_tensors import Piece, TokenRow, columns, token_row
from forebay.core.binary_sample import check_arrays, is_binary, unpack
from forebay.core.errors import InvalidInput, MissingExtra
from forebay.core.safetensors_format import Dtype, View, read_blob

if TYPE_CHECKING:
    import numpy
    import torch

Side = Literal["left", "right"]
"""The end at which rows are padded, or lose tokens."""


def collate(
    samples: Batch | Sequence[Row],
    pad_token_id: int,
    *,
    max_length: int | None = None,
    padding_side: Side = "right",
    truncate: Side = "right",
    tokenizer: Tokenizer | None = None,
    chat_template: str | None = None,
    min_weight_version: int | None = None,
) -> dict[str, "torch.Tensor"]:
    """The samples of a batch, or any others, as tensors of B rows and T columns. T is the length of the longest.

    ======================  =======  =======  ====================================================================
    ``tokens``              int64    [B, T]   ``pad_token_id`` where there is none
    ``attention_mask``      bool     [B, T]   where there are tokens
    ``loss_mask``           bool     [B, T]   which tokens are trained on
    ``logprobs``            float32  [B, T]   of the engine that sampled the tokens; NaN for a token that is trained on
                                              and came without, 0 for others
    ``rewards``             float32  [B]      ``reward``; NaN if there is none
    ``group_index``         int64    [B]      which group of the batch a row belongs to, from 0
    ``weight_version``      int64    [B]      the oldest that the sample names; -1 if it names none
    ``retokenized``         bool     [B]      whether the tokens were made of the messages
    ======================  =======  =======  ====================================================================

    A row longer than ``max_length`` loses its end, with ``truncate="left"`` its beginning. A sample without tokens is
    tokenised with ``tokenizer``, one of the transformers package, and its chat template, or ``chat_template``; its loss
    mask is 1 for what the assistant said. Tokens that are there are never made anew. Without a loss mask, the last
    ``response_length`` tokens are trained on, or all where the sample does not tell that number. The groups of samples
    that are no ``Batch`` are told apart by their ``instance_id`` and ``epoch``, as long as these stay the same.

    With ``min_weight_version`` no token is trained on that older weights sampled, as the sample's ``token_spans`` tell,
    or where it has none its ``weight_version``: a sample that names an older one among several is then not trained on
    at all. A sample that names no version is left as it is.

    Raises ``InvalidInput`` for a wrong argument, for arrays of different lengths, and if a tokenizer is needed and not
    given; ``MissingExtra`` without torch.
    """
    torch = _torch()
    ragged = _Ragged.of(samples)
    tokens, loss_mask, logprobs = (ragged.split(name) for name in ("tokens", "loss_mask", "logprobs"))
    retokenized = {number for number, part in enumerate(tokens) if not len(part)}
    for number in retokenized:
        made = _made(ragged.rows[number], tokenizer, chat_template)
        tokens[number], loss_mask[number], logprobs[number] = made
    if min_weight_version is not None:
        for number, row in enumerate(ragged.rows):
            has_spans = number not in retokenized
            loss_mask[number] = without_older(loss_mask[number], row, min_weight_version, has_spans=has_spans)
    padder = _Padder([len(part) for part in tokens], max_length, padding_side, truncate)
    trained_on = padder.pad(loss_mask, 0, torch.bool)
    return {
        "tokens": padder.pad(tokens, pad_token_id, torch.int64),
        "attention_mask": padder.attention_mask(),
        "loss_mask": trained_on,
        "logprobs": _without_idle_nan(padder.pad(logprobs, 0.0, torch.float32), trained_on),
        "rewards": ragged.tensor("rewards").to(torch.float32),
        "group_index": ragged.tensor("group_index").clone(),
        "weight_version": ragged.tensor("weight_version").clone(),
        "retokenized": _flags(retokenized, len(tokens)),
    }


def numpy_arrays(batch: Batch) -> "dict[str, numpy.ndarray[Any, Any]]":
    """The tensors of a batch that was asked for as tensors, as read-only NumPy views of the reply: nothing is padded.

    Row ``i`` has the items ``offsets[i]`` to ``offsets[i + 1]`` of ``tokens`` (int32), ``logprobs`` (float32) and
    ``loss_mask`` (uint8). Raises ``InvalidInput`` for a batch that came as JSON, ``MissingExtra`` without NumPy.
    """
    try:
        import numpy
    except ImportError:
        raise MissingExtra("numpy", "torch") from None
    types = {"I64": "<i8", "F64": "<f8", "I32": "<i4", "F32": "<f4", "U8": "u1"}
    views = read_blob(batch.content)
    return {name: numpy.frombuffer(view.data, types[view.dtype]) for name, view in views.items() if name != "rest"}


class _Ragged:
    """The arrays of all rows, one row after the other."""

    def __init__(self, views: Mapping[str, View]) -> None:
        self._views = views

    @classmethod
    def of(cls, samples: Batch | Sequence[Row]) -> "_Ragged":
        if isinstance(samples, Batch):
            if samples.content:
                return cls(read_blob(samples.content))
            return cls._of_rows(samples.rows, samples.group_sizes)
        return cls._of_rows(samples, [len(list(rows)) for _, rows in groupby(samples, _group_key)])

    @classmethod
    def _of_rows(cls, rows: Sequence[Row], group_sizes: Sequence[int]) -> "_Ragged":
        made = [_token_row(row) for row in rows]
        rest = b'{"data":[' + b",".join(row.rest for row in made) + b"]}"
        made_columns = columns(made, group_sizes, [rest])
        return cls({column.name: View(column.dtype, memoryview(b"".join(column.pieces))) for column in made_columns})

    @cached_property
    def rows(self) -> list[Row]:
        """The samples without their arrays."""
        rows: list[Row] = read_json(self._views["rest"].data)["data"]
        return rows

    def tensor(self, name: str) -> "torch.Tensor":
        """One of the tensors, as a view of what was received."""
        torch = _torch()
        view = self._views[name]
        dtype = _torch_type(view.dtype)
        if not view.data:  # torch refuses a buffer of no bytes
            return torch.empty(0, dtype=dtype)
        # torch warns of read-only memory, which a reply is: it is copied before anything is written.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return torch.frombuffer(view.data, dtype=dtype)

    def split(self, name: str) -> "list[torch.Tensor]":
        """The array ``name`` of each row."""
        lengths = self.tensor("offsets").diff().tolist()
        return list(self.tensor(name).split(lengths)) if lengths else []


class _Padder:
    """Brings rows of ``lengths`` to one length."""

    def __init__(self, lengths: Sequence[int], max_length: int | None, padding_side: Side, truncate: Side) -> None:
        for name, side in (("padding_side", padding_side), ("truncate", truncate)):
            if side not in ("left", "right"):
                raise InvalidInput(f'{name} is "left" or "right", not {side!r}', field=name)
        if max_length is not None and max_length < 1:
            raise InvalidInput(f"max_length is at least 1, not {max_length}", field="max_length")
        longest = max(lengths, default=0)
        self._width = longest if max_length is None else min(longest, max_length)
        self._lengths = [min(length, self._width) for length in lengths]
        self._is_left = padding_side == "left"
        self._cuts_left = truncate == "left"

    def pad(self, rows: "Sequence[torch.Tensor]", value: float, dtype: "torch.dtype") -> "torch.Tensor":
        """The rows below each other, with ``value`` where they have nothing."""
        width = self._width
        padded = _torch().empty((len(rows), width), dtype=dtype)
        for target, row, length in zip(padded.unbind(), rows, self._lengths, strict=True):
            kept = self._cut(row, length)
            if length == width:  # nothing to fill: each page of a large batch is written once
                target.copy_(kept)
            else:
                start = width - length if self._is_left else 0
                target.fill_(value)
                target[start : start + length] = kept
        return padded

    def _cut(self, row: "torch.Tensor", length: int) -> "torch.Tensor":
        if len(row) == length:
            return row
        return row[len(row) - length :] if self._cuts_left else row[:length]

    def attention_mask(self) -> "torch.Tensor":
        """Where the rows have tokens."""
        torch = _torch()
        lengths = torch.tensor(self._lengths, dtype=torch.int64)[:, None]
        places = torch.arange(self._width)
        return places >= self._width - lengths if self._is_left else places < lengths


def _token_row(row: Row) -> TokenRow[Piece]:
    body = encode_sample(row)
    if is_binary(body):
        check_arrays(unpack(body))
    return token_row((body,))


def _group_key(row: Row) -> tuple[object, object]:
    # 1 equals 1.0, which is the id of the same instance.
    return row.get("instance_id"), row.get("epoch")


def _made(row: Row, tokenizer: Tokenizer | None, chat_template: str | None) -> "list[torch.Tensor]":
    """Tokens, loss mask and logprobs of a sample that came without."""
    torch, uid = _torch(), row.get("uid")
    if row.get("tokens"):  # it was encoded as JSON, arrays and all, as they do not fit: never replace them by others
        hint = "tokens are integers, logprobs numbers, loss_mask 0 or 1; see docs/tensors.md for their lengths"
        raise InvalidInput(f"the arrays of sample {uid!r} cannot be used", hint=hint, field="tokens")
    if tokenizer is None and row.get("messages"):
        hint = "give collate a tokenizer and, if it has none, a chat_template"
        raise InvalidInput(f"sample {uid!r} has no tokens", hint=hint, field="tokenizer")
    tokens, mask = chat_tokens(row.get("messages") or [], tokenizer, chat_template) if tokenizer else ([], [])
    made = [torch.tensor(tokens, dtype=torch.int32), torch.tensor(mask, dtype=torch.uint8)]
    return [*made, torch.full((len(tokens),), torch.nan)]


def _without_idle_nan(logprobs: "torch.Tensor", loss_mask: "torch.Tensor") -> "torch.Tensor":
    """``logprobs`` with 0 for NaN where nothing is trained."""
    # A masked sum multiplies by the mask, and NaN times 0 is NaN. The sum finds any without a mask of all items.
    if logprobs.sum().isnan():
        logprobs.masked_fill_(logprobs.isnan() & ~loss_mask, 0.0)
    return logprobs


def _flags(numbers: Collection[int], count: int) -> "torch.Tensor":
    flags = _torch().zeros(count, dtype=_torch().bool)
    flags[list(numbers)] = True
    return flags


def _torch_type(dtype: Dtype) -> "torch.dtype":
    torch = _torch()
    kinds = {"I64": torch.int64, "F64": torch.float64, "I32": torch.int32, "F32": torch.float32, "U8": torch.uint8}
    return kinds[dtype]


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise MissingExtra("torch", "torch") from None
    return torch
