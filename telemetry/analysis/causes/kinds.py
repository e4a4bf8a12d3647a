"""The one table of phases: the cause of each, what its seconds are compared with, and when they are worth a finding."""

from typing import NamedTuple

ENGINE = ("engine", "prefill", "decode")
"""Phases in which an engine works on a call; its queue is a separate cause."""
MIN_SHARE = 0.05
"""Share of the step; a smaller cost is not reported."""
MIN_S = 0.1
"""A smaller cost is not reported: a tenth of a second is not worth an investigation."""
PURPOSE_SHARE = 0.25
"""Share of the wait from which time that a run spends on purpose is reported, if all requests spend it."""
PURPOSE_S = 10.0
"""… and the seconds that a single call of a tool must take for that."""


class Kind(NamedTuple):
    """How the seconds of a phase count."""

    cause: str
    is_work: bool = False
    """Whether it is the purpose of a rollout: only seconds beyond those of other requests count. All seconds of other
    phases count: they are waiting."""
    min_share: float = MIN_SHARE
    """Share of the step."""


KINDS = {
    "queue": Kind("queue", min_share=PURPOSE_SHARE),
    "admission": Kind("admission"),
    "engine_queue": Kind("engine_queue"),
    "engine_wait": Kind("engine_away"),
    "retry": Kind("failures"),
    "hold": Kind("hold", min_share=PURPOSE_SHARE),
    "group": Kind("group"),
    "reward_queue": Kind("reward_queue"),
    "reward": Kind("reward"),
    "write": Kind("write"),
    "starting": Kind("starting", is_work=True),
    "tool": Kind("tool", is_work=True),
    "tool_execution": Kind("tool", is_work=True),
    "tool_calling_state": Kind("tool", is_work=True),
    "tool_creation_pending_state": Kind("tool", is_work=True),
    "tool_response_processing": Kind("tool", is_work=True),
    "interacting_state": Kind("tool", is_work=True),
    "interaction_response": Kind("tool", is_work=True),
    "environment": Kind("tool", is_work=True),
}
"""By phase. Any other phase that is not an engine's work is the agent's own code."""
_OTHER = Kind("agent", is_work=True)


def kind_of(phase: str) -> Kind:
    """The kind of a phase that is not in ``ENGINE``."""
    return KINDS.get(phase, _OTHER)


def working_s(phases: dict[str, float]) -> float:
    """Seconds that engines worked, given exclusive seconds by phase."""
    return sum(phases.get(name, 0.0) for name in ENGINE)
