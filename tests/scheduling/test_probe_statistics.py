"""What probes say on the population that they were published for: means of 20 seeds, 2 048 prompts of 8 answers each.

The decisions are those of the policy; the answers are drawn with numpy.
"""

from collections.abc import Callable
from typing import Any

import numpy
import pytest

from forebay.workers.scheduling.probe_ranking import Cap, cap_tokens, cut_of, top_of
from forebay.workers.simulator.populations import POPULATIONS

NUM_SEEDS, NUM_PROMPTS, GROUP_SIZE = 20, 2_048, 8
TOP = 0.2
LINE = 512
"""Tokens beyond which an answer counts as long in the published figures."""


class Probed:
    """One draw of the population: all lengths, and what their first column, the probes, leads to."""

    def __init__(self, seed: int) -> None:
        random = numpy.random.default_rng(seed)
        prompts = POPULATIONS["probe"].prompts(NUM_PROMPTS, seed)
        self.lengths = numpy.array([[prompt.draw(random, n) for n in range(GROUP_SIZE)] for prompt in prompts])
        self.probes, self.others = self.lengths[:, 0], self.lengths[:, 1:]
        self.is_long = self.others.max(axis=1) > LINE
        top = top_of(self.probes.tolist(), TOP)
        self.is_top = numpy.isin(numpy.arange(NUM_PROMPTS), top)
        self.cut = cut_of(self.probes.tolist(), top)

    def broken(self, cap: Cap) -> tuple[Any, float]:
        """Which prompts off the heavy engines have a broken answer, and the tokens of those, as a share of all."""
        caps = numpy.array([cap_tokens(cap, self.cut, float(own)) for own in self.probes])[:, None]
        is_broken = (self.others > caps) & ~self.is_top[:, None]
        return is_broken.any(axis=1), (is_broken * caps).sum() / self.lengths.sum()


@pytest.fixture(scope="module")
def draws() -> list[Probed]:
    return [Probed(seed) for seed in range(NUM_SEEDS)]


def mean(draws: list[Probed], figure: Callable[[Probed], Any]) -> float:
    return float(numpy.mean([figure(draw) for draw in draws]))


def test_answers_to_one_prompt_vary_as_published(draws: list[Probed]) -> None:
    cv = mean(draws, lambda draw: (draw.lengths.std(axis=1) / draw.lengths.mean(axis=1)).mean())
    assert cv == pytest.approx(0.295, abs=0.01)


def test_a_short_probe_often_hides_a_long_answer(draws: list[Probed]) -> None:
    assert mean(draws, lambda draw: draw.is_long[draw.probes < LINE].mean()) == pytest.approx(0.65, abs=0.02)


def test_the_top_fifth_by_probes_are_long(draws: list[Probed]) -> None:
    assert mean(draws, lambda draw: draw.is_top.mean()) == pytest.approx(TOP, abs=0.001)
    assert mean(draws, lambda draw: draw.is_long[draw.is_top].mean()) >= 0.97


def test_the_cap_at_the_cut_breaks_few_and_wastes_little(draws: list[Probed]) -> None:
    assert mean(draws, lambda draw: draw.broken("cut")[0][~draw.is_top].mean()) == pytest.approx(0.14, abs=0.01)
    assert mean(draws, lambda draw: draw.broken("cut")[1]) == pytest.approx(0.038, abs=0.005)


def test_a_fixed_cap_breaks_most(draws: list[Probed]) -> None:
    below = mean(draws, lambda draw: draw.broken(LINE)[0][(draw.probes < LINE) & ~draw.is_top].mean())
    assert below == pytest.approx(0.65, abs=0.02)
    assert mean(draws, lambda draw: draw.broken(LINE)[0][~draw.is_top].mean()) == pytest.approx(0.76, abs=0.02)
    assert mean(draws, lambda draw: draw.broken(LINE)[1]) == pytest.approx(0.25, abs=0.01)


def test_a_cap_by_each_groups_own_probe_breaks_more_than_half(draws: list[Probed]) -> None:
    assert mean(draws, lambda draw: draw.broken("own")[0][~draw.is_top].mean()) == pytest.approx(0.54, abs=0.02)
    assert mean(draws, lambda draw: draw.broken("own")[1]) == pytest.approx(0.13, abs=0.01)
