"""Batches as padded torch tensors.

A batch read with ``as_tensors`` arrives as one blob with the concatenated arrays of all rows; any other samples are
first encoded the same way (``ragged.py``). ``collate`` splits the arrays by row, tokenises rows without tokens
(``tokenize.py``), masks excluded tokens (``token_filter.py``), and pads all rows to one length (``_Padder``). ``rows``
returns plain rows with the same masks, without padding and without torch (``masked_rows.py``). ``numpy_arrays``
returns the arrays of the blob, ``batch_groups.py`` those of each row, by group and slot, for adapters of trainers.
torch and NumPy are imported only where they are used.
"""

import warnings
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal

from forebay.client.model import Batch, Row
from forebay.client.tensors.masked_rows import UNSCORED, rows
from forebay.client.tensors.ragged import Ragged, check_without_tokens, torch_module
from forebay.client.tensors.token_filter import TokenFilter
from forebay.client.tensors.tokenize import Tokenizer, chat_tokens
from forebay.core.errors import InvalidInput
from forebay.core.parts import numpy_module
from forebay.core.safetensors_format import NUMPY_TYPES, read_blob

if TYPE_CHECKING:
    import numpy
    import torch

__all__ = ["collate", "numpy_arrays", "rows"]

Side = Literal["left", "right"]
"""The end at which rows are padded or truncated."""


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
    only_policy_logprobs: bool = False,
    policy_temperature: float = 1.0,
    needs_logprobs: bool = False,
) -> dict[str, "torch.Tensor"]:
    """Return samples, of a batch or any others, as tensors of B rows and T columns. T is the length of the longest.

    ======================  =======  =======  ====================================================================
    ``tokens``              int64    [B, T]   token ids, padded with ``pad_token_id``
    ``attention_mask``      bool     [B, T]   True for tokens, False for padding
    ``loss_mask``           bool     [B, T]   True for tokens to train on
    ``logprobs``            float32  [B, T]   from the engine that sampled the tokens; 0 for tokens that are not
                                              trained on, NaN for all tokens of a sample without logprobs
    ``rewards``             float32  [B]      ``reward``; NaN if there is none
    ``group_index``         int64    [B]      number of the row's group in the batch, from 0
    ``weight_version``      int64    [B]      the oldest version in the sample; -1 without one
    ``retokenized``         bool     [B]      whether the tokens were made from the messages
    ======================  =======  =======  ====================================================================

    A row longer than ``max_length`` is truncated at its end, or with ``truncate="left"`` at its beginning. A sample
    without tokens is tokenised with ``tokenizer``, from the transformers package, and ``chat_template`` (default: the
    tokenizer's own). Its loss mask is 1 for the assistant's turns. Existing tokens are never replaced. Without a loss
    mask, the last ``response_length`` tokens are trained on, or all tokens without that field. If ``samples`` is not a
    ``Batch``, adjacent samples with the same ``instance_id`` and ``epoch`` form a group.

    If only some tokens of a sample have logprobs, the others are not trained on, and a ``RuntimeWarning`` is issued. A
    sample without any logprobs keeps its mask, for trainers that compute their own. With ``needs_logprobs``, such a
    sample is not trained on either, and no logprob is NaN.

    ``min_weight_version`` excludes tokens sampled from older weights, according to the sample's ``token_spans``. If it
    has none, its oldest weight version decides about the whole sample. Samples without a version are unchanged.

    ``only_policy_logprobs`` excludes tokens whose logprob is not the policy's at ``policy_temperature``, by which the
    trainer divides its logits. These are tokens sampled with another temperature, a penalty, truncation, a grammar or
    unknown parameters (``sampling`` of the span), or over a cache of other weights (``mixed_kv``). Samples and spans
    without this information are unchanged.

    Raises ``InvalidInput`` for a wrong argument, for arrays of different lengths, or if a tokenizer is needed but not
    given. Raises ``MissingExtra`` without torch.
    """
    torch = torch_module()
    leaving_out = TokenFilter(min_weight_version, only_policy_logprobs, policy_temperature, needs_logprobs)
    ragged = Ragged.of(samples)
    tokens, loss_mask, logprobs = (ragged.split(name) for name in ("tokens", "loss_mask", "logprobs"))
    retokenized = {number for number, part in enumerate(tokens) if not len(part)}
    for number in retokenized:
        made = _made(ragged.rows[number], tokenizer, chat_template)
        tokens[number], loss_mask[number], logprobs[number] = made
    if leaving_out.reads_spans:
        for number, row in enumerate(ragged.rows):
            has_spans = number not in retokenized
            left_out = leaving_out.left_out(row, len(loss_mask[number]), has_spans=has_spans)
            loss_mask[number] = _without(loss_mask[number], left_out)
    padder = _Padder([len(part) for part in tokens], max_length, padding_side, truncate)
    trained_on = padder.pad(loss_mask, 0, torch.bool)
    known = padder.pad(logprobs, 0.0, torch.float32)
    has_logprobs = ragged.tensor("has_logprobs").bool()
    _leave_out_unknown(known, trained_on, torch.ones_like(has_logprobs) if needs_logprobs else has_logprobs)
    return {
        "tokens": padder.pad(tokens, pad_token_id, torch.int64),
        "attention_mask": padder.attention_mask(),
        "loss_mask": trained_on,
        "logprobs": known,
        "rewards": ragged.tensor("rewards").to(torch.float32),
        "group_index": ragged.tensor("group_index").clone(),
        "weight_version": ragged.tensor("weight_version").clone(),
        "retokenized": _flags(retokenized, len(tokens)),
    }


def numpy_arrays(batch: Batch) -> "dict[str, numpy.ndarray[Any, Any]]":
    """The unpadded arrays of a batch read with ``as_tensors``, as read-only NumPy views of the reply.

    Row ``i`` has the items ``offsets[i]`` to ``offsets[i + 1]`` of ``tokens`` (int32), ``logprobs`` (float32) and
    ``loss_mask`` (uint8). Raises ``InvalidInput`` for a batch read as JSON, ``MissingExtra`` without NumPy.
    """
    numpy = numpy_module()
    views = read_blob(batch.content).items()
    return {name: numpy.frombuffer(each.data, NUMPY_TYPES[each.dtype]) for name, each in views if name != "rest"}


class _Padder:
    """Pads or truncates rows of ``lengths`` to one length."""

    def __init__(self, lengths: Sequence[int], max_length: int | None, padding_side: Side, truncate: Side) -> None:
        for name, side in (("padding_side", padding_side), ("truncate", truncate)):
            if side not in ("left", "right"):
                raise InvalidInput(f'{name} must be "left" or "right" (got {side!r})', field=name)
        if max_length is not None and max_length < 1:
            raise InvalidInput(f"max_length must be at least 1 (got {max_length})", field="max_length")
        longest = max(lengths, default=0)
        self._width = longest if max_length is None else min(longest, max_length)
        self._lengths = [min(length, self._width) for length in lengths]
        self._is_left = padding_side == "left"
        self._cuts_left = truncate == "left"

    def pad(self, rows: "Sequence[torch.Tensor]", value: float, dtype: "torch.dtype") -> "torch.Tensor":
        """The rows as one tensor, padded with ``value``."""
        width = self._width
        padded = torch_module().empty((len(rows), width), dtype=dtype)
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
        """True where the rows have tokens."""
        torch = torch_module()
        lengths = torch.tensor(self._lengths, dtype=torch.int64)[:, None]
        columns = torch.arange(self._width)
        return columns >= self._width - lengths if self._is_left else columns < lengths


def _made(row: Row, tokenizer: Tokenizer | None, chat_template: str | None) -> "list[torch.Tensor]":
    """Tokens, loss mask and logprobs for a sample without tokens."""
    torch, uid = torch_module(), row.get("uid")
    check_without_tokens(row)
    if tokenizer is None and row.get("messages"):
        hint = "pass a tokenizer to collate and, if the tokenizer has none, a chat_template"
        raise InvalidInput(f"sample {uid!r} has no tokens", hint=hint, field="tokenizer")
    tokens, mask = chat_tokens(row.get("messages") or [], tokenizer, chat_template) if tokenizer else ([], [])
    made = [torch.tensor(tokens, dtype=torch.int32), torch.tensor(mask, dtype=torch.uint8)]
    return [*made, torch.full((len(tokens),), torch.nan)]


def _without(loss_mask: "torch.Tensor", stretches: Sequence[tuple[int, int]]) -> "torch.Tensor":
    if not stretches:
        return loss_mask
    masked = loss_mask.clone()  # the received arrays are read-only
    for start, end in stretches:
        masked[start:end] = 0
    return masked


def _leave_out_unknown(logprobs: "torch.Tensor", loss_mask: "torch.Tensor", needs_them: "torch.Tensor") -> None:
    """Mask tokens without a logprob in rows that need them, and set unknown logprobs of masked tokens to 0."""
    # NaN times 0 is NaN, which would spoil a trainer's masked sum. The plain sum below finds any NaN cheaply.
    if logprobs.sum().isfinite():
        return
    unknown = ~logprobs.isfinite()
    lost = unknown & loss_mask & needs_them[:, None]
    if lost.any():
        warnings.warn(UNSCORED, RuntimeWarning, stacklevel=3)
        loss_mask &= ~lost
    logprobs.masked_fill_(unknown & ~loss_mask, 0.0)


def _flags(numbers: Collection[int], count: int) -> "torch.Tensor":
    flags = torch_module().zeros(count, dtype=torch_module().bool)
    flags[list(numbers)] = True
    return flags
