"""What a trainer says and hears when the weights of a run's engines change."""

import msgspec

from forebay.core.weights import PauseMode

UPDATE_TIMEOUT_S = 900.0
PAUSE_TIMEOUT_S = 120.0
PAUSE_LIMIT_S = 600.0


class WeightUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """An update that all engines of the run took."""

    weight_version: int
    mode: PauseMode
    workers: list[str]
    """The addresses of the engines; behind a router those of its workers."""
    paused_s: float
    """How long they stood still."""


class EnginePause(msgspec.Struct, frozen=True, kw_only=True):
    """Engines that stand still, idle."""

    mode: PauseMode
    limit_s: float
    """After so many seconds they go on by themselves."""
    workers: list[str]
    """Their addresses; behind a router those of its workers."""
