"""A prompt on its way through an engine: what is asked, and the pieces in which its choices come back."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

JSONObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one call's tokens are drawn. ``temperature`` 0 is greedy; ``top_k`` -1 and ``top_p`` 1 filter nothing."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def is_filtered(self) -> bool:
        """Whether improbable tokens are excluded."""
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """A token, its logprob, and the most probable tokens at its place with theirs, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Milestones:
    """How far a choice has come, and when: by ``time.monotonic``, measured by the engine, None before it is so."""

    begun_s: float | None = None
    """The engine turned to it: it has waited from its arrival until then."""
    prefilled_s: float | None = None
    """Its prompt was read: from then on it was generated."""
    ended_s: float | None = None
    cached_tokens: int = 0
    """So much of its prompt had been read before."""


UNBEGUN = Milestones()


@dataclass(frozen=True, slots=True)
class Piece:
    """What one choice grew by, ``index`` being its place in the request. The last one has a ``finish_reason``.

    ``versions`` names the weights behind each of ``tokens``; ``num_retractions``, how often its cache was dropped.
    """

    index: int
    text: str = ""
    tokens: Sequence[TokenChoice] = ()
    finish_reason: str | None = None
    matched_stop: str | int | None = None
    versions: Sequence[str] = ()
    num_retractions: int = 0
    reasoning: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    milestones: Milestones = UNBEGUN


@dataclass(eq=False, slots=True)
class PromptCall:
    """A prompt and how to go on, with ``n`` choices. ``pieces`` belong to the event loop that made it.

    With ``logprob_start`` the prompt's own tokens from that one on are scored: ``prompt_logprobs`` hold the logprobs of
    all but the first of them, at temperature 1, by the time that a piece arrives.
    """

    rid: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    n: int = 1
    first_index: int = 0
    """The place of its first choice among all those of the request."""
    stream: bool = False
    num_top_logprobs: int = 0
    logprob_start: int | None = None
    body: JSONObject = field(default_factory=dict)
    """What the client sent, as far as it concerns this prompt."""
    is_chat: bool = False
    extra_key: str | None = None
    """The namespace of the cache in which its prompt is looked up, and left."""
    prompt_logprobs: tuple[float, ...] = ()
    arrived_s: float = field(default_factory=time.monotonic)
    """When its request was there."""
    traceparent: str | None = None
    """The W3C header with which it came."""
    pieces: "asyncio.Queue[Piece | Exception | None]" = field(default_factory=asyncio.Queue)
    """One queue for all calls of a request. An exception ends them all, and so does ``None``: the client has gone."""

    @property
    def indices(self) -> range:
        """The places of its choices."""
        return range(self.first_index, self.first_index + self.n)


@dataclass(eq=False, slots=True)
class Choice:
    """One choice of a call, put together from its pieces."""

    call: PromptCall
    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    tokens: list[TokenChoice] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    matched_stop: str | int | None = None
    num_retractions: int = 0
    milestones: Milestones = UNBEGUN

    @property
    def token_ids(self) -> list[int]:
        """What was sampled."""
        return [token.token_id for token in self.tokens]

    def add(self, piece: Piece) -> None:
        """Grow by a piece."""
        self.text += piece.text
        self.reasoning += piece.reasoning
        self.tokens.extend(piece.tokens)
        self.versions.extend(piece.versions)
        # The rest is said anew with every piece, and counts as the last one says it.
        self.tool_calls = piece.tool_calls
        self.num_retractions = piece.num_retractions
        self.milestones = piece.milestones
        self.finish_reason, self.matched_stop = piece.finish_reason, piece.matched_stop


def choices_of(calls: Sequence[PromptCall]) -> list[Choice]:
    """The choices of a request, nothing of them there yet."""
    return [Choice(call, index) for call in calls for index in call.indices]


async def grow(choices: Sequence[Choice]) -> AsyncIterator[tuple[Choice, Piece]]:
    """Each choice that has grown, until all have ended or nobody reads them; raises what made a call fail."""
    pieces, num_open = choices[0].call.pieces, len(choices)
    while num_open:
        piece = await pieces.get()
        # The client has gone: what there is will be written for nobody.
        if piece is None:
            return
        if isinstance(piece, Exception):
            raise piece
        choices[piece.index].add(piece)
        num_open -= piece.finish_reason is not None
        yield choices[piece.index], piece
