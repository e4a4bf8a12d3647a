"""A policy by itself: groups, engines and rollouts without any run, each promise of the protocol checked on the way."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.policy import (
    NextRollout,
    PastRollout,
    Policy,
    PolicyInputs,
    RolloutEnd,
    RolloutKey,
    WaitingGroup,
    make_policy,
)
from forebay.core.scheduling.scheduler import Scheduler

URLS = tuple(f"http://engine-{number}" for number in range(4))


def policy_of(
    name: str, *, window: int = 64, group_size: int = 2, history: Sequence[PastRollout] = (), **settings: Any
) -> Policy:
    """As a job makes it."""
    given = Scheduler(policy=name, **settings)
    return make_policy(PolicyInputs(given, window, group_size, max_tokens=4_096, history=history))


def waiting(name: str | int, num: int = 2, **changes: Any) -> WaitingGroup:
    """A group of ``num`` rollouts."""
    given: dict[str, Any] = {
        "group": f"group-{name}",
        "instance_id": name,
        "epoch": 0,
        "numbers": tuple(range(num)),
        "num_needed": num,
    }
    return WaitingGroup(**{**given, **changes})


def past(instance_id: str | int, tokens: int, epoch: int = 0, number: int = 0) -> PastRollout:
    """What an earlier epoch has recorded."""
    return PastRollout(instance_id, epoch, number, tokens, tokens / 100)


class Bench:
    """Does what a job does with a policy, and keeps its own books."""

    def __init__(self, policy: Policy, groups: Sequence[WaitingGroup], num_places: int = 8, urls: Any = URLS) -> None:
        self.policy = policy
        self.loads = EngineLoads(num_places, urls, addresses=urls)
        self.groups = {group.group: group for group in groups}
        self.order = [group.group for group in groups]
        self._to_submit = list(reversed(groups))
        self.running: dict[RolloutKey, NextRollout] = {}
        self.waiting = {RolloutKey(group.group, number) for group in groups for number in group.numbers}
        self.begun: list[str] = []
        self.chosen: list[RolloutKey] = []
        self.started: list[NextRollout] = []
        self.ended: list[RolloutKey] = []

    def refill(self) -> None:
        while self._to_submit and self.policy.room() > 0:
            self.policy.submit(self._to_submit.pop())

    def next(self) -> NextRollout | None:
        """Start one rollout, if there is a place and the policy wants to."""
        if self.loads.total >= self.loads.num_places * self.policy.concurrency:
            return None
        self.refill()
        choice = self.policy.next(self.loads)
        if choice is None:
            return None
        key = choice.rollout
        assert key in self.waiting, f"{key} does not wait"
        assert choice.engine is None or choice.engine in self.loads
        if key.group not in self.begun and not self.groups[key.group].is_open:
            assert self.loads.may_begin
            self.begun.append(key.group)
        self.waiting.discard(key)
        self.running[key] = choice
        self.chosen.append(key)
        self.started.append(choice)
        self.loads.enter()
        self.loads.move(None, choice.engine)
        return choice

    def fill(self) -> list[NextRollout]:
        """Start as many as there are places for."""
        started = []
        while (choice := self.next()) is not None:
            started.append(choice)
        return started

    def end(
        self,
        key: RolloutKey,
        tokens: int = 100,
        seconds: float | None = None,
        ending: Literal["finished", "failed", "aborted"] = "finished",
    ) -> None:
        self._leave(key)
        self.ended.append(key)
        self.policy.ended(key, RolloutEnd(ending, tokens, tokens / 100 if seconds is None else seconds))

    def lose(self, key: RolloutKey) -> None:
        self._leave(key)
        self.waiting.add(key)
        self.policy.lost(key)

    def break_off(self, key: RolloutKey, tokens: int = 100) -> None:
        self._leave(key)
        self.waiting.add(key)
        self.policy.broken(key, tokens, tokens / 100)

    def close(self, group: str) -> None:
        self.waiting = {key for key in self.waiting if key.group != group}
        for key in [key for key in self.running if key.group == group]:
            self._leave(key)
        self._to_submit = [each for each in self._to_submit if each.group != group]
        self.policy.closed(group)

    def begin_afresh(self, group: str) -> None:
        """Others take the place of what is left of it."""
        left = [key for key in (*self.running, *self.waiting) if key.group == group]
        self.close(group)
        before = self.groups[group]
        first = max(before.numbers) + 1
        numbers = tuple(range(first, first + len(left)))
        self.submit(waiting(before.instance_id, group=group, numbers=numbers, taken=before.taken, is_open=True))

    def submit(self, group: WaitingGroup) -> None:
        """One that begins afresh, while there may be no room for it."""
        self.groups[group.group] = group
        self.waiting |= {RolloutKey(group.group, number) for number in group.numbers}
        self.policy.submit(group)

    def set_engines(self, urls: Sequence[str]) -> None:
        for url in self.loads.set_engines(urls):
            self.policy.engine_lost(url)
            for key in [key for key, choice in self.running.items() if choice.engine == url]:
                self._move(key, None)  # the pool finds another one

    def _move(self, key: RolloutKey, engine: str | None) -> None:
        self.loads.move(self.running[key].engine, engine)
        self.running[key] = NextRollout(key, engine)

    def _leave(self, key: RolloutKey) -> None:
        self.loads.move(self.running.pop(key).engine, None)
        self.loads.leave()

    @property
    def num_to_submit(self) -> int:
        return len(self._to_submit)

    def per_engine(self) -> Counter[str | None]:
        """How many run on each."""
        return Counter(choice.engine for choice in self.running.values())

    @property
    def is_over(self) -> bool:
        return not (self.running or self.waiting)

    def passed_over(self) -> int:
        """How often the group was passed over that this happened to most; closed ones were not begun."""
        place = {group: number for number, group in enumerate(self.order)}
        numbers = [place[group] for group in self.begun]
        return max((sum(each > number for each in numbers[:at]) for at, number in enumerate(numbers)), default=0)


def run_to_the_end(bench: Bench, tokens_of: Callable[[RolloutKey], int], most: int = 100_000) -> None:
    """End the rollouts in the order in which they would: each takes as long as it has tokens, wherever it runs."""
    now, ends = 0.0, dict[RolloutKey, float]()
    for _ in range(most):
        bench.fill()
        for key in bench.running:
            ends.setdefault(key, now + tokens_of(key))
        if bench.is_over:
            return
        key = min(bench.running, key=ends.__getitem__)
        now = ends.pop(key)
        bench.end(key, tokens_of(key))
    raise AssertionError("it does not come to its end")


def trouble(bench: Bench, draw: random.Random, *, is_calm: bool = False) -> None:
    """One thing that happens in a run; calm ones lose nothing."""
    keys = list(bench.running)
    key = draw.choice(keys) if keys else None
    event = draw.choice(["start", "start", "start", "end", "end", "admission"] if is_calm else EVENTS)
    if event == "start":
        bench.next()
    elif event == "admission":
        bench.loads.may_begin = not bench.loads.may_begin
    elif event == "engines":
        bench.set_engines(draw.sample(URLS, draw.randint(1, len(URLS))))
    elif event == "step":
        bench.policy.begin_step(draw.randint(1, 9))
    elif key is None:
        return
    elif event == "end":
        bench.end(key, draw.randint(1, 4_000))
    elif event == "lost":
        bench.lose(key)
    elif event == "broken":
        bench.break_off(key, draw.randint(1, 4_000))
    elif event == "closed":
        bench.close(key.group)
    elif event == "afresh":
        bench.begin_afresh(key.group)


EVENTS = [*["start"] * 6, *["end"] * 4, "admission", "engines", "step", "lost", "broken", "closed", "afresh"]
