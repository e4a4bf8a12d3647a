"""Tokens in slime's form: prompt and response in one list, masks and logprobs for the response only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay.client.model import Batch, Row
from forebay.client.tensors import collate, numpy_arrays
from forebay.client.tensors.tokenize import Tokenizer, chat_tokens
from forebay.core.errors import InvalidInput, MissingExtra

if TYPE_CHECKING:
    import numpy


@dataclass(frozen=True, slots=True)
class Tokens:
    """``ids`` of prompt and response; ``loss_mask`` and ``logprobs`` have one item per response token."""

    ids: list[int]
    loss_mask: list[int]
    logprobs: list[float] | None
    """None if the sample has no logprobs; otherwise only tokens with a logprob are trained on."""
    is_retokenized: bool

    @property
    def response_length(self) -> int:
        return len(self.loss_mask)


@dataclass(frozen=True, slots=True)
class Arrays:
    """The arrays of a sample, all of one length, and the length of its response if it states one."""

    ids: "numpy.ndarray[Any, Any]"
    loss_mask: "numpy.ndarray[Any, Any]"
    logprobs: "numpy.ndarray[Any, Any]"
    response_length: int
    """-1 if the sample does not state it."""


def arrays_of_batch(batch: Batch) -> tuple[list[Arrays], list[int]]:
    """The arrays of each row of a batch read with tensors, and the number of each row's group."""
    flat = numpy_arrays(batch)
    columns = ("response_length", "has_logprobs")
    places = zip(flat["offsets"][:-1], flat["offsets"][1:], *(flat[name] for name in columns), strict=True)
    parts = []
    for start, end, length, has_logprobs in places:
        ids, mask, logprobs = (flat[name][start:end] for name in ("tokens", "loss_mask", "logprobs"))
        # As in `collate`: in a sample with logprobs, a token without one is not trained on.
        mask = mask * _numpy().isfinite(logprobs) if has_logprobs else mask
        parts.append(Arrays(ids, mask, logprobs, int(length)))
    return parts, flat["group_index"].tolist()


def arrays_of_row(row: Row) -> Arrays:
    """The arrays of a sample with plain lists. Raises ``InvalidInput`` if the lists are invalid."""
    if not row.get("tokens"):
        nothing = _numpy().empty(0)
        return Arrays(nothing, nothing, nothing, -1)
    # ``collate`` checks plain lists too; the two-dimensional tensors are the arrays by token.
    made = {name: tensor[0].numpy() for name, tensor in collate([row], 0).items() if tensor.dim() == 2}
    claimed = row.get("response_length")
    length = claimed if type(claimed) is int and 0 <= claimed <= len(row["tokens"]) else -1  # type(): bool is an int
    return Arrays(made["tokens"], made["loss_mask"], made["logprobs"], length)


def tokens_of(row: Row, arrays: Arrays, load_tokenizer: Callable[[], Tokenizer]) -> Tokens:
    """A sample's tokens, or tokens made from its messages. Raises ``InvalidInput`` if slime cannot use them."""
    if len(arrays.ids):
        return _split(arrays)
    if row.get("tokens"):  # invalid tokens must not be replaced: training would be on other tokens than were sampled
        raise InvalidInput("its token arrays are invalid", field="tokens")
    return _retokenized(row["messages"], load_tokenizer())


def _split(arrays: Arrays) -> Tokens:
    start = _response_start(arrays.loss_mask, arrays.response_length)
    mask = arrays.loss_mask[start:].astype(bool)
    logprobs = arrays.logprobs[start:].copy()
    logprobs[~mask] = 0.0  # tokens that were not sampled have NaN; that does not mean that a logprob is missing
    has_all = not _numpy().isnan(logprobs).any()
    return Tokens(arrays.ids.tolist(), mask.astype(int).tolist(), logprobs.tolist() if has_all else None, False)


def _retokenized(messages: Sequence[Any], tokenizer: Tokenizer) -> Tokens:
    try:
        ids, mask = chat_tokens(messages, tokenizer)
    except InvalidInput:
        raise
    except Exception as error:  # an error of the template affects this sample only
        raise InvalidInput(f"its messages cannot be tokenised: {error!r}", field="messages") from error
    start = _response_start(_numpy().asarray(mask), -1)
    return Tokens(ids, mask[start:], None, True)


def _response_start(mask: "numpy.ndarray[Any, Any]", response_length: int) -> int:
    """Where the response begins: as stated by the sample, else at the first token that is trained on."""
    if len(mask) < 2:
        raise InvalidInput("it has fewer than two tokens", field="tokens")
    first_trained = int(mask.argmax()) if mask.any() else len(mask)
    start = len(mask) - response_length if response_length >= 0 else first_trained
    # The first token has no prediction and belongs to the prompt. slime divides by the response length: not 0.
    return min(max(start, 1), len(mask) - 1)


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        raise MissingExtra("numpy", "torch") from None
    return numpy
