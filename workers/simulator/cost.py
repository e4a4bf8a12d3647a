"""What an engine takes for its work, as a few numbers: given, or fitted from a log."""

import math
from dataclasses import dataclass

from forebay.core.errors import InvalidInput

HINT = "an engine of speed 1 takes 0.01 + 0.00012 s a sequence for a step"


@dataclass(frozen=True, slots=True)
class EngineCost:
    """One engine. A step, in which each running sequence gets one token, takes ``step_s + n * step_s_per_sequence``."""

    prefill_tokens_per_s: float = math.inf
    """Prompt tokens that are not in its cache; nothing is sampled meanwhile."""
    step_s: float = 0.01
    step_s_per_sequence: float = 0.00012
    places: int = 32
    """Sequences that run at once; others wait in the order in which they came."""
    kv_tokens: int | None = None
    """Tokens of all running sequences together. Where they become more, one is put back, and computed anew later."""
    speed: float = 1.0
    """Everything it does is so many times as fast."""
    tool_s: float = 0.0
    """Seconds after each turn of a rollout in which its engine has nothing to do for it: tools, and the reward."""
    cached_share: float = 0.0
    """Of a prompt that this engine has seen: of a sibling, or of the turn before."""
    shared_share: float = 0.0
    """Of a prompt, what lies in memory once for all siblings that run beside each other."""
    kv_reserve: float = 0.1
    """Of the tokens that running sequences may still sample, what is kept free where another one is admitted."""

    def __post_init__(self) -> None:
        for name in ("prefill_tokens_per_s", "speed", "places"):
            if not getattr(self, name) > 0:
                raise InvalidInput(
                    f"{name} of an engine must be above 0, is {getattr(self, name)}", hint=HINT, field=name
                )
        for name in ("step_s", "step_s_per_sequence", "tool_s", "cached_share", "shared_share", "kv_reserve"):
            if not getattr(self, name) >= 0:
                raise InvalidInput(
                    f"{name} of an engine must be at least 0, is {getattr(self, name)}", hint=HINT, field=name
                )
        if self.step_s + self.step_s_per_sequence <= 0:
            raise InvalidInput("a step of an engine must take time", hint=HINT, field="step_s")
        if self.kv_tokens is not None and self.kv_tokens < 2:
            raise InvalidInput(
                f"kv_tokens of an engine must be at least 2, is {self.kv_tokens}", hint=HINT, field="kv_tokens"
            )

    def tokens_per_s(self, num_running: int) -> float:
        """That each of so many sequences gets."""
        return self.speed / (self.step_s + num_running * self.step_s_per_sequence)

    def prefill_s(self, num_tokens: int) -> float:
        """What so many prompt tokens take that are not in its cache."""
        return num_tokens / self.prefill_tokens_per_s / self.speed
