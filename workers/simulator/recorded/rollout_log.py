"""A log of rollouts from any source, as a simulation needs it: lengths by prompt, and calls of engines."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from forebay.core.ids import InstanceId
from forebay.telemetry.tracing.records import RolloutSummary, TurnSummary

NS = 1e-9
_WAITS = ("hold", "engine_wait", "retry")

GroupKey = tuple[InstanceId, int]
"""A prompt and its epoch."""


@dataclass(frozen=True, slots=True)
class LoggedCall:
    """One call of an engine. Its times are in seconds, in chronological order."""

    engine: str
    group: GroupKey
    prompt: int
    cached: int
    sampled: int
    is_capped: bool
    """Whether it ended at its ``max_tokens``."""
    is_split: bool
    """Whether the engine reported its times."""
    begin_s: float
    entered_s: float
    """When it left the engine's queue."""
    prefilled_s: float
    """When its prompt was read."""
    left_s: float
    """When its engine finished; its reply may still have been in transit."""
    end_s: float

    @classmethod
    def of(cls, turn: TurnSummary, rollout: RolloutSummary) -> "LoggedCall":
        """Combine the calls of one turn into one."""
        begin = turn.t + _spent(turn, *_WAITS)
        entered = begin + _spent(turn, "engine_queue")
        prefilled = entered + _spent(turn, "prefill")
        decoded = prefilled + _spent(turn, "decode")
        end = decoded + _spent(turn, "engine")  # what the engine did in this time is unknown
        is_split = decoded > prefilled
        moments = begin, entered, prefilled, decoded if is_split else end, end
        return cls(
            turn.engine or rollout.engine,
            (rollout.instance, rollout.epoch),
            turn.prompt,
            turn.cached,
            turn.sampled,
            turn.finish_reason == "length",
            is_split,
            *(moment * NS for moment in moments),
        )

    @property
    def queue_s(self) -> float:
        return self.entered_s - self.begin_s

    @property
    def duration_s(self) -> float:
        return self.end_s - self.begin_s


def calls_of(rollout: RolloutSummary) -> list[LoggedCall]:
    """Calls of one attempt."""
    return [LoggedCall.of(turn, rollout) for turn in rollout.turns]


def is_whole(rollout: RolloutSummary) -> bool:
    """Whether its length is that of a complete answer."""
    return rollout.ending == "finished" and any(turn.sampled for turn in rollout.turns)


def left_ns(rollout: RolloutSummary) -> int:
    """When its slot was free again; its sample may still have been in transit."""
    after = sum(_spent(turn, "group", "write") for turn in rollout.turns) or _spent(rollout, "group", "write")
    return max(rollout.started, rollout.end - after)


def busy_s(rollout: RolloutSummary) -> float:
    """Seconds for which it had its slot, without the time in which it waited for engines and weights."""
    return (left_ns(rollout) - rollout.started - _spent(rollout, *_WAITS)) * NS


def _spent(record: TurnSummary | RolloutSummary, *phases: str) -> int:
    return sum(record.phases.get(name, 0) for name in phases)


@dataclass
class RolloutLog:
    """Contents of a log."""

    title: str
    rollouts: list[RolloutSummary]
    """Rollouts by start; one that never started counts as started at its end."""
    is_grouped: bool = True
    """Whether it groups answers by prompt."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Recorded settings of the run: ``group_size``, ``num_process``, ``max_tokens``, ``scheduler``, …"""
    groups_by_read: Sequence[int] = ()
    """Number of groups of each read that returned any."""
    notes: list[str] = field(default_factory=list)
    """Notes for the reader, such as missing lines."""

    def groups(self) -> Iterator[list[RolloutSummary]]:
        """Complete answers to each prompt in one epoch, by number. Groups are in the order of their first start."""
        found: dict[GroupKey, list[RolloutSummary]] = {}
        for each in self.rollouts:
            group = found.setdefault((each.instance, each.epoch), [])
            if is_whole(each):
                group.append(each)
        return (sorted(group, key=lambda each: each.number) for group in found.values() if group)

    @cached_property
    def calls(self) -> list[LoggedCall]:
        """Calls of all rollouts."""
        return [call for each in self.rollouts for call in calls_of(each)]

    @property
    def engines(self) -> list[str]:
        """Engines that had a call."""
        return sorted({call.engine for call in self.calls})

    @property
    def group_size(self) -> int:
        """The recorded setting, or else the most frequent number of answers."""
        stated = self.settings.get("group_size")
        if stated:
            return int(stated)
        sizes = [len(group) for group in self.groups()]
        return max(set(sizes), key=lambda size: (sizes.count(size), size))

    @property
    def num_process(self) -> int:
        """The recorded setting, or else the most rollouts that ran at once."""
        stated = self.settings.get("num_process")
        if isinstance(stated, int) and stated > 0:
            return stated
        changes = [(each.started, 1) for each in self.rollouts] + [(left_ns(each), -1) for each in self.rollouts]
        running = most = 0
        for _, change in sorted(changes):
            running += change
            most = max(most, running)
        return most

    @property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last end."""
        return (max(each.end for each in self.rollouts) - min(each.started for each in self.rollouts)) * NS
