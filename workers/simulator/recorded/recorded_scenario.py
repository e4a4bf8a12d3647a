"""Simulates a recorded run on models of its engines, with its answers, order, settings and trainer."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay.core.ids import InstanceId
from forebay.core.scheduling.oversampling import Oversampling, parse_oversampling
from forebay.core.scheduling.scheduler import Scheduler, parse_scheduler
from forebay.telemetry.tracing.records import RolloutSummary
from forebay.workers.simulator.modelled_engines import engine_url
from forebay.workers.simulator.populations import AnswerLengths
from forebay.workers.simulator.recorded.engine_fit import EngineFit
from forebay.workers.simulator.recorded.rollout_log import NS, RolloutLog
from forebay.workers.simulator.scenario import Scenario, simulate

if TYPE_CHECKING:
    from numpy.random import Generator

LONGEST = 1 << 20

Group = list[RolloutSummary]
"""Complete answers to one prompt in one epoch."""


@dataclass(frozen=True)
class SelfCheck:
    """Times of a recorded run and of its simulation."""

    recorded_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        """Error of the makespan, as a share of the recorded one."""
        return self.simulated_s / self.recorded_s - 1


def self_check(log: RolloutLog, fit: EngineFit) -> SelfCheck:
    """Simulate the recorded run unchanged."""
    return SelfCheck(log.makespan_s, simulate(recorded_scenario(log, fit)).makespan_s)


def recorded_scenario(log: RolloutLog, fit: EngineFit) -> Scenario:
    """Scenario with the settings and answers of the log's run."""
    prompts, num_epochs = recorded_prompts(log)
    oversampling = recorded_oversampling(log)
    return Scenario(
        prompts=prompts,
        group_size=log.group_size,
        num_process=log.num_process,
        engines=list(fit.costs.values()),
        scheduler=_scheduler(log, list(fit.costs)),
        oversampling=oversampling,
        max_tokens=int(log.settings.get("max_tokens") or LONGEST),
        train_s=training_s(log, oversampling.groups_per_step if oversampling is not None else None),
        num_epochs=num_epochs,
        groups_per_read=_groups_per_read(log),
    )


def recorded_oversampling(log: RolloutLog) -> Oversampling | None:
    """Over-sampling of the run."""
    stated = log.settings.get("oversampling")
    return parse_oversampling(stated) if stated else None


def _scheduler(log: RolloutLog, engines: Sequence[str]) -> Scheduler:
    stated: dict[str, Any] = dict(log.settings.get("scheduler") or {})
    if isinstance(stated.get("heavy"), list):
        named = [engine_url(engines.index(url)) for url in stated["heavy"] if url in engines]
        stated = {**stated, "heavy": named} if named else {name: stated[name] for name in stated if name != "heavy"}
    return parse_scheduler(stated)


def _groups_per_read(log: RolloutLog) -> int | None:
    """Median number of groups that the trainer read at once; None with fewer than two reads in the log."""
    read = sorted(log.groups_by_read)
    return read[len(read) // 2] if read and len(read) > 1 else None


# --- answers


def recorded_prompts(log: RolloutLog, shuffle: "Generator | None" = None) -> tuple[list[AnswerLengths], int]:
    """Prompts in the order in which they began, and the number of epochs of each.

    ``shuffle`` reorders the prompts, and the answers of each group: the recorded order is one of these.
    """
    epochs: dict[InstanceId, list[Group]] = defaultdict(list)
    for group in log.groups():
        epochs[group[0].instance].append(group)
    counts = {len(groups) for groups in epochs.values()}
    if len(counts) == 1:
        found = [
            _prompt(instance, sorted(groups, key=lambda group: group[0].epoch), log.group_size, shuffle)
            for instance, groups in epochs.items()
        ]
        num_epochs = counts.pop()
    else:  # the run was stopped within an epoch, or lost groups
        found = [
            _prompt(f"{each[0].epoch}/{each[0].instance}", [each], log.group_size, shuffle) for each in log.groups()
        ]
        num_epochs = 1
    if shuffle is not None:
        shuffle.shuffle(found)
    return found, num_epochs


def _prompt(
    instance: InstanceId, groups: Sequence[Group], group_size: int, shuffle: "Generator | None"
) -> AnswerLengths:
    slots: Group = []
    spares: Group = []
    for group in groups:
        own, more = _slots(group, group_size)
        if shuffle is not None:
            own = [own[place] for place in shuffle.permutation(group_size)]
        slots, spares = slots + own, spares + more
    answers = slots + spares
    lengths = [each.sampled for each in answers]
    rewards = tuple(each.reward for each in answers if each.reward is not None)
    turns = sum(len(each.turns) for each in answers) / len(answers)
    return AnswerLengths(
        instance_id=instance,
        prompt_tokens=max(1, round(sum(each.turns[0].prompt for each in answers) / len(answers))),
        mean=sum(lengths) / len(lengths),
        deviation=0.0,
        recorded=tuple(lengths),
        num_turns=max(1, round(turns)),
        rewards=rewards if len(rewards) == len(lengths) else (),
        has_own_limits=all(len(each.turns) == 1 and each.turns[0].finish_reason == "length" for each in answers),
    )


def _slots(group: Group, group_size: int) -> tuple[Group, Group]:
    """One complete answer for each number, and the spares. A sibling's answer replaces a missing one."""
    by_number = {each.number: each for each in group}
    own = [by_number.pop(number, group[number % len(group)]) for number in range(group_size)]
    return own, list(by_number.values())


# --- the trainer


def training_s(log: RolloutLog, groups_per_step: int | None) -> float:
    """Mean seconds from the last group of a step to the first rollout of the next step; 0 without steps."""
    if groups_per_step is None:
        return 0.0
    complete = sorted(max(each.end for each in group) for group in log.groups() if len(group) >= log.group_size)
    begins = sorted(
        min(each.started for each in log.rollouts if each.step == step) for step in {each.step for each in log.rollouts}
    )
    ends = complete[groups_per_step - 1 :: groups_per_step]
    gaps = [max(0, begin - end) * NS for end, begin in zip(ends, begins[1:], strict=False)]
    return sum(gaps) / len(gaps) if gaps else 0.0
