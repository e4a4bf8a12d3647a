"""A log of rollouts as a simulation needs it, whoever wrote it: lengths by prompt, engines, turns; times in seconds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay.core.ids import InstanceId


@dataclass(slots=True)
class LoggedTurn:
    """One call of an engine."""

    begin_s: float
    engine: str
    prompt: int
    cached: int
    sampled: int
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    unsplit_s: float = 0.0
    """In the engine, of which nobody says what it was."""
    is_split: bool = False
    """Whether the engine told its times."""
    group: tuple[InstanceId, int] = ("", 0)
    """Of which prompt and epoch it is."""
    is_capped: bool = False
    """Whether it ended at its ``max_tokens``."""

    @property
    def engine_s(self) -> float:
        """All of the call."""
        return self.queue_s + self.prefill_s + self.decode_s + self.unsplit_s

    @property
    def entered_s(self) -> float:
        """When it left the engine's queue."""
        return self.begin_s + self.queue_s

    @property
    def prefilled_s(self) -> float:
        """When its prompt had been read."""
        return self.entered_s + self.prefill_s

    @property
    def left_s(self) -> float:
        """When its engine was done with it; its reply may still have been on its way."""
        return self.end_s - (self.unsplit_s if self.is_split else 0.0)

    @property
    def end_s(self) -> float:
        return self.begin_s + self.engine_s


@dataclass(slots=True)
class LoggedRollout:
    """One attempt of a rollout."""

    instance: InstanceId
    epoch: int
    number: int
    attempt: int
    step: int
    ending: str
    reward: float | None
    is_capped: bool
    started_s: float
    """When its rollout function was called."""
    left_s: float
    """When its place was free again; its sample may still have been on its way."""
    ended_s: float
    waited_s: float
    """Of the time between, for engines and weights."""
    turns: list[LoggedTurn] = field(default_factory=list)

    @property
    def sampled(self) -> int:
        return sum(turn.sampled for turn in self.turns)

    @property
    def prompt(self) -> int:
        return self.turns[0].prompt if self.turns else 0

    @property
    def is_whole(self) -> bool:
        """Whether its length is that of a whole answer."""
        return self.ending == "finished" and self.sampled > 0


@dataclass(slots=True)
class LoggedGroup:
    """The answers to one prompt, in one epoch."""

    instance: InstanceId
    epoch: int
    rollouts: list[LoggedRollout] = field(default_factory=list)
    """Whole ones, by their numbers."""

    @property
    def lengths(self) -> list[int]:
        return [each.sampled for each in self.rollouts]


@dataclass
class RolloutLog:
    """What a log tells. Rollouts are in the order in which they were started."""

    title: str
    rollouts: list[LoggedRollout]
    is_grouped: bool = True
    """Whether it says which answers are those of one prompt."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the run, as far as they are told: ``group_size``, ``num_process``, ``max_tokens``, ``scheduler``, …"""
    groups_by_read: Sequence[int] = ()
    """Groups of each read that brought any."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know: lines that are missing."""

    def groups(self) -> Iterator[LoggedGroup]:
        """Those with whole answers, in the order of their first start."""
        found: dict[tuple[InstanceId, int], LoggedGroup] = {}
        for each in self.rollouts:
            key = each.instance, each.epoch
            group = found.setdefault(key, LoggedGroup(*key))
            if each.is_whole:
                group.rollouts.append(each)
        for group in found.values():
            group.rollouts.sort(key=lambda each: each.number)
            if group.rollouts:
                yield group

    @property
    def engines(self) -> list[str]:
        """That had a call."""
        return sorted({turn.engine for each in self.rollouts for turn in each.turns})

    @property
    def group_size(self) -> int:
        """As the run says, else the answers that most groups have."""
        stated = self.settings.get("group_size")
        if stated:
            return int(stated)
        sizes = [len(group.rollouts) for group in self.groups()]
        return max(set(sizes), key=lambda size: (sizes.count(size), size))

    @property
    def num_process(self) -> int:
        """As the run says, else the most rollouts that ran at once."""
        stated = self.settings.get("num_process")
        if isinstance(stated, int) and stated > 0:
            return stated
        changes = [(each.started_s, 1) for each in self.rollouts] + [(each.left_s, -1) for each in self.rollouts]
        running = most = 0
        for _, change in sorted(changes):
            running += change
            most = max(most, running)
        return most

    @property
    def begin_s(self) -> float:
        return min(each.started_s for each in self.rollouts)

    @property
    def makespan_s(self) -> float:
        """From the first start to the last end."""
        return max(each.ended_s for each in self.rollouts) - self.begin_s
