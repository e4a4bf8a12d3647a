"""Limit the total number of tokens that the calls of one rollout sample."""

from collections.abc import Iterable, Mapping
from typing import Any

from forebay.engines.capture.call_spans import num_sampled
from forebay.engines.capture.turn import Turn

LIMIT_NAMES = ("max_completion_tokens", "max_tokens")
"""OpenAI's two names for the same limit."""


class TokenCap:
    """Total token limit of one rollout; ``tokens`` None means no limit.

    Each concurrent call is limited to the tokens left when it is sent, so together they may exceed the total.
    """

    def __init__(self, tokens: int | None) -> None:
        self.tokens = tokens
        self.num_sampled = 0
        """Tokens sampled by finished calls."""

    @property
    def is_spent(self) -> bool:
        """Whether the limit is used up."""
        return self.tokens is not None and self.num_sampled >= self.tokens

    def limits(self, body: Mapping[str, Any]) -> dict[str, int]:
        """Return the limit fields to override in a chat with this body; empty if its own limit is lower."""
        if self.tokens is None:
            return {}
        left = max(1, self.tokens - self.num_sampled)
        own = limit_of(body)
        if own is not None and own <= left:
            return {}
        return dict.fromkeys([name for name in LIMIT_NAMES if body.get(name) is not None] or ["max_tokens"], left)

    def cut_at(self, sent: Mapping[str, Any], asked: Mapping[str, Any]) -> int | None:
        """Return the token limit that the cap set on a chat; None if the limit is the one ``asked`` for."""
        if self.tokens is None:
            return None
        limit = limit_of(sent)
        return None if limit == limit_of(asked) else limit


def limit_of(body: Mapping[str, Any]) -> int | None:
    """Return the lowest token limit that the body of a chat sets, or None."""
    given = [_whole(body[name]) for name in LIMIT_NAMES if body.get(name) is not None]
    return min((limit for limit in given if limit is not None), default=None)


def was_cut(turns: Iterable[Turn], cut_at: int | None) -> bool:
    """Whether a choice was cut off by the cap after ``cut_at`` tokens, not by the engine's context length."""
    if cut_at is None:
        return False
    return any(
        turn.finish_reason == "length" and (turn.sampled_ids is None or num_sampled(turn) >= cut_at) for turn in turns
    )


def _whole(limit: object) -> int | None:
    """Parse a limit as engines do: ``64``, ``64.0`` or ``"64"``; None for values that they reject."""
    try:
        return int(float(limit)) if isinstance(limit, int | float | str) else None
    except (ValueError, OverflowError):
        return None
