"""One call on its way through the engine: what was asked, its choices, and the pieces handed back."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

from forebay.engines.tiny.sampling import SamplingParams, TokenChoice, new_dice
from forebay.engines.tiny.text import TextStream

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one choice grew by. The last one has a ``finish_reason``; ``num_tokens`` counts the whole choice so far.

    ``versions`` names the weights behind each of ``tokens``; ``num_retractions``, how often its cache was dropped.
    """

    index: int
    text: str
    tokens: tuple[TokenChoice, ...]
    num_tokens: int
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    versions: tuple[str, ...] = ()
    num_retractions: int = 0


@dataclass(eq=False, slots=True)
class Call:
    """A prompt and how to go on, with ``n`` choices. Its pieces arrive on the event loop that made it.

    With ``logprob_start`` the prompt's own tokens from that one on are scored: ``prompt_logprobs`` hold the logprobs of
    all but the first of them, at temperature 1, by the time that a piece arrives.
    """

    rid: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    n: int = 1
    stream: bool = False
    num_top_logprobs: int = 0
    logprob_start: int | None = None
    prompt_logprobs: tuple[float, ...] = ()
    pieces: "asyncio.Queue[Piece | Exception]" = field(default_factory=asyncio.Queue)

    async def read(self) -> AsyncIterator[Piece]:
        """Every piece until all choices are finished; raises what made the call fail."""
        num_open = self.n
        while num_open:
            piece = await self.pieces.get()
            if isinstance(piece, Exception):
                raise piece
            num_open -= piece.finish_reason is not None
            yield piece


class Row:
    """One choice being generated."""

    def __init__(self, call: Call, index: int, tokenizer: Any) -> None:
        self.call = call
        self.index = index
        self.dice = new_dice(call.params.seed, index)
        self.finish_reason: FinishReason | None = None
        self.num_retractions = 0
        self._sampled: list[int] = []
        self._matched: str | int | None = None
        self._text = TextStream(tokenizer, call.params.stop)
        self._untold: list[TokenChoice] = []
        self._versions: list[str] = []

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt and everything sampled."""
        return (*self.call.prompt_ids, *self._sampled)

    @property
    def last_token(self) -> int:
        """The token that the batch has not read yet."""
        return self._sampled[-1]

    def accept(self, token: TokenChoice, eos_token_ids: frozenset[int], version: str) -> None:
        """Take the next token, which the weights ``version`` gave, and finish where it ends the choice."""
        params = self.call.params
        self._sampled.append(token.token_id)
        self._untold.append(token)
        self._versions.append(version)
        ends = token.token_id in eos_token_ids and not params.ignore_eos
        if ends or token.token_id in params.stop_token_ids:
            self.finish("stop", token.token_id)
            return
        self._text.push(token.token_id)
        if self._text.stopped_by is not None:
            self.finish("stop", self._text.stopped_by)
        elif len(self._sampled) >= params.max_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason, matched: str | int | None = None) -> None:
        """End the choice; a later reason changes nothing."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self._matched = matched
            self._text.close()

    def take_piece(self) -> Piece | None:
        """What is new, if there is something to tell now: a call that does not stream is told once, at its end."""
        finished = self.finish_reason is not None
        if not finished and not self.call.stream:
            return None
        text = self._text.take(final=finished)
        if not text and not finished:
            return None
        tokens, self._untold = tuple(self._untold), []
        versions, self._versions = tuple(self._versions), []
        return Piece(
            self.index,
            text,
            tokens,
            len(self._sampled),
            self.finish_reason,
            self._matched,
            versions,
            self.num_retractions,
        )
