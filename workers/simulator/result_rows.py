"""What seeds come to: means with their 95 % intervals, and how much a variation differs from the first one."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from forebay.workers.simulator.run_measures import MEASURES, RunMeasures

if TYPE_CHECKING:
    from forebay.workers.simulator.scenario import Scenario

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Variation:
    """One row: what is different from the run as it was."""

    policy: str
    engines: int | None
    num_process: int | str | None
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """In words, for a table."""
        return " ".join(f"{name}={json.dumps(value)}" for name, value in self.settings)


@dataclass(frozen=True)
class Mean:
    """Over seeds; ``margin`` to each side is its 95 % interval, 0 for a single seed."""

    mean: float
    margin: float = 0.0


@dataclass(frozen=True)
class ResultRow:
    """One variation over all seeds."""

    policy: str
    label: str
    engines: int
    num_process: int | str
    num_seeds: int
    measures: dict[str, Mean | None]
    """By their names; None for what no run has."""
    time_ratio: Mean
    """Its mean step time as a share of the first row's with the same seed."""
    is_best: bool = False
    """Whether no other row is better in time and not worse in waste and bias."""

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        return asdict(self)


def result_rows(
    wanted: Sequence[Variation], scenarios: "Sequence[Scenario]", measured: Sequence[Sequence[RunMeasures]]
) -> list[ResultRow]:
    """A row for each variation, given a scenario of it, and the measures of each of its seeds."""
    first = measured[0]
    rows = [
        ResultRow(
            variation.policy,
            variation.label,
            len(scenario.engines),
            scenario.num_process,
            len(runs),
            {name: _mean([getattr(run, name) for run in runs]) for name in MEASURES},
            mean_of([run.step_mean_s / base.step_mean_s for run, base in zip(runs, first, strict=True)]),
        )
        for variation, scenario, runs in zip(wanted, scenarios, measured, strict=True)
    ]
    return [_marked(row, rows) for row in rows]


def mean_of(values: Sequence[float]) -> Mean:
    """The mean of some seeds, by Student's distribution."""
    import numpy
    from scipy.stats import t

    if len(values) < 2:
        return Mean(float(values[0]))
    spread = float(numpy.std(values, ddof=1)) / math.sqrt(len(values))
    return Mean(float(numpy.mean(values)), float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * spread)


def _mean(values: Sequence[float | None]) -> Mean | None:
    known = [value for value in values if value is not None]
    return mean_of(known) if known else None


def _marked(row: ResultRow, rows: Sequence[ResultRow]) -> ResultRow:
    return replace(row, is_best=not any(_beats(other, row) for other in rows))


def _beats(one: ResultRow, other: ResultRow) -> bool:
    mine, theirs = _costs(one), _costs(other)
    return all(a <= b for a, b in zip(mine, theirs, strict=True)) and mine != theirs


def _costs(row: ResultRow) -> tuple[float, float, float]:
    """Time, waste and bias: less of each is better. What is not clear from the seeds is no difference."""
    time, waste, above = (row.measures[name] for name in ("step_mean_s", "waste", "above_p90"))
    assert time is not None
    assert waste is not None
    assert above is not None
    return time.mean, round(waste.mean, 3), round(abs(above.mean - 0.1), 3)
