"""What putting groups off saves, and what it does to the lengths that are trained: the real job, in virtual time."""

import numpy as np

from forebay.core.scheduling.oversampling import Oversampling
from forebay.workers.simulator.cost import EngineCost
from forebay.workers.simulator.populations import POPULATIONS
from forebay.workers.simulator.scenario import Scenario, SimulatedRun, simulate

NUM_STEPS = 50
GROUPS_PER_STEP = 16
ENGINES = [EngineCost(step_s=0.010, step_s_per_sequence=0.00012, places=16)] * 8


def run(groups_begun: int, *, leftover: str = "defer", seed: int = 0) -> SimulatedRun:
    population = POPULATIONS["long"]
    given = {"groups_per_step": GROUPS_PER_STEP, "groups_begun": groups_begun, "leftover": leftover}
    return simulate(
        Scenario(
            prompts=population.prompts(NUM_STEPS * GROUPS_PER_STEP, seed),
            num_process=8 * 16,
            engines=ENGINES,
            oversampling=Oversampling.model_validate(given),
            max_tokens=population.cap,
            num_steps=NUM_STEPS,
            seed=seed,
        )
    )


def trained_p90(simulated: SimulatedRun) -> float:
    return float(np.percentile([each.sampled for each in simulated.rollouts if each.ending == "finished"], 90))


def test_deferral_saves_a_sixth_and_trains_long_answers_as_often() -> None:
    """Against a step that begins just the groups that it needs."""
    plain, deferred = run(GROUPS_PER_STEP), run(GROUPS_PER_STEP * 5 // 4)
    assert len(plain.steps) == len(deferred.steps) == NUM_STEPS
    assert deferred.makespan_s / plain.makespan_s <= 0.85
    assert abs(trained_p90(deferred) / trained_p90(plain) - 1) <= 0.05
