"""Skip: on chosen steps, what a function of a trainer returned in an earlier run takes the place of calling it.

``SkipManager.init(config)`` (``manager``) makes of ``config.skip`` (``config``) one instance for each role that has a
class (``base``: ``BaseSkip``, ``register_skip``). A function that is decorated with ``SkipManager.annotate(role=...)``
asks the instance of its role whether there is a dump for this step, and else is run, and its result dumped.

``rollout`` has the two roles that are built in, over the ``dumps`` of one experiment: values as JSON and safetensors
(``values``; those of verl's trainers: ``verl``), one folder a step that is there wholly or not at all. While a function
runs, a lock lets nothing else run it for the same step.
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
