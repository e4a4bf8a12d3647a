"""A planted fault of any of 17 kinds comes first in the report, and logs without a fault have no finding.

``python -m tests.telemetry.test_planted_kinds`` prints the score of each kind.
"""

import sys
import tempfile
from pathlib import Path

from forebay.telemetry.analysis import analyse, load
from tests.telemetry.planted_kinds import KINDS, NUM_SEEDS, plant, write_clean

NUM_CLEAN = 40


def miss_of(kind: str, seed: int) -> tuple[str, str]:
    """What the report's first finding gets wrong, and whether its seconds do; "" if right."""
    with tempfile.TemporaryDirectory() as folder:
        truth = plant(kind, seed, Path(folder))
        first = next(iter(analyse(load(Path(folder))).findings), None)
    missed = truth.misses(first)
    if missed or first is None or truth.is_priced(first.seconds):
        return missed and f"{kind}, seed {seed}: {missed} (planted: {truth})", ""
    return "", f"{kind}, seed {seed}: {first.seconds:.1f} s (planted: {truth}): {first.sentence}"


def clean_miss(seed: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        findings = analyse(load(write_clean(seed, Path(folder)))).findings
    return "; ".join(f"[{finding.cause}] {finding.sentence}" for finding in findings)


def main(kinds: list[str]) -> None:
    """Print the score of ``kinds``, or of all, and each miss."""
    right = 0
    for kind in kinds or KINDS:
        if kind == "clean":
            continue
        missed = [miss_of(kind, seed) for seed in range(NUM_SEEDS)]
        good = sum(not miss for miss, _ in missed)
        right += good
        print(f"{kind:20} {good} of {NUM_SEEDS}, seconds wrong in {sum(bool(wrong) for _, wrong in missed)}")
        for miss, wrong in missed:
            if miss or wrong:
                print(f"    {'' if miss else 'SECONDS '}{miss or wrong}"[:600])
    print(f"{right} right")
    if not kinds or "clean" in kinds:
        found = {seed: text for seed in range(NUM_CLEAN) if (text := clean_miss(seed))}
        print(f"{len(found)} of {NUM_CLEAN} clean logs have findings")
        for seed, text in found.items():
            print(f"    clean, seed {seed}: {text}"[:600])


if __name__ == "__main__":
    main(sys.argv[1:])
