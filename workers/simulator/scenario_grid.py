"""Scenarios that a simulation compares: each policy with each setting, on equal answers, over several seeds."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from forebay.core.scheduling.oversampling import Oversampling, parse_oversampling
from forebay.core.scheduling.policy import PastRollout, check_policy
from forebay.core.scheduling.scheduler import parse_scheduler
from forebay.workers.simulator.cost import EngineCost
from forebay.workers.simulator.populations import Answers
from forebay.workers.simulator.result_rows import ResultRow, Variation, result_rows
from forebay.workers.simulator.run_measures import RunMeasures, measure
from forebay.workers.simulator.scenario import Scenario, simulate
from forebay.workers.simulator.simulation_settings import OF_ENGINES, OF_SCENARIO, merged

MakeScenario = Callable[[int], Scenario]
"""Makes the scenario of a seed, before settings are applied."""

EARLIER_SEED = 7_919
"""Offset of the seed of the earlier epoch that a policy may know, so that its answers differ."""


def variations(
    policies: Sequence[str],
    engines: Sequence[int | None],
    num_process: Sequence[int | str | None],
    settings: Mapping[str, Sequence[Any]],
) -> Iterator[Variation]:
    """Every combination of the values. Raises ``InvalidInput`` for a policy that is not installed."""
    for policy in policies:
        check_policy(policy)
    names = list(settings)
    for values in itertools.product(*settings.values()):
        own = tuple(zip(names, values, strict=True))
        for number, places, policy in itertools.product(engines, num_process, policies):
            yield Variation(policy, number, places, own)


def varied(scenario: Scenario, variation: Variation) -> Scenario:
    """Apply a variation to a scenario. Raises ``InvalidInput`` with the wrong field."""
    settings = dict(variation.settings)
    own = scenario.scheduler.model_dump(exclude_unset=True)
    stated = merged("scheduler", settings, {**own, **(settings.get("scheduler") or {})}) | {"policy": variation.policy}
    changes: dict[str, Any] = {"scheduler": parse_scheduler(stated)}
    changes["oversampling"] = _oversampling(scenario, settings)
    changes |= {name: value for name, value in settings.items() if name in OF_SCENARIO}
    changes["engines"] = _engines(scenario.engines, variation, settings)
    if variation.num_process is not None:
        changes["num_process"] = variation.num_process
    elif variation.engines is not None and isinstance(scenario.num_process, int):
        changes["num_process"] = max(1, round(scenario.num_process * variation.engines / len(scenario.engines)))
    made = replace(scenario, **changes)
    return replace(made, history=earlier_epoch(made)) if settings.get("history") else made


def _oversampling(scenario: Scenario, settings: Mapping[str, Any]) -> Oversampling | None:
    own = scenario.oversampling.model_dump(exclude_unset=True) if scenario.oversampling is not None else {}
    wanted = merged("oversampling", settings, settings.get("oversampling", own) or {})
    return parse_oversampling(wanted).checked(settings.get("group_size", scenario.group_size)) if wanted else None


def _engines(given: Sequence[EngineCost], variation: Variation, settings: Mapping[str, Any]) -> list[EngineCost]:
    number = variation.engines or len(given)
    engines = list(itertools.islice(itertools.cycle(given), number))
    for name in OF_ENGINES.keys() & settings.keys():
        value = settings[name]
        values = value if isinstance(value, list) else [value]
        engines = [
            replace(engine, **{name: one}) for engine, one in zip(engines, itertools.cycle(values), strict=False)
        ]
    return engines


def earlier_epoch(scenario: Scenario) -> list[PastRollout]:
    """History for policies: another epoch of the prompts, with answers drawn from the same distributions."""
    answers = Answers(scenario.seed + EARLIER_SEED, scenario.group_size)
    step_s = scenario.engines[0].step_s
    found = []
    for prompt in scenario.prompts:
        for number in range(scenario.group_size):
            tokens = min(answers.of(prompt, 0, number, 1).tokens, scenario.max_tokens)
            past = PastRollout(prompt.instance_id, 0, number, tokens, tokens * step_s, prompt.prompt_tokens)
            found.append(past)
    return found


def compare(
    make: MakeScenario, wanted: Sequence[Variation], num_seeds: int, on_run: Callable[[], object]
) -> list[ResultRow]:
    """A row for each variation. ``on_run`` is called after each run. All variations use the same seeds."""
    measured: list[list[RunMeasures]] = [[] for _ in wanted]
    for seed in range(num_seeds):
        scenario = make(seed)
        for place, variation in enumerate(wanted):
            measured[place].append(measure(simulate(varied(scenario, variation))))
            on_run()
    return result_rows(wanted, [varied(make(0), variation) for variation in wanted], measured)
