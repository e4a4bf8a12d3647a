"""What an evaluation costs the training beside it: at most 1.2 times its share of the engine's tokens."""

import time

import pytest

from tests.benchmarks.machines import show
from tests.conftest import MakeServer
from tests.evaluation_kit import PLENTY, Training, training

pytestmark = pytest.mark.bench

MAX_RUNNING = 16
REPLY_S = 0.4
"""All replies have equally many tokens."""
NUM_STEPS = 12
GROUPS_PER_STEP = 16
NUM_ROUNDS = 3
MOST_PER_SHARE = 1.2
MEASURED_NOISE = 0.02
"""Differences between two passes without an evaluation, as a share of their time."""


def seconds(trainer: Training, *, evaluates: bool) -> tuple[float, float]:
    """The time of all steps, and the share of the evaluation's calls in those that the engine answered meanwhile."""
    trainer.start(num_epoch=PLENTY, num_process=2 * MAX_RUNNING)
    trainer.step(0, GROUPS_PER_STEP)  # everything is loaded
    if evaluates:
        trainer.client.evaluate("exam", 0)
        trainer.wait_asked()
    while (batch := trainer.client.read(GROUPS_PER_STEP, wait_s=0)) is not None:  # what was generated meanwhile
        trainer.client.ack(batch)
    first_exam, first = trainer.script.num_asked, trainer.script.counts.total()
    began_s = time.perf_counter()
    for step in range(1, NUM_STEPS + 1):
        trainer.step(step, GROUPS_PER_STEP)
    took_s = time.perf_counter() - began_s
    num_exam, num_calls = trainer.script.num_asked - first_exam, trainer.script.counts.total() - first
    trainer.client.stop()
    return took_s, num_exam / num_calls


def test_an_evaluation_costs_its_share_of_the_engine(make_server: MakeServer) -> None:
    with training(make_server(), max_running=MAX_RUNNING) as trainer:
        trainer.fields["group_size"] = PLENTY
        trainer.script.delay_s = REPLY_S
        trainer.script.is_open = True
        # In turns, and the fastest of each: the machine has other work now and then.
        passes = [(seconds(trainer, evaluates=False), seconds(trainer, evaluates=True)) for _ in range(NUM_ROUNDS)]
    (alone_s, _), (beside_s, share) = map(min, zip(*passes, strict=True))
    slowdown = beside_s / alone_s - 1
    show("evaluation", ("alone", "beside", "slower by", "share"), [(alone_s, beside_s, slowdown, share)])
    assert 0 < share < 1
    assert slowdown <= MOST_PER_SHARE * share + MEASURED_NOISE
