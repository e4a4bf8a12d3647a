"""A bench under the policy ``probe``: ten groups, of which two are long, over the engines of the kit."""

from collections.abc import Iterable
from typing import Any

from forebay.core.scheduling.policy import NextRollout, RolloutKey, WaitingGroup
from tests.scheduling.policy_kit import URLS, Bench, policy_of, waiting

HEAVY, FAST = URLS[:1], URLS[1:]
NAMES = [f"g{number}" for number in range(10)]
LENGTHS = {name: 100 * (number + 1) for number, name in enumerate(NAMES)}
"""The two longest are g9 and g8; the longest of the others is 800."""
CAP = 1_200


def group(name: str, size: int = 4, **changes: Any) -> WaitingGroup:
    return waiting(name, size, group=name, **changes)


def bench(groups: Iterable[WaitingGroup | str] = NAMES, urls: Any = URLS, places: int = 400, **given: Any) -> Bench:
    policy = policy_of("probe", **({"window": 10, "group_size": 4} | given))
    return Bench(policy, [group(each) if isinstance(each, str) else each for each in groups], places, urls)


def probed(**given: Any) -> tuple[Bench, list[NextRollout]]:
    """A bench whose probes are there, with what was started then."""
    run = bench(**given)
    started = run.fill()
    while any(number == 0 for _, number in run.running):
        end_probes(run)
        started = run.fill()
    return run, started


def end_probes(run: Bench) -> None:
    for key in [key for key in run.running if key.number == 0]:
        run.end(key, LENGTHS[key.group])


def end_all(run: Bench, tokens: int = 10) -> None:
    for key in list(run.running):
        run.end(key, tokens)


def at(run: Bench, urls: Iterable[str]) -> list[RolloutKey]:
    """What runs there."""
    return [key for key, choice in run.running.items() if choice.engine in urls]


def probe_engines(run: Bench) -> dict[str, str | None]:
    return {choice.rollout.group: choice.engine for choice in run.started if choice.rollout.number == 0}


def of(choices: Iterable[NextRollout], *groups: str) -> list[NextRollout]:
    return [choice for choice in choices if choice.rollout.group in groups]
