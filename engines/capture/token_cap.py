"""How many tokens the calls of one rollout may sample together: each is bounded by what those before it have left."""

from collections.abc import Iterable, Mapping
from typing import Any

from forebay.engines.capture.call_spans import num_sampled
from forebay.engines.capture.turn import Turn

LIMIT_NAMES = ("max_completion_tokens", "max_tokens")
"""OpenAI's two names of one bound."""


class TokenCap:
    """``tokens`` None bounds nothing.

    Calls side by side are each bounded by what is left when they go out: together they may sample more.
    """

    def __init__(self, tokens: int | None) -> None:
        self.tokens = tokens
        self.num_sampled = 0
        """By the calls that have ended."""

    @property
    def is_spent(self) -> bool:
        """Whether nothing more may be sampled."""
        return self.tokens is not None and self.num_sampled >= self.tokens

    def limits(self, body: Mapping[str, Any]) -> dict[str, int]:
        """The fields that a chat with this body goes out with in place of its own; none where those allow less."""
        if self.tokens is None:
            return {}
        left = max(1, self.tokens - self.num_sampled)
        own = limit_of(body)
        if own is not None and own <= left:
            return {}
        return dict.fromkeys([name for name in LIMIT_NAMES if body.get(name) is not None] or ["max_tokens"], left)

    def cut_at(self, sent: Mapping[str, Any], asked: Mapping[str, Any]) -> int | None:
        """The tokens after which a chat that was ``sent`` ends by its cap; None if what was ``asked`` for ends it."""
        if self.tokens is None:
            return None
        limit = limit_of(sent)
        return None if limit == limit_of(asked) else limit


def limit_of(body: Mapping[str, Any]) -> int | None:
    """What a chat with this body may sample at most, by what it says itself."""
    given = [_whole(body[name]) for name in LIMIT_NAMES if body.get(name) is not None]
    return min((limit for limit in given if limit is not None), default=None)


def was_cut(turns: Iterable[Turn], cut_at: int | None) -> bool:
    """Whether one of a call's choices ended after ``cut_at`` tokens, and not by what its engine can read at most."""
    if cut_at is None:
        return False
    return any(
        turn.finish_reason == "length" and (turn.sampled_ids is None or num_sampled(turn) >= cut_at) for turn in turns
    )


def _whole(limit: object) -> int | None:
    """A limit as engines read it: ``64``, ``64.0`` or ``"64"``; None for what they will refuse."""
    try:
        return int(float(limit)) if isinstance(limit, int | float | str) else None
    except (ValueError, OverflowError):
        return None
