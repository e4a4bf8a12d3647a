"""Measures a simulated run: time of steps, waste, and how far trained answers differ from offered ones."""

from dataclasses import dataclass, fields

from forebay.core.ids import InstanceId
from forebay.telemetry.analysis.robust import ks_distance
from forebay.workers.simulator.attempt_records import SECOND_NS
from forebay.workers.simulator.populations import AnswerLengths
from forebay.workers.simulator.scenario import SimulatedRun

OVER = 1.5
"""An answer to an ordinary prompt is long above this multiple of the 80th percentile of the offered lengths."""
ORDINARY = 0.8
"""Share of the prompts, by their median length, that are ordinary."""


@dataclass(frozen=True)
class RunMeasures:
    """Measures of one run, or means over several. None if there is nothing to measure."""

    makespan_s: float
    step_mean_s: float
    step_p99_s: float
    trained_tokens_per_s: float
    waste: float
    """Share of all sampled tokens that no step trained on."""
    staleness: float
    """Mean number of weight versions between a rollout's start and the step that trained on it."""
    ks: float
    """Kolmogorov-Smirnov distance between the distributions of trained and offered lengths."""
    above_p90: float
    """Share of the trained answers above the 90th percentile of those offered; 0.1 without bias."""
    tail_kept: float | None
    """Number of long answers to ordinary prompts that were trained on, per offered one."""
    reward_gap: float | None
    """Mean reward of trained answers minus that of offered ones."""
    never_trained: float
    """Share of the begun prompts that no step trained on."""
    idle: float
    """Share of the engines' time without a sequence."""
    tail: float
    """Share of the sampling time of steps in which only the last tenth of their rollouts was left."""
    preemptions: float
    broken: float
    """Attempts that reached their cap, as a share of all rollouts."""


MEASURES = tuple(field.name for field in fields(RunMeasures))


def measure(run: SimulatedRun) -> RunMeasures:
    """Measure a run that is over."""
    import numpy

    trained = [each for each in run.rollouts if each.trained_step is not None]
    begun = {(each.instance, each.epoch) for each in run.rollouts}
    offered = _offered(run, begun)
    lengths = numpy.array([tokens for _, tokens, _ in offered], dtype=float)
    kept = numpy.array([each.sampled for each in trained], dtype=float)
    makespan_s = max(1e-9, run.makespan_s)
    steps = numpy.array([each.ended_s - each.begun_s for each in run.steps] or [makespan_s])
    sampled = sum(each.sampled + each.lost for each in run.rollouts)
    instances = {instance for instance, _ in begun}
    never = instances - {each.instance for each in trained}
    staleness = [each.trained_step - each.step for each in trained if each.trained_step is not None]
    return RunMeasures(
        makespan_s=makespan_s,
        step_mean_s=float(steps.mean()),
        step_p99_s=float(numpy.quantile(steps, 0.99)),
        trained_tokens_per_s=float(kept.sum() / makespan_s),
        waste=1 - float(kept.sum()) / sampled if sampled else 0.0,
        staleness=float(numpy.mean(staleness)) if staleness and run.steps else 0.0,
        ks=ks_distance(lengths.tolist(), kept.tolist()),
        above_p90=float((kept > numpy.quantile(lengths, 0.9)).mean()) if len(kept) else 0.0,
        tail_kept=_tail_kept(run, offered),
        reward_gap=_reward_gap(run, offered),
        never_trained=len(never) / max(1, len(instances)),
        idle=1 - sum(use.busy_s for use in run.engines) / (makespan_s * max(1, len(run.engines))),
        tail=_tail(run),
        preemptions=float(sum(use.preemptions for use in run.engines)),
        broken=sum(each.ending == "broken" for each in run.rollouts) / max(1, len(lengths)),
    )


_Offered = list[tuple[AnswerLengths, int, float | None]]


def _offered(run: SimulatedRun, begun: set[tuple[InstanceId, int]]) -> _Offered:
    """Prompt, length and reward of the answer that each slot would have without any selection."""
    scenario = run.scenario
    found = []
    for prompt in scenario.prompts:
        for epoch in range(scenario.num_epochs):
            if (prompt.instance_id, epoch) in begun:
                for slot in range(scenario.group_size):
                    answer = scenario.answers.of(prompt, epoch, slot, 0)
                    found.append((prompt, min(answer.tokens, scenario.max_tokens), answer.reward))
    return found


def _tail_kept(run: SimulatedRun, offered: _Offered) -> float | None:
    import numpy

    means: dict[InstanceId, list[int]] = {}
    for prompt, tokens, _ in offered:
        means.setdefault(prompt.instance_id, []).append(tokens)
    limit = numpy.quantile([numpy.median(each) for each in means.values()], ORDINARY)
    ordinary = {instance for instance, each in means.items() if numpy.median(each) <= limit}
    long = OVER * float(numpy.quantile([tokens for _, tokens, _ in offered], ORDINARY))
    before = sum(tokens > long for prompt, tokens, _ in offered if prompt.instance_id in ordinary)
    after = sum(
        each.sampled > long for each in run.rollouts if each.trained_step is not None and each.instance in ordinary
    )
    return after / before if before else None


def _reward_gap(run: SimulatedRun, offered: _Offered) -> float | None:
    before = [reward for _, _, reward in offered if reward is not None]
    after = [each.reward for each in run.rollouts if each.trained_step is not None and each.reward is not None]
    return sum(after) / len(after) - sum(before) / len(before) if before and after else None


def _tail(run: SimulatedRun) -> float:
    import numpy

    spans = {step.number: (step.begun_s, step.ready_s) for step in run.steps} or {0: (0.0, run.makespan_s)}
    ends: dict[int, list[float]] = {}
    for each in run.rollouts:
        if each.trained_step is not None:
            ends.setdefault(each.trained_step if run.steps else 0, []).append(each.end / SECOND_NS)
    known = [(*spans[number], float(numpy.quantile(found, 0.9))) for number, found in ends.items() if number in spans]
    lasted = sum(ready_s - begun_s for begun_s, ready_s, _ in known)
    return sum(ready_s - max(begun_s, most_s) for begun_s, ready_s, most_s in known) / lasted if lasted else 0.0
