"""Skip: on chosen steps, the result of an earlier run is loaded instead of calling a trainer's function.

``SkipManager.init(config)`` (``manager``) creates an instance for each role in ``config.skip`` (``config``) that has a
class (``base``: ``BaseSkip``, ``register_skip``). A function decorated with ``SkipManager.annotate(role=...)`` asks its
role's instance for a dump of the current step. Without a dump the function runs, and its result is dumped.

``rollout`` has the two built-in roles, which use the ``dumps`` of one experiment. Values are stored as JSON and
safetensors (``values``; for verl's types: ``verl``). Each step has one folder, which is written atomically. While a
function runs, a lock prevents other processes from running it for the same step.
"""

from forebay.replay.skip.base import SKIP_REGISTRY, BaseSkip, SkipAction, register_skip
from forebay.replay.skip.config import AsyncRolloutSkipConfig, RolloutSkipConfig, SkipConfig, SkipManagerConfig
from forebay.replay.skip.manager import SkipManager
from forebay.replay.skip.rollout import AsyncRolloutSkip, RolloutSkip, parse_async_rollout_sample_step
from forebay.replay.skip.values import NotStorable, register_codec

__all__ = [
    "SKIP_REGISTRY",
    "AsyncRolloutSkip",
    "AsyncRolloutSkipConfig",
    "BaseSkip",
    "NotStorable",
    "RolloutSkip",
    "RolloutSkipConfig",
    "SkipAction",
    "SkipConfig",
    "SkipManager",
    "SkipManagerConfig",
    "parse_async_rollout_sample_step",
    "register_codec",
    "register_skip",
]
