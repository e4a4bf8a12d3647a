"""A prompt that an engine works on: the request, and the pieces in which its choices arrive."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

JSONObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one call. ``temperature`` 0 is greedy; ``top_k`` -1 and ``top_p`` 1 filter nothing."""

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
    """A token, its logprob, and the most probable tokens at its position with their logprobs, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Milestones:
    """Progress of a choice: times by ``time.monotonic``, measured by the engine; None before the event."""

    begun_s: float | None = None
    """When the engine started on it; the time from arrival until then is queue time."""
    prefilled_s: float | None = None
    """When its prompt had been read; decoding starts then."""
    ended_s: float | None = None
    cached_tokens: int = 0
    """Number of prompt tokens found in the cache."""


UNBEGUN = Milestones()


@dataclass(frozen=True, slots=True)
class Piece:
    """An increment of one choice; ``index`` is its position in the request. The last piece has a ``finish_reason``.

    ``versions`` has the weight version of each of ``tokens``; ``num_retractions`` counts cache drops.
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
    """A prompt and its sampling parameters, with ``n`` choices. ``pieces`` belong to the event loop that made the call.

    With ``logprob_start``, prompt tokens from that position on are scored: ``prompt_logprobs`` hold the logprobs at
    temperature 1 of all but the first of them, and are set before the first piece arrives.
    """

    rid: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    n: int = 1
    first_index: int = 0
    """Position of its first choice among all choices of the request."""
    stream: bool = False
    num_top_logprobs: int = 0
    logprob_start: int | None = None
    body: JSONObject = field(default_factory=dict)
    """The client's request, as far as it concerns this prompt."""
    is_chat: bool = False
    extra_key: str | None = None
    """Cache namespace in which its prompt is looked up and stored."""
    prompt_logprobs: tuple[float, ...] = ()
    arrived_s: float = field(default_factory=time.monotonic)
    """When its request arrived."""
    traceparent: str | None = None
    """The W3C header of the request."""
    pieces: "asyncio.Queue[Piece | Exception | None]" = field(default_factory=asyncio.Queue)
    """One queue for all calls of a request. An exception, or ``None`` (the client disconnected), ends all of them."""

    @property
    def indices(self) -> range:
        """Positions of its choices."""
        return range(self.first_index, self.first_index + self.n)


@dataclass(eq=False, slots=True)
class Choice:
    """One choice of a call, assembled from its pieces."""

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
        """Ids of the sampled tokens."""
        return [token.token_id for token in self.tokens]

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        self.text += piece.text
        self.reasoning += piece.reasoning
        self.tokens.extend(piece.tokens)
        self.versions.extend(piece.versions)
        # The other fields are sent in full with every piece; the latest values count.
        self.tool_calls = piece.tool_calls
        self.num_retractions = piece.num_retractions
        self.milestones = piece.milestones
        self.finish_reason, self.matched_stop = piece.finish_reason, piece.matched_stop


def choices_of(calls: Sequence[PromptCall]) -> list[Choice]:
    """Return the empty choices of a request."""
    return [Choice(call, index) for call in calls for index in call.indices]


async def grow(choices: Sequence[Choice]) -> AsyncIterator[tuple[Choice, Piece]]:
    """Yield each choice that grew, until all have ended or the client is gone. Raises the error of a failed call."""
    pieces, num_open = choices[0].call.pieces, len(choices)
    while num_open:
        piece = await pieces.get()
        # The client disconnected, so nothing more is written.
        if piece is None:
            return
        if isinstance(piece, Exception):
            raise piece
        choices[piece.index].add(piece)
        num_open -= piece.finish_reason is not None
        yield choices[piece.index], piece
