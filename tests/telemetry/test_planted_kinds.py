"""A planted fault of any of 17 kinds comes first in the report, and logs without a fault have no finding.

``python -m tests.telemetry.test_planted_kinds [--seeds 5] [KIND …]`` prints the score of each kind.
"""

import argparse
import functools
import tempfile
from pathlib import Path

import pytest

from forebay.telemetry.analysis import analyse, load
from tests.telemetry.planted_kinds import KINDS, plant, write_clean

CLEAN = "clean"
NUM_SEEDS = 5
LEAST_RIGHT = 82
NUM_CLEAN = 40


@functools.cache
def miss_of(kind: str, seed: int) -> tuple[str, str]:
    """What the report's first finding gets wrong, and whether its seconds do; "" if right."""
    with tempfile.TemporaryDirectory() as folder:
        truth = plant(kind, seed, Path(folder))
        first = next(iter(analyse(load(Path(folder))).findings), None)
    missed = truth.misses(first)
    told = f"{kind}, seed {seed}: {missed or (first and first.sentence)} (planted: {truth})"
    is_priced = first is None or truth.is_priced(first.seconds)
    return told if missed else "", "" if missed or is_priced else told


def found_in_clean(seed: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        findings = analyse(load(write_clean(seed, Path(folder)))).findings
    return "; ".join(f"[{finding.cause}] {finding.sentence}" for finding in findings)


@pytest.mark.parametrize("kind", KINDS)
def test_the_planted_fault_comes_first_with_its_place(kind: str) -> None:
    missed = [miss for seed in range(NUM_SEEDS) if (miss := miss_of(kind, seed)[0])]
    assert len(missed) <= 2, "\n".join(missed)


def test_of_85_planted_faults_at_least_82_come_first() -> None:
    missed = [miss for kind in KINDS for seed in range(NUM_SEEDS) if (miss := miss_of(kind, seed)[0])]
    assert len(KINDS) * NUM_SEEDS - len(missed) >= LEAST_RIGHT, "\n".join(missed)


def test_its_seconds_are_within_15_percent() -> None:
    wrong = [told for kind in KINDS for seed in range(NUM_SEEDS) if (told := miss_of(kind, seed)[1])]
    assert len(wrong) <= len(KINDS) * NUM_SEEDS - LEAST_RIGHT, "\n".join(wrong)


def test_of_40_logs_without_a_fault_at_most_one_has_findings() -> None:
    found = [f"seed {seed}: {text}" for seed in range(NUM_CLEAN) if (text := found_in_clean(seed))]
    assert len(found) <= 1, "\n".join(found)


def main() -> None:
    """Print the score of each kind, each miss, and each finding in a clean log."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*", default=[*KINDS, CLEAN])
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    asked = parser.parse_args()
    right = 0
    for kind in asked.kinds:
        if kind == CLEAN:
            found = {seed: text for seed in range(8 * asked.seeds) if (text := found_in_clean(seed))}
            print(f"{len(found)} of {8 * asked.seeds} clean logs have findings")
            print("".join(f"    clean, seed {seed}: {text[:400]}\n" for seed, text in found.items()), end="")
            continue
        results = [miss_of(kind, seed) for seed in range(asked.seeds)]
        missed, priced_wrong = [text for text, _ in results if text], [text for _, text in results if text]
        right += asked.seeds - len(missed)
        print(f"{kind:20} {asked.seeds - len(missed)} of {asked.seeds}, seconds wrong in {len(priced_wrong)}")
        print(
            "".join(f"    {text[:600]}\n" for text in [*missed, *(f"SECONDS {text}" for text in priced_wrong)]), end=""
        )
    print(f"{right} right")


if __name__ == "__main__":
    main()
