"""``num_process: "auto"`` against numbers that somebody chose: the real job, in virtual time."""

from typing import Literal

import pytest

from forebay.workers.simulator.cost import EngineCost
from forebay.workers.simulator.populations import POPULATIONS
from forebay.workers.simulator.scenario import Scenario, simulate

NUM_PROMPTS = 160
ENGINES = [EngineCost(step_s=0.010, step_s_per_sequence=0.00012, places=32)] * 4
FIXED = (64, 96, 128, 160, 256)


@pytest.mark.parametrize("name", ["short", "long"])
def test_places_that_are_found_out_are_nearly_as_good_as_the_best_number(name: str) -> None:
    """Engines queue beyond 32, and nobody has told that to the run."""
    population = POPULATIONS[name]
    prompts = population.prompts(NUM_PROMPTS, seed=0)

    def makespan_s(num_process: int | Literal["auto"]) -> float:
        return simulate(
            Scenario(prompts=prompts, num_process=num_process, engines=ENGINES, max_tokens=population.cap)
        ).makespan_s

    best_s = min(map(makespan_s, FIXED))
    assert makespan_s("auto") <= 1.15 * best_s
    assert makespan_s(32) >= 2 * best_s, "the number makes a difference here"
