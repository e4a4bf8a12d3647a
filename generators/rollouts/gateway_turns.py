"""Merging of an agent's turns, recorded by the gateway, into the phases that the run process recorded."""

from collections.abc import Mapping, Sequence

from forebay.telemetry.tracing.records import TurnSummary

AROUND = ("environment", "agent", "tool", "starting")
"""Phases of an agent's time in the run process, which the gateway's more precise phases replace."""
BETWEEN = ("agent", "tool")
"""The gateway's phases for time without calls, which the run process may have measured better."""

Phases = dict[str, int]
"""Exclusive nanoseconds by phase."""


def with_gateway_turns(phases: Mapping[str, int], turns: Sequence[TurnSummary]) -> Phases:
    """Replace the agent's time in ``phases`` with the phases of its turns; the total stays the same.

    ``phases`` come from the run process, those of ``turns`` from the gateway.
    """
    brought: Phases = {}
    for turn in turns:
        for name, spent in turn.phases.items():
            brought[name] = brought.get(name, 0) + spent
    own = dict(phases)
    too_much = _taken(own, AROUND, sum(brought.values()))
    # Spans of the agent's code in this process are more precise about the time between its calls.
    too_much = _taken(brought, BETWEEN, too_much)
    too_much = _taken(brought, sorted(brought, key=brought.__getitem__, reverse=True), too_much)
    for name, spent in brought.items():
        own[name] = own.get(name, 0) + spent
    return {name: spent for name, spent in own.items() if spent}


def _taken(phases: Phases, names: Sequence[str], wanted: int) -> int:
    """Subtract ``wanted`` from the named phases, in order, and return what could not be subtracted."""
    for name in names:
        taken = min(phases.get(name, 0), wanted)
        if taken:
            phases[name] -= taken
            wanted -= taken
    return wanted
