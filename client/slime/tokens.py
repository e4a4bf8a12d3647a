"""Tokens in slime's form: prompt and response in one list, masks and logprobs for the response only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay.client.model import Row
from forebay.client.tensors import collate
from forebay.client.tensors.batch_groups import RowArrays
from forebay.client.tensors.tokenize import Tokenizer, chat_tokens
from forebay.core.errors import InvalidInput
from forebay.core.parts import numpy_module

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


def arrays_of_row(row: Row) -> RowArrays:
    """The arrays of a sample with plain lists. Raises ``InvalidInput`` if the lists are invalid."""
    if not row.get("tokens"):
        nothing = numpy_module().empty(0)
        return RowArrays(nothing, nothing, nothing, -1)
    # ``collate`` checks plain lists too; the two-dimensional tensors are the arrays by token.
    made = {name: tensor[0].numpy() for name, tensor in collate([row], 0).items() if tensor.dim() == 2}
    claimed = row.get("response_length")
    length = claimed if type(claimed) is int and 0 <= claimed <= len(row["tokens"]) else -1  # type(): bool is an int
    return RowArrays(made["tokens"], made["loss_mask"], made["logprobs"], length)


def tokens_of(row: Row, arrays: RowArrays, load_tokenizer: Callable[[], Tokenizer]) -> Tokens:
    """A sample's tokens, or tokens made from its messages. Raises ``InvalidInput`` if slime cannot use them."""
    if len(arrays.ids):
        return _split(arrays)
    if row.get("tokens"):  # invalid tokens must not be replaced: training would be on other tokens than were sampled
        raise InvalidInput("its token arrays are invalid", field="tokens")
    return _retokenized(row["messages"], load_tokenizer())


def _split(arrays: RowArrays) -> Tokens:
    start = response_start(arrays.loss_mask, arrays.response_length)
    mask = arrays.loss_mask[start:].astype(bool)
    logprobs = arrays.logprobs[start:].copy()
    logprobs[~mask] = 0.0  # tokens that were not sampled have NaN; that does not mean that a logprob is missing
    has_all = not numpy_module().isnan(logprobs).any()
    return Tokens(arrays.ids.tolist(), mask.astype(int).tolist(), logprobs.tolist() if has_all else None, False)


def _retokenized(messages: Sequence[Any], tokenizer: Tokenizer) -> Tokens:
    try:
        ids, mask = chat_tokens(messages, tokenizer)
    except InvalidInput:
        raise
    except Exception as error:  # an error of the template affects this sample only
        raise InvalidInput(f"its messages cannot be tokenised: {error!r}", field="messages") from error
    start = response_start(numpy_module().asarray(mask), -1)
    return Tokens(ids, mask[start:], None, True)


def response_start(mask: "numpy.ndarray[Any, Any]", response_length: int) -> int:
    """Where the response begins: as stated by the sample, else at the first token that is trained on."""
    if len(mask) < 2:
        raise InvalidInput("it has fewer than two tokens", field="tokens")
    first_trained = int(mask.argmax()) if mask.any() else len(mask)
    start = len(mask) - response_length if response_length >= 0 else first_trained
    # The first token has no prediction and belongs to the prompt. slime divides by the response length: not 0.
    return min(max(start, 1), len(mask) - 1)
