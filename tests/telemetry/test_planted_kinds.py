"""A planted fault of any of 17 kinds comes first in the report, and logs without a fault have no finding."""

import tempfile
from pathlib import Path

import pytest

from forebay.telemetry.analysis import analyse, load
from tests.telemetry.planted_kinds import KINDS, plant
from tests.telemetry.planted_shapes import write_clean

NUM_CLEAN = 40
SAID = {
    "quarter_rate": "tokens/s per request, where others make ",
    "long_answer": "tokens (usually ",
    "slow_tool": "s more in tool",
    "slow_reward": "on its reward",
    "constant_phase": "do it once, when the data set is built",
}
"""Parts of the sentences about a kind."""


def miss_of(kind: str, seed: int) -> tuple[str, str]:
    """What the report's first finding gets wrong, and whether its seconds do; "" if right."""
    with tempfile.TemporaryDirectory() as folder:
        truth = plant(kind, seed, Path(folder))
        first = next(iter(analyse(load(Path(folder))).findings), None)
    missed = truth.misses(first)
    told = f"{kind}, seed {seed}: {missed or (first and first.sentence)} (planted: {truth})"
    assert missed or first is None or SAID.get(kind, "") in first.sentence
    is_priced = first is None or truth.is_priced(first.seconds)
    return told if missed else "", "" if missed or is_priced else told


def found_in_clean(seed: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        findings = analyse(load(write_clean(seed, Path(folder)))).findings
    return "; ".join(f"[{finding.cause}] {finding.sentence}" for finding in findings)


@pytest.mark.parametrize("seed", range(5))
def test_each_of_17_planted_faults_comes_first_with_its_place_and_16_with_their_seconds(seed: int) -> None:
    missed, wrong = (list(filter(None, told)) for told in zip(*(miss_of(kind, seed) for kind in KINDS), strict=True))
    assert not missed, "\n".join(missed)
    assert len(wrong) <= 1, "\n".join(wrong)


def test_of_40_logs_without_a_fault_at_most_one_has_findings() -> None:
    found = [f"seed {seed}: {text}" for seed in range(NUM_CLEAN) if (text := found_in_clean(seed))]
    assert len(found) <= 1, "\n".join(found)
