"""What holds for every policy and leftover, whatever engines and groups do: the real job, in virtual time."""

import itertools
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.ids import InstanceId
from forebay.core.scheduling.oversampling import Oversampling
from forebay.core.scheduling.scheduler import Scheduler
from forebay.workers.simulator.cost import EngineCost
from forebay.workers.simulator.modelled_engines import EngineFailure
from forebay.workers.simulator.modelled_trainer import GroupClosing
from forebay.workers.simulator.populations import AnswerLengths
from forebay.workers.simulator.scenario import Scenario, SimulatedRun, simulate

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
POLICIES = sorted(PROJECT["project"]["entry-points"]["forebay.policies"])
LEFTOVERS = ("none", "spares", "keep", "discard", "defer")
GROUP_SIZE = 4
CAP = 120
CLOCK_S = 1e-6

costs = st.builds(
    EngineCost,
    prefill_tokens_per_s=st.sampled_from([500.0, 5_000.0]),
    places=st.integers(1, 4),
    kv_tokens=st.sampled_from([None, None, 200, 400]),
    speed=st.sampled_from([1.0, 2.0]),
    tool_s=st.sampled_from([0.0, 0.3]),
    cached_share=st.sampled_from([0.0, 0.9]),
    shared_share=st.sampled_from([0.0, 0.9]),
    kv_reserve=st.sampled_from([0.1, 1.0]),
)
times = st.floats(0.0, 8.0).map(lambda at_s: round(at_s, 2))


@st.composite
def scenarios(draw: st.DrawFn, policy: str, leftover: str) -> Scenario:
    """Small, and with whatever may go wrong."""
    num = draw(st.integers(1, 10))
    means = draw(st.lists(st.integers(5, 100), min_size=num, max_size=num))
    engines = draw(st.lists(costs, min_size=2, max_size=4))
    failing = draw(st.lists(st.tuples(st.integers(0, len(engines) - 1), times, times), max_size=3))
    closing = draw(st.lists(st.tuples(st.integers(0, num - 1), times), max_size=2))
    return Scenario(
        prompts=[AnswerLengths(number, 10, mean, mean / 3, 0.1, 2, 6, cap=CAP) for number, mean in enumerate(means)],
        group_size=GROUP_SIZE,
        num_process=draw(st.integers(1, 12)),
        engines=engines,
        scheduler=Scheduler(
            policy=policy,
            window=draw(st.sampled_from([None, 1, 3])),
            heavy=0.5,
            cap=draw(st.sampled_from(["cut", "own", 30])),
        ),
        oversampling=_oversampling(leftover, draw(st.integers(1, 3))),
        max_tokens=CAP,
        train_s=draw(st.sampled_from([0.0, 2.0])),
        num_epochs=draw(st.integers(1, 2)),
        seed=draw(st.integers(0, 99)),
        failures=[EngineFailure(engine, at_s, at_s + lasts_s) for engine, at_s, lasts_s in failing],
        closings=[GroupClosing(instance, 0, at_s) for instance, at_s in closing],
    )


def _oversampling(leftover: str, groups_per_step: int) -> Oversampling | None:
    if leftover == "none":
        return None
    if leftover == "spares":
        return Oversampling(rollouts_per_group=GROUP_SIZE + 2)
    return Oversampling.model_validate(
        {"rollouts_per_group": GROUP_SIZE + 1, "groups_per_step": groups_per_step, "leftover": leftover}
    )


def check(run: SimulatedRun) -> None:
    check_slots(run)
    check_tokens(run)
    check_caps(run)
    check_makespan(run)
    check_order(run)


both = pytest.mark.parametrize(("policy", "leftover"), list(itertools.product(POLICIES, LEFTOVERS)))


@both
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_whatever_happens_groups_are_whole_and_tokens_add_up(policy: str, leftover: str, data: st.DataObject) -> None:
    check(simulate(data.draw(scenarios(policy, leftover))))


@pytest.mark.soak
@both
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_whatever_happens_often(policy: str, leftover: str, data: st.DataObject) -> None:
    check(simulate(data.draw(scenarios(policy, leftover))))


def check_slots(run: SimulatedRun) -> None:
    """Each slot is filled once, and nothing is left over."""
    closed = {(closing.instance_id, closing.epoch) for closing in run.scenario.closings}
    slots: dict[tuple[InstanceId, int], Counter[int]] = defaultdict(Counter)
    trained: Counter[tuple[InstanceId, int]] = Counter()
    for each in run.rollouts:
        if each.ending == "finished":
            slots[each.instance, each.epoch][each.slot] += 1
        trained[each.instance, each.epoch] += each.trained_step is not None
    for epoch in range(run.scenario.num_epochs):
        for prompt in run.scenario.prompts:
            key = prompt.instance_id, epoch
            is_whole = slots[key] == Counter(range(GROUP_SIZE))
            assert is_whole or key in closed
            assert max(slots[key].values(), default=1) == 1
            assert trained[key] == (GROUP_SIZE if is_whole else 0), "a step trains on whole groups, and on all of them"


def check_tokens(run: SimulatedRun) -> None:
    """What engines have sampled is what rollouts have got, or lost with an engine, by the job's own count as well."""
    got = sum(each.sampled for each in run.rollouts)
    assert sum(number for name, number in run.counts.items() if name in SPENT) == got
    lost = sum(each.lost for each in run.rollouts)
    # A call that is ended within a step has no part of a token.
    parts = 2 * len(run.rollouts) + sum(use.preemptions for use in run.engines) + 16 * len(run.scenario.failures)
    sampled = sum(use.sampled for use in run.engines)
    assert got + lost - 1 <= sampled <= got + lost + parts


SPENT = ("tokens_finished", "tokens_failed", "tokens_aborted", "tokens_broken")


def check_caps(run: SimulatedRun) -> None:
    for each in run.rollouts:
        assert each.sampled <= (CAP if each.cap is None else min(CAP, each.cap))
        assert each.ending != "broken" or each.sampled == each.cap


def check_makespan(run: SimulatedRun) -> None:
    """Nothing is faster than its longest answer alone on the fastest engine, or than all engines at their best."""
    engines = run.scenario.engines
    longest = max((each.sampled for each in run.rollouts), default=0)
    alone_s = longest / max(cost.tokens_per_s(1) for cost in engines)
    capacity = sum(max(num * cost.tokens_per_s(num) for num in range(1, cost.places + 1)) for cost in engines)
    work_s = sum(each.sampled + each.lost for each in run.rollouts) / capacity
    assert run.makespan_s >= max(alone_s, work_s) - CLOCK_S
    for each in run.rollouts:
        assert each.t <= each.started <= each.end
        assert each.end / 1e9 <= run.makespan_s + CLOCK_S


def check_order(run: SimulatedRun) -> None:
    """No group is passed over by more than ``window`` others."""
    scenario = run.scenario
    first: dict[tuple[InstanceId, int], int] = {}
    for each in run.rollouts:
        key = each.instance, each.epoch
        first[key] = min(first.get(key, each.chosen), each.chosen)
    order = [(prompt.instance_id, epoch) for epoch in range(scenario.num_epochs) for prompt in scenario.prompts]
    begun = [first[key] for key in order if key in first]
    step = scenario.oversampling.groups_per_step if scenario.oversampling is not None else None
    window = scenario.scheduler.window or step or 64
    for at, when in enumerate(begun):
        assert sum(other < when for other in begun[at + 1 :]) <= window
