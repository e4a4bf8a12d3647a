"""What a lower ``max_tokens``, or waiting for fewer requests, would have saved if everything else were equal.

Closed forms over the requests of each step. With a cap, a request ends earlier by the tokens cut, at its own speed;
generation ends with the last request. Waiting for k of n ends with the k-th end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from forebay.telemetry.analysis.causes.kinds import working_s
from forebay.telemetry.analysis.report import StepSummary, WhatIf
from forebay.telemetry.analysis.timeline import ProfileStep, Request
from forebay.telemetry.numbers import seconds_text, share_text

CAP_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Shares of the cap, or of the longest answer if no cap is known."""
WAIT_SHARES = (0.99, 0.95, 0.9, 0.8)
_FEW = 0.05
"""Share of the answers, apart from rounding."""
_GAINS = 0.01
"""Share of the mean step. A choice must save more than this, and a lower cap more than the next higher one."""


@dataclass(slots=True)
class _Sum:
    saved_s: float = 0.0
    num_cut: int = 0
    reward_lost: float | None = None

    def add(self, saved_s: float, cut: Sequence[Request]) -> None:
        self.saved_s += saved_s
        self.num_cut += len(cut)
        rewards = [request.reward for request in cut if request.reward is not None]
        if rewards:
            self.reward_lost = (self.reward_lost or 0.0) + sum(rewards)


class WhatIfs:
    """Sums over steps, which are processed one at a time. The caps are taken from the first step that has answers."""

    def __init__(self) -> None:
        self._caps: list[int] = []
        self._by_cap: dict[int, _Sum] = {}
        self._by_share: dict[float, _Sum] = {share: _Sum() for share in WAIT_SHARES}
        self._num_steps = 0
        self._num_answers = 0
        self._seconds = 0.0

    def add(self, step: ProfileStep, summary: StepSummary) -> None:
        """Add a step."""
        requests = [request for request in step.requests if request.ending == "finished"]
        if not requests:
            return
        self._num_steps += 1
        self._num_answers += len(requests)
        self._seconds += summary.seconds
        most_s = summary.seconds if summary.wait_s is None else summary.wait_s
        if not self._caps:
            self._choose_caps(step, requests)
        for cap in self._caps:
            cut = [request for request in requests if request.sampled_tokens > cap]
            self._by_cap[cap].add(min(_saved_by_cap(requests, cap), most_s), cut)
        by_end = sorted(requests, key=lambda request: request.end_s)
        for share, total in self._by_share.items():
            keep = kept(len(by_end), share)
            total.add(min(by_end[-1].end_s - by_end[keep - 1].end_s, most_s), by_end[keep:])

    def _choose_caps(self, step: ProfileStep, requests: Sequence[Request]) -> None:
        longest = step.length_cap or max(request.sampled_tokens for request in requests)
        self._caps = sorted({max(1, round(longest * share)) for share in CAP_SHARES}, reverse=True) if longest else []
        self._by_cap = {cap: _Sum() for cap in self._caps}

    def results(self) -> list[WhatIf]:
        """By cap, from high to low, then by share of requests to wait for."""
        if not self._num_steps:
            return []
        sums = [("cap", float(cap), self._by_cap[cap]) for cap in self._caps]
        sums += [("wait_for", share, self._by_share[share]) for share in WAIT_SHARES]
        return [
            WhatIf(
                what=what,
                value=value,
                saved_s=total.saved_s / self._num_steps,
                num_cut=total.num_cut,
                reward_lost=total.reward_lost,
            )
            for what, value, total in sums
        ]

    def sentences(self) -> list[str]:
        """What saves most while costing few answers: a cap, or waiting for fewer; the lowest cap that saves time."""
        if not self._num_steps:
            return []
        caps = [(f"max_tokens {cap}", "cut", total) for cap, total in self._by_cap.items()]
        waits = [
            (f"Waiting for {share_text(share)} of the requests", "thrown away", total)
            for share, total in self._by_share.items()
        ]
        found = []
        for choices in (caps, waits):
            few = [each for each in choices if each[2].num_cut <= _FEW * self._num_answers + self._num_steps / 2]
            best = max(few, key=lambda each: each[2].saved_s, default=None)
            if best is not None and self._gains(best[2].saved_s):
                found.append(f"{self._would_have_saved(*best)}.")
        if not found:
            price = f"{share_text(_GAINS)} of a step at the price of {share_text(_FEW)} of the answers"
            found.append(f"Neither a lower max_tokens nor waiting for fewer requests would have saved {price}.")
        pairs = pairwise([*caps[::-1], ("", "", _Sum())])
        lowest = next((low for low, high in pairs if self._gains(low[2].saved_s - high[2].saved_s)), None)
        if lowest is not None and lowest != caps[-1]:
            found.append(f"{self._would_have_saved(*lowest)}; a lower cap saves no more.")
        return found

    def _gains(self, seconds: float) -> bool:
        return seconds > _GAINS * self._seconds

    def _would_have_saved(self, what: str, cut: str, total: _Sum) -> str:
        saved = f"{seconds_text(total.saved_s / self._num_steps)} a step ({share_text(total.saved_s / self._seconds)})"
        answers = f"{total.num_cut} of {self._num_answers} answers ({share_text(total.num_cut / self._num_answers)})"
        return f"{what} would have saved {saved} and {cut} {answers}"


def kept(number: int, share: float) -> int:
    """The number of requests out of ``number`` to wait for; at least one."""
    return max(1, min(number, round(number * share)))


def _saved_by_cap(requests: Sequence[Request], cap: int) -> float:
    """How much earlier the last of ``requests`` would have ended."""
    last_s = max(request.end_s for request in requests)
    return last_s - max(request.end_s - _cut_s(request, cap) for request in requests)


def _cut_s(request: Request, cap: int) -> float:
    if request.sampled_tokens <= cap:
        return 0.0
    return working_s(request.phases) * (request.sampled_tokens - cap) / request.sampled_tokens
