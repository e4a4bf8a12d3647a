"""Cost of an engine's work in a few numbers, which are given or fitted to a log."""

import math
from dataclasses import dataclass

from forebay.core.errors import InvalidInput

HINT = "by default a step takes 0.01 s, plus 0.00012 s per sequence, at speed 1"


@dataclass(frozen=True, slots=True)
class EngineCost:
    """Cost of one engine. A step gives each of ``n`` sequences a token in ``step_s + n * step_s_per_sequence``."""

    prefill_tokens_per_s: float = math.inf
    """Speed of reading prompt tokens that are not cached. The engine samples nothing while it reads."""
    step_s: float = 0.01
    step_s_per_sequence: float = 0.00012
    places: int = 32
    """Sequences that run at once. Others wait in order of arrival."""
    kv_tokens: int | None = None
    """Most tokens of all running sequences together. Beyond that, one is preempted and recomputed later."""
    speed: float = 1.0
    """Factor on the speed of everything that it does."""
    tool_s: float = 0.0
    """Seconds after each turn in which the engine has no work for the rollout: tools and the reward."""
    cached_share: float = 0.0
    """Cached share of a prompt that this engine has seen, from a sibling or the previous turn."""
    shared_share: float = 0.0
    """Share of a prompt that siblings running concurrently keep in memory only once."""
    kv_reserve: float = 0.1
    """Share of the tokens that sequences may still sample that is kept free when another sequence is admitted."""

    def __post_init__(self) -> None:
        for name in ("prefill_tokens_per_s", "speed", "places"):
            if not getattr(self, name) > 0:
                raise InvalidInput(
                    f"{name} of an engine must be above 0 (got {getattr(self, name)})", hint=HINT, field=name
                )
        for name in ("step_s", "step_s_per_sequence", "tool_s", "cached_share", "shared_share", "kv_reserve"):
            if not getattr(self, name) >= 0:
                raise InvalidInput(
                    f"{name} of an engine must be at least 0 (got {getattr(self, name)})", hint=HINT, field=name
                )
        if self.step_s + self.step_s_per_sequence <= 0:
            raise InvalidInput("step_s and step_s_per_sequence must not both be 0", hint=HINT, field="step_s")
        if self.kv_tokens is not None and self.kv_tokens < 2:
            raise InvalidInput(
                f"kv_tokens of an engine must be at least 2 (got {self.kv_tokens})", hint=HINT, field="kv_tokens"
            )

    def tokens_per_s(self, num_running: int) -> float:
        """Tokens per second of each of ``num_running`` sequences."""
        return self.speed / (self.step_s + num_running * self.step_s_per_sequence)

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds for reading ``num_tokens`` prompt tokens that are not cached."""
        return num_tokens / self.prefill_tokens_per_s / self.speed
