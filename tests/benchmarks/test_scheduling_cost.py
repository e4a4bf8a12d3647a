"""What a decision of a scheduler costs with a thousand groups waiting, and with a hundred thousand."""

import gc
import random
import time
from dataclasses import replace

import pytest

from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.policy import (
    PastRollout,
    Policy,
    PolicyInputs,
    RolloutEnd,
    RolloutKey,
    WaitingGroup,
    make_policy,
)
from forebay.core.scheduling.scheduler import Scheduler
from tests.benchmarks.machines import show

pytestmark = pytest.mark.bench

FEW, MANY = 1_000, 100_000
NUM_DECISIONS = 4_000
NUM_PLACES = 2_000
GROUP_SIZE = 8
NUM_ROUNDS = 3
MOST = 3.0
URLS = [f"http://engine-{number}" for number in range(100)]
HISTORY = [PastRollout(number, 0, 0, 100 + number * 7_919 % 4_000, 1.0) for number in range(0, MANY, 2)]


def groups(num: int) -> list[WaitingGroup]:
    numbers = tuple(range(GROUP_SIZE))
    first = WaitingGroup("group", 0, 0, numbers, GROUP_SIZE)
    return [replace(first, group=f"group-{n}", instance_id=n, num_chars=10 + n * 31 % 977) for n in range(num)]


def filled(name: str, num: int) -> tuple[Policy, EngineLoads]:
    """A policy at which ``num`` groups wait, and more rollouts run than are decided on in a round."""
    inputs = PolicyInputs(Scheduler(policy=name), num, GROUP_SIZE, 4_096, HISTORY)
    policy = make_policy(inputs)
    for group in groups(num):
        policy.submit(group)
    return policy, EngineLoads(NUM_PLACES, URLS)


def decisions_s(policy: Policy, loads: EngineLoads) -> float:
    """CPU seconds of a decision, and of the end of another rollout in its turn."""
    draw, running, num_decided, spent_s = random.Random(3), [], 0, 0.0
    while num_decided < NUM_DECISIONS:
        begun_s = time.process_time()
        while loads.has_place and (choice := policy.next(loads)) is not None:
            loads.enter()
            loads.move(None, choice.engine)
            running.append(choice)
            num_decided += 1
        spent_s += time.process_time() - begun_s
        assert running, "the policy starts nothing"
        draw.shuffle(running)
        ended, running = running[:500], running[500:]
        begun_s = time.process_time()
        for choice in ended:
            loads.move(choice.engine, None)
            loads.leave()
            policy.ended(RolloutKey(*choice.rollout), RolloutEnd("finished", draw.randint(10, 4_000), 1.0))
        spent_s += time.process_time() - begun_s
    return spent_s / num_decided


def test_a_decision_costs_much_the_same_however_many_groups_wait() -> None:
    rows = []
    for name in ("pull", "static", "longest-first", "probe"):
        few, many = list[float](), list[float]()
        for _ in range(NUM_ROUNDS):
            for num, costs in ((FEW, few), (MANY, many)):
                policy, loads = filled(name, num)
                gc.collect()
                gc.disable()
                costs.append(decisions_s(policy, loads) * 1e6)
                gc.enable()
        rows.append((name, min(few), min(many), min(many) / min(few)))
    shown = [(name, f"{few:.1f}", f"{many:.1f}", f"{ratio:.2f}") for name, few, many, ratio in rows]
    columns = ("policy", f"{FEW:,} waiting, µs", f"{MANY:,} waiting, µs", "ratio")
    show("A decision, with the end of a rollout", columns, shown)
    assert {name: ratio for name, _, _, ratio in rows if ratio > MOST} == {}
