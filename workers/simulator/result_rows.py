"""Combines seeds: means with 95 % intervals, and the difference of each variation from the first one."""

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
    """Changes of one row relative to the original run."""

    policy: str
    engines: int | None
    num_process: int | str | None
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """The settings as text, for a table."""
        return " ".join(f"{name}={json.dumps(value)}" for name, value in self.settings)


@dataclass(frozen=True)
class Mean:
    """Mean over seeds. ``margin`` is half the width of its 95 % interval, 0 for a single seed."""

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
    """Measures by name; None for one that no run has."""
    time_ratio: Mean
    """Mean step time as a share of the first row's, for equal seeds."""
    is_best: bool = False
    """Whether no other row is better in time, waste or bias without being worse in another of them."""

    def as_json(self) -> dict[str, Any]:
        """The row as a JSON object."""
        return asdict(self)


def result_rows(
    wanted: Sequence[Variation], scenarios: "Sequence[Scenario]", measured: Sequence[Sequence[RunMeasures]]
) -> list[ResultRow]:
    """A row for each variation, from one of its scenarios and the measures of its seeds."""
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
    """Mean over seeds, with an interval by Student's distribution."""
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
    """Time, waste and bias; less is better. Waste and bias are rounded, so that tiny differences do not count."""
    time, waste, above = (row.measures[name] for name in ("step_mean_s", "waste", "above_p90"))
    assert time is not None
    assert waste is not None
    assert above is not None
    return time.mean, round(waste.mean, 3), round(abs(above.mean - 0.1), 3)
