"""The record of one engine call: the tokens it was given, the tokens it sampled, and which weights sampled them."""

from typing import Any, Literal

import msgspec

Source = Literal["llm", "tool", "environment"]
"""Where tokens come from: sampled by the policy, a tool's result, or anything else that a prompt brings."""


class VersionSpan(msgspec.Struct, frozen=True):
    """The sampled tokens from ``start`` to before ``end`` stem from the weights called ``version``."""

    version: str
    start: int
    end: int


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One choice of one reply. Everything that a sample says about tokens is made of these.

    ``prompt_ids`` and ``sampled_ids`` are None where the engine told no ids; ``sampled_ids`` hold the end token if one
    was sampled. ``logprobs`` (natural logarithms, one for each sampled token) is None where it told none, and a NaN
    stands for the one of a token that it did not tell.
    """

    messages: list[dict[str, Any]]
    """The messages of the request, as they were sent."""
    reply: dict[str, Any]
    """The assistant message."""
    prompt_ids: list[int] | None = None
    sampled_ids: list[int] | None = None
    logprobs: list[float] | None = None
    finish_reason: str = ""
    versions: list[VersionSpan] = []
    """By position in ``sampled_ids``, without gaps; empty where the engine told none."""
    seen_versions: list[str] = []
    """The versions that were in use during a call of which the spans are not known (a stream across an update)."""
    is_kv_mixed: bool = False
    """Whether weights changed in place below a cache that was kept: the logprobs belong to no one policy."""
    choice: int = 0
    """Which of the ``n`` choices of its call."""
    rid: str | None = None
    engine_url: str = ""
    began_s: float = 0.0
    """When the call was sent, in seconds since the Unix epoch."""
    first_token_s: float | None = None
    """When the first token arrived, for a streaming call; seconds since the Unix epoch."""
    ended_s: float = 0.0
    usage: dict[str, Any] = {}
    """The engine's own counts, as it told them."""
    tools: list[dict[str, Any]] = []
    """The tools that were offered."""
