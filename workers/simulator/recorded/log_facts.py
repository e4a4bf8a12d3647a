"""Facts about answers: how much those to one prompt differ, and how well the first one predicts the others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.telemetry.analysis.intervals import covered
from forebay.workers.simulator.recorded.rollout_log import NS, RolloutLog, is_whole, left_ns

if TYPE_CHECKING:
    from numpy import bool_, float64
    from numpy.typing import NDArray

TOP = 0.2
"""Share of the groups that a probe marks as long."""
TAIL = 0.1
"""Share of the rollouts that end last."""


@dataclass(frozen=True)
class AnswerFacts:
    """Facts about groups of answers. Shares without data are None."""

    num_groups: int
    num_answers: int
    group_size: int
    """The most frequent size."""
    median: float
    p90: float
    longest: int
    cv_within: float | None
    """Deviation of a group's lengths as a share of their mean, averaged over groups."""
    cv_most: float | None
    cv_between: float | None
    """Deviation of the groups' means, as a share of their mean."""
    threshold: float
    """Power of two next to the median. A probe predicts whether the longest of its siblings is above it."""
    false_negatives: float | None
    """Share of the groups with a probe below the threshold in which another answer is above it."""
    precision: float | None
    """Share of the fifth of groups with the longest probes in which another answer is above the threshold."""
    rank_correlation: float | None
    """Spearman's correlation of probes and the means of their siblings."""


@dataclass(frozen=True)
class RunFacts:
    """Use of a recorded run's engines."""

    makespan_s: float
    num_engines: int
    num_process: int
    idle_share: float
    """Share of its engines' time without any call."""
    free_share: float
    """Share of its slots' time without a rollout."""
    tail_share: float
    """Share of its time in which the last tenth of its rollouts ended."""
    capped_share: float
    """Share of the answers that were cut at their limit."""
    waiting_share: float
    """Share of the calls' time in engines' queues."""


def answer_facts(groups: Sequence[Sequence[int]], threshold: float | None = None) -> AnswerFacts:
    """Facts about the lengths of each group's answers, in the order of their numbers; the first is the probe."""
    import numpy

    everything = numpy.array([length for group in groups for length in group], dtype=float)
    limit = threshold or 2.0 ** round(float(numpy.log2(numpy.median(everything))))
    several = [numpy.array(group, dtype=float) for group in groups if len(group) > 1]
    sizes = [len(group) for group in groups]
    means = numpy.array([each.mean() for each in several])
    within = [float(each.std() / each.mean()) for each in several]
    probes = numpy.array([each[0] for each in several])
    others_longest = numpy.array([each[1:].max() for each in several])
    return AnswerFacts(
        num_groups=len(groups),
        num_answers=len(everything),
        group_size=max(set(sizes), key=lambda size: (sizes.count(size), size)),
        median=float(numpy.median(everything)),
        p90=float(numpy.quantile(everything, 0.9)),
        longest=int(everything.max()),
        cv_within=float(numpy.mean(within)) if within else None,
        cv_most=max(within, default=None),
        cv_between=float(means.std() / means.mean()) if within else None,
        threshold=limit,
        false_negatives=_share(others_longest[probes < limit] > limit) if within else None,
        precision=_precision(probes, others_longest, limit) if within else None,
        rank_correlation=_rank_correlation(probes, numpy.array([each[1:].mean() for each in several])),
    )


def _precision(probes: "NDArray[float64]", others_longest: "NDArray[float64]", limit: float) -> float | None:
    import numpy

    top = numpy.argsort(-probes, kind="stable")[: max(1, round(TOP * len(probes)))]
    return _share(others_longest[top] > limit)


def _share(which: "NDArray[bool_]") -> float | None:
    return float(which.mean()) if len(which) else None


def _rank_correlation(probes: "NDArray[float64]", others: "NDArray[float64]") -> float | None:
    from scipy.stats import spearmanr

    if len(set(probes)) < 2 or len(set(others)) < 2:  # all equal: no order
        return None
    return float(spearmanr(probes, others).statistic)


def run_facts(log: RolloutLog) -> RunFacts:
    """Facts about a recorded run."""
    makespan_s = max(1e-9, log.makespan_s)
    ends = sorted(each.end for each in log.rollouts)
    last_tenth_s = (ends[-1] - ends[min(len(ends) - 1, int(len(ends) * (1 - TAIL)))]) * NS
    calls, engines = log.calls, log.engines
    busy_s = sum(covered([(call.begin_s, call.end_s) for call in calls if call.engine == engine]) for engine in engines)
    occupied_s = sum(left_ns(each) - each.started for each in log.rollouts) * NS
    whole = [each for each in log.rollouts if is_whole(each)]
    return RunFacts(
        makespan_s,
        len(engines),
        log.num_process,
        idle_share=max(0.0, 1 - busy_s / (makespan_s * max(1, len(engines)))),
        free_share=max(0.0, 1 - occupied_s / (makespan_s * log.num_process)),
        tail_share=last_tenth_s / makespan_s,
        capped_share=sum(each.is_capped for each in whole) / max(1, len(whole)),
        waiting_share=sum(call.queue_s for call in calls) / max(1e-9, sum(call.duration_s for call in calls)),
    )
