"""The turns of an agent, which the gateway has recorded, within the time of the rollout that is recorded here."""

from collections.abc import Mapping, Sequence

from forebay.telemetry.tracing.records import TurnSummary

AROUND = ("environment", "agent", "tool")
"""What an agent's time is here, where the gateway knows better."""
BETWEEN = ("agent", "tool")
"""What the gateway says of time in which it knows of no call: here it may have been measured."""

Phases = dict[str, int]
"""Exclusive nanoseconds by phase."""


def with_gateway_turns(phases: Mapping[str, int], turns: Sequence[TurnSummary]) -> Phases:
    """The phases with those of the turns in place of the agent's time; they add up to what they did before.

    ``phases`` are the run process's, those of ``turns`` the gateway's.
    """
    brought: Phases = {}
    for turn in turns:
        for name, spent in turn.phases.items():
            brought[name] = brought.get(name, 0) + spent
    own = dict(phases)
    too_much = _taken(own, AROUND, sum(brought.values()))
    # Spans of the agent's own code, in this process, say more of the time between its calls.
    too_much = _taken(brought, BETWEEN, too_much)
    too_much = _taken(brought, sorted(brought, key=brought.__getitem__, reverse=True), too_much)
    for name, spent in brought.items():
        own[name] = own.get(name, 0) + spent
    return {name: spent for name, spent in own.items() if spent}


def _taken(phases: Phases, names: Sequence[str], wanted: int) -> int:
    """Take ``wanted`` out of the named phases, in their order; what of it was not there."""
    for name in names:
        taken = min(phases.get(name, 0), wanted)
        if taken:
            phases[name] -= taken
            wanted -= taken
    return wanted
