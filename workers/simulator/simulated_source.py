"""Source of a simulation: a recorded run or a population of answers. Both make a scenario for each seed."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

from forebay.core.errors import InvalidInput
from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.policy import PolicyInputs, make_policy
from forebay.core.scheduling.scheduler import WINDOW
from forebay.workers.simulator.cost import EngineCost
from forebay.workers.simulator.modelled_engines import engine_url
from forebay.workers.simulator.populations import POPULATIONS, Population
from forebay.workers.simulator.recorded.engine_fit import EngineFit, fit_engines
from forebay.workers.simulator.recorded.log_facts import AnswerFacts, RunFacts, answer_facts, run_facts
from forebay.workers.simulator.recorded.read_logs import read_log
from forebay.workers.simulator.recorded.recorded_scenario import (
    SelfCheck,
    recorded_prompts,
    recorded_scenario,
    self_check,
)
from forebay.workers.simulator.recorded.rollout_log import RolloutLog
from forebay.workers.simulator.scenario import Scenario

NUM_ENGINES = 8
GROUP_SIZE = 8
PLACES = {"long": 16}
"""Slots of one engine by population; 32 for others."""
TIMES_WHAT_FITS = 4


@dataclass(frozen=True)
class SimulatedFacts:
    """Facts about the source, shown before the rows."""

    title: str
    answers: AnswerFacts
    run: RunFacts | None = None
    """Only for a recorded run, like the next two."""
    fit: EngineFit | None = None
    self_check: SelfCheck | None = None
    notes: Sequence[str] = field(default_factory=list)


class SimulatedSource(Protocol):
    """Makes scenarios."""

    policy: str
    """Policy that is simulated if none is given."""

    def scenario(self, seed: int) -> Scenario: ...

    def facts(self) -> SimulatedFacts: ...

    def check(self, scenario: Scenario) -> None: ...


class _Checked:
    """Checks, before the first run, that the policy can work with a scenario."""

    def check(self, scenario: Scenario) -> None:
        """Raise ``InvalidInput`` if the policy cannot work with ``scenario``."""
        held = scenario.oversampling.groups_per_step if scenario.oversampling is not None else None
        settings = scenario.scheduler
        window = settings.window or held or WINDOW
        inputs = PolicyInputs(settings, window, scenario.group_size, scenario.max_tokens, scenario.history)
        urls = [engine_url(number) for number in range(len(scenario.engines))]
        make_policy(inputs).next(EngineLoads(1, urls))


class PopulationSource(_Checked):
    """A population, with new answers for each seed."""

    policy = "pull"

    def __init__(self, population: Population, kv_tokens: int | None) -> None:
        self._population = population
        self._cost = EngineCost(places=PLACES.get(population.name, 32), kv_tokens=kv_tokens)

    def scenario(self, seed: int) -> Scenario:
        """Four times the rollouts that fit on eight equal engines."""
        fits = NUM_ENGINES * self._cost.places
        return Scenario(
            prompts=self._population.prompts(TIMES_WHAT_FITS * fits // GROUP_SIZE, seed),
            group_size=GROUP_SIZE,
            num_process=fits,
            engines=[self._cost] * NUM_ENGINES,
            max_tokens=self._population.cap,
            seed=seed,
        )

    def facts(self) -> SimulatedFacts:
        """Facts about the first seed."""
        scenario = self.scenario(0)
        slots = range(GROUP_SIZE)
        groups = [[scenario.answers.of(each, 0, slot, 0).tokens for slot in slots] for each in scenario.prompts]
        return SimulatedFacts(f"the population {self._population.name}", answer_facts(groups))


class RecordedSource(_Checked):
    """A log. Each seed except 0 reorders its prompts and the answers of each group."""

    def __init__(self, log: RolloutLog, kv_tokens: int | None) -> None:
        self._log = log
        self._fit = fit_engines(log, kv_tokens)
        self.policy = self._recorded.scheduler.policy

    @cached_property
    def _recorded(self) -> Scenario:
        return recorded_scenario(self._log, self._fit)

    def scenario(self, seed: int) -> Scenario:
        """The recorded scenario for seed 0, a reordered one for others."""
        if seed == 0:
            return self._recorded
        from numpy.random import default_rng

        prompts, num_epochs = recorded_prompts(self._log, default_rng(seed))
        return replace(self._recorded, prompts=prompts, num_epochs=num_epochs, seed=seed)

    def facts(self) -> SimulatedFacts:
        """Facts about the log, its engines, and how well they reproduce it."""
        log, fit = self._log, self._fit
        answers = answer_facts([[each.sampled for each in group] for group in log.groups()])
        return SimulatedFacts(log.title, answers, run_facts(log), fit, self_check(log, fit), log.notes)


def population_source(name: str, kv_tokens: int | None = None) -> PopulationSource:
    """Source for the population with this name. Raises ``InvalidInput``."""
    if name not in POPULATIONS:
        hint = f"the known ones are {', '.join(sorted(POPULATIONS))}"
        raise InvalidInput(f"unknown population {name!r:.100}", hint=hint, field="population")
    return PopulationSource(POPULATIONS[name], kv_tokens)


def recorded_source(path: Path, title: str, kv_tokens: int | None = None) -> RecordedSource:
    """Source for the log in a folder or file. Raises ``InvalidInput``."""
    return RecordedSource(read_log(path, title), kv_tokens)
