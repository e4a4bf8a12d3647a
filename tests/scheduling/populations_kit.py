"""The populations on which policies are compared: eight engines, and four times what fits into them."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from forebay.core.scheduling.policy import PastRollout
from forebay.core.scheduling.scheduler import Scheduler
from forebay.workers.simulator.cost import EngineCost
from forebay.workers.simulator.populations import POPULATIONS
from forebay.workers.simulator.scenario import Scenario, simulate

EQUAL = (1.0,) * 8
UNEQUAL = (1.0,) * 4 + (2.0,) * 4
GROUP_SIZE = 8
ANOTHER_EPOCH = 10_000


def four_times(name: str, policy: str, seed: int, speeds: Sequence[float] = EQUAL) -> Scenario:
    """Four times as many rollouts as there are places, of the population of this name."""
    population, places = POPULATIONS[name], 16 if name == "long" else 32
    num_process = places * len(speeds)
    return Scenario(
        prompts=population.prompts(4 * num_process // GROUP_SIZE, seed),
        group_size=GROUP_SIZE,
        num_process=num_process,
        engines=[EngineCost(step_s=0.010, step_s_per_sequence=0.00012, places=places, speed=speed) for speed in speeds],
        scheduler=Scheduler(policy=policy),
        max_tokens=population.cap,
        seed=seed,
    )


def mean_ratio(name: str, policy: str, other: str, num_seeds: int, speeds: Sequence[float] = EQUAL) -> float:
    """Of the makespans of two policies, on the same answers."""
    return mean(
        _makespan_s(name, policy, seed, speeds) / _makespan_s(name, other, seed, speeds) for seed in range(num_seeds)
    )


def mean_ratio_with_history(name: str, policy: str, other: str, num_seeds: int) -> float:
    """The same, where the policy knows another epoch of the same prompts."""
    ratios = []
    for seed in range(num_seeds):
        before = simulate(replace(four_times(name, other, seed), seed=seed + ANOTHER_EPOCH))
        past = [
            PastRollout(
                each.instance, each.epoch, each.number, each.sampled, (each.end - each.started) / 1e9, each.prompt
            )
            for each in before.rollouts
            if each.ending == "finished"
        ]
        after = simulate(replace(four_times(name, policy, seed), history=past))
        ratios.append(after.makespan_s / _makespan_s(name, other, seed))
    return mean(ratios)


def _makespan_s(name: str, policy: str, seed: int, speeds: Sequence[float] = EQUAL) -> float:
    return simulate(four_times(name, policy, seed, speeds)).makespan_s
