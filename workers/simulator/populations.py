"""Lengths of answers to one prompt, and of whole populations of prompts, three of which have names."""

import math
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from forebay.core.ids import InstanceId

if TYPE_CHECKING:  # an extra, installed only for simulations
    from numpy.random import Generator


@dataclass(frozen=True, slots=True)
class AnswerLengths:
    """Lengths of one prompt's answers in tokens: normal or log-normal, with a few that are several times as long."""

    instance_id: InstanceId
    prompt_tokens: int
    mean: float
    deviation: float
    tail_share: float = 0.0
    tail_low: float = 1.0
    tail_high: float = 1.0
    cap: int = 1 << 30
    """``max_tokens``: longer answers are cut there."""
    recorded: tuple[int, ...] = ()
    """Recorded lengths, used instead if given: by rollout, later epochs after earlier ones."""
    num_turns: int = 1
    """Calls of one rollout, which share its tokens evenly."""
    half_right: float = 0.0
    """Length at which an answer is right with probability 1/2; longer ones less often. 0: no rewards."""
    rewards: tuple[float, ...] = ()
    """Rewards of the recorded answers."""
    has_own_limits: bool = False
    """Whether the ``max_tokens`` of each call is the length of its answer."""
    log_deviation: float = 0.0
    """If not 0, the deviation of the logarithm of the lengths; ``mean`` is then their median."""

    def draw(self, random: "Generator", number: int) -> int:
        """Draw an answer's length, at least 1, or return the recorded one with this ``number``, if any."""
        if self.recorded:
            return max(1, min(self.recorded[self._place(random, number)], self.cap))
        if self.log_deviation:
            length = self.mean * math.exp(random.normal(0.0, self.log_deviation))
        else:
            length = random.normal(self.mean, self.deviation)
        if self.tail_share and random.random() < self.tail_share:
            length *= random.uniform(self.tail_low, self.tail_high)
        return max(1, min(round(length), self.cap))

    def draw_reward(self, random: "Generator", number: int, length: int) -> float | None:
        """Draw the reward of an answer of this length, after it and with the same ``random``; None without rewards."""
        if self.rewards:
            return self.rewards[number] if 0 <= number < len(self.rewards) else None
        if not self.half_right:
            return None
        return float(random.random() < self.half_right / (self.half_right + length))

    def _place(self, random: "Generator", number: int) -> int:
        is_there = 0 <= number < len(self.recorded)
        return number if is_there else int(random.integers(len(self.recorded)))


@dataclass(frozen=True, slots=True)
class Population:
    """Prompts with log-normal mean lengths, whose answers scatter by a share of their mean."""

    name: str
    cap: int
    median: float
    spread: float
    """Deviation of the logarithm of the prompts' means."""
    within: float
    """Deviation of a prompt's answers, as a share of their mean."""
    within_spread: float = 0.0
    """Deviation of ``within`` among prompts; each prompt's share is at least 3 %."""
    is_log_within: bool = False
    """Whether a prompt's answers are log-normal; ``within`` is then the deviation of their logarithm."""
    tail_share: float = 0.0
    tail_low: float = 1.0
    tail_high: float = 1.0
    prompt_tokens: int = 200

    def prompts(self, num: int, seed: int) -> list[AnswerLengths]:
        """Draw ``num`` prompts. Equal seeds give equal prompts."""
        from numpy.random import default_rng

        random = default_rng((num, seed))
        means = random.lognormal(math.log(self.median), self.spread, num)
        shares = random.normal(self.within, self.within_spread, num).clip(0.03)
        return [
            AnswerLengths(
                instance_id=number,
                prompt_tokens=self.prompt_tokens,
                mean=float(mean),
                deviation=float(mean * share),
                log_deviation=float(share) if self.is_log_within else 0.0,
                tail_share=self.tail_share,
                tail_low=self.tail_low,
                tail_high=self.tail_high,
                cap=self.cap,
                half_right=self.median,
            )
            for number, (mean, share) in enumerate(zip(means, shares, strict=True))
        ]


POPULATIONS = {
    "short": Population("short", 1_024, 380, 0.4, 0.26),
    # The population that P-DSR was measured on.
    "probe": Population(
        "probe", 2_048, 500, 0.4, 0.30, 0.1, is_log_within=True, tail_share=0.01, tail_low=2.0, tail_high=6.0
    ),
    "long": Population("long", 32_768, 4_000, 0.7, 0.35),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens that a rollout would sample without a cap, and its reward."""

    tokens: int
    reward: float | None
    limit: int | None = None
    """``max_tokens`` of its call; None for the run's."""


class Answers:
    """Answers of a whole run. Each depends only on the seed and its rollout, so all policies get equal answers."""

    def __init__(self, seed: int, group_size: int) -> None:
        from numpy.random import PCG64, Generator

        self._seed, self._group_size = seed, group_size
        # One generator, whose state is set for each answer: creating one takes ten times as long.
        self._bits = PCG64(seed)
        self._random = Generator(self._bits)
        self._state = self._bits.state

    def of(self, lengths: AnswerLengths, epoch: int, number: int, attempt: int) -> Answer:
        """Answer of one attempt. A repeated rollout gets a new draw."""
        self._put((lengths.instance_id, epoch, number, attempt))
        place = epoch * self._group_size + number if attempt == 0 and number < self._group_size else -1
        tokens = lengths.draw(self._random, place)
        reward = lengths.draw_reward(self._random, place, tokens)
        return Answer(tokens, reward, tokens if lengths.has_own_limits else None)

    def _put(self, rollout: tuple[InstanceId, int, int, int]) -> None:
        digest = blake2b(repr((self._seed, rollout)).encode(), digest_size=32).digest()
        place, increment = int.from_bytes(digest[:16]), int.from_bytes(digest[16:]) | 1  # PCG needs an odd increment
        self._state["state"] = {"state": place, "inc": increment}
        self._bits.state = self._state
