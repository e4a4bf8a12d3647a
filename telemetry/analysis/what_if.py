"""What a lower ``max_tokens``, or waiting for fewer requests, would have saved if everything else were equal.

Closed forms over the requests of each step. With a cap, a request ends earlier by the tokens cut, at its own speed;
generation ends with the last request. Waiting for k of n ends with the k-th end.
"""

from collections.abc import Sequence
from itertools import pairwise

from msgspec.structs import replace

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


class WhatIfs:
    """Sums over steps, which are processed one at a time. The caps are taken from the first step that has answers."""

    def __init__(self) -> None:
        self._caps: list[WhatIf] = []
        """From high to low."""
        self._waits = [_choice("wait_for", share) for share in WAIT_SHARES]
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
        self._caps = self._caps or _caps(step, requests)
        by_end = sorted(requests, key=lambda request: request.end_s)
        for cap in self._caps:
            cut = [request for request in requests if request.sampled_tokens > cap.value]
            last_s = max(request.end_s - _cut_s(request, cap.value) for request in requests)
            _add(cap, min(by_end[-1].end_s - last_s, most_s), cut)
        for wait in self._waits:
            kept = max(1, round(len(by_end) * wait.value))
            _add(wait, min(by_end[-1].end_s - by_end[kept - 1].end_s, most_s), by_end[kept:])

    def results(self) -> list[WhatIf]:
        """By cap, from high to low, then by share of requests to wait for."""
        choices = [*self._caps, *self._waits] if self._num_steps else []
        return [replace(each, saved_s=each.saved_s / self._num_steps) for each in choices]

    def sentences(self) -> list[str]:
        """What saves most while costing few answers: a cap, or waiting for fewer; the lowest cap that saves time."""
        if not self._num_steps:
            return []
        found = []
        for choices in (self._caps, self._waits):
            few = [each for each in choices if each.num_cut <= _FEW * self._num_answers + self._num_steps / 2]
            best = max(few, key=lambda each: each.saved_s, default=None)
            if best is not None and self._gains(best.saved_s):
                found.append(f"{self._would_have_saved(best)}.")
        if not found:
            price = f"{share_text(_GAINS)} of a step at the price of {share_text(_FEW)} of the answers"
            found.append(f"Neither a lower max_tokens nor waiting for fewer requests would have saved {price}.")
        pairs = pairwise([_choice("cap", 0), *self._caps])
        gaining = [cap for higher, cap in pairs if self._gains(cap.saved_s - higher.saved_s)]
        if gaining and gaining[-1] is not self._caps[-1]:
            found.append(f"{self._would_have_saved(gaining[-1])}; a lower cap saves no more.")
        return found

    def _gains(self, seconds: float) -> bool:
        return seconds > _GAINS * self._seconds

    def _would_have_saved(self, choice: WhatIf) -> str:
        is_cap = choice.what == "cap"
        what = f"max_tokens {choice.value:.0f}" if is_cap else f"Waiting for {share_text(choice.value)} of the requests"
        saved = (
            f"{seconds_text(choice.saved_s / self._num_steps)} a step ({share_text(choice.saved_s / self._seconds)})"
        )
        answers = f"{choice.num_cut} of {self._num_answers} answers ({share_text(choice.num_cut / self._num_answers)})"
        return f"{what} would have saved {saved} and {'cut' if is_cap else 'thrown away'} {answers}"


def _choice(what: str, value: float) -> WhatIf:
    return WhatIf(what=what, value=value, saved_s=0.0, num_cut=0)


def _caps(step: ProfileStep, requests: Sequence[Request]) -> list[WhatIf]:
    longest = step.length_cap or max(request.sampled_tokens for request in requests)
    caps = {max(1, round(longest * share)) for share in CAP_SHARES} if longest else ()
    return [_choice("cap", float(cap)) for cap in sorted(caps, reverse=True)]


def _add(choice: WhatIf, saved_s: float, cut: Sequence[Request]) -> None:
    choice.saved_s += saved_s
    choice.num_cut += len(cut)
    rewards = [request.reward for request in cut if request.reward is not None]
    if rewards:
        choice.reward_lost = (choice.reward_lost or 0.0) + sum(rewards)


def _cut_s(request: Request, cap: float) -> float:
    if request.sampled_tokens <= cap:
        return 0.0
    return working_s(request.phases) * (request.sampled_tokens - cap) / request.sampled_tokens
