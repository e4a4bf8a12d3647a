"""The faults, one class each; a seed varies their lengths, groups and sizes."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from forebay.core.ids import run_rid_prefix
from forebay.engines.scripted import Reply, ScriptedCall, ThreadedEngine
from tests.kit import Json, NativeRun, ServerProcess
from tests.profile.delaying_proxy import DelayingProxy
from tests.profile.planting import TOLERANCE, A, B, Pace, Planted, Sizes, tool_call


@dataclass
class SlowEngine(Planted):
    """Engine B samples at a quarter of the rate."""

    row: ClassVar[str] = "slow_engine"
    cause: ClassVar[str] = "slow_engine"
    is_of_engine: ClassVar[bool] = True
    words: ClassVar[str] = "engine B samples at a quarter of A's rate, in all calls"

    def pace(self, engine: int, number: int) -> Pace:
        usual = self.usual()
        return replace(usual, tokens_per_s=usual.tokens_per_s / 4) if engine == B else usual


@dataclass
class SlowingEngine(Planted):
    """Engine B samples more slowly with each call."""

    row: ClassVar[str] = "slowing_engine"
    cause: ClassVar[str] = "slow_engine"
    is_of_engine: ClassVar[bool] = True
    words: ClassVar[str] = "engine B needs 1.5 % more seconds per token with each call that it answers"

    def vary(self, rng: random.Random) -> Sizes:
        return replace(super().vary(rng), num_steps=4, num_groups=rng.randint(5, 6), group_size=3)

    def pace(self, engine: int, number: int) -> Pace:
        usual = self.usual()
        return replace(usual, tokens_per_s=usual.tokens_per_s / 1.015**number) if engine == B else usual


@dataclass
class SlowNetwork(Planted):
    """Engine B is far away."""

    row: ClassVar[str] = "network"
    cause: ClassVar[str] = "network"
    is_of_engine: ClassVar[bool] = True
    words: ClassVar[str] = "requests to engine B and their replies together take 2.5 s longer on their way"
    delay_s: ClassVar[float] = 2.5

    def vary(self, rng: random.Random) -> Sizes:
        return replace(super().vary(rng), num_steps=2)

    def network_s(self, engine: int) -> float:
        return self.delay_s if engine == B else 0.0

    @contextmanager
    def reached(self, engine: int, url: str) -> Iterator[str]:
        if engine == A:
            yield url
            return
        with DelayingProxy(url, self.delay_s).in_thread() as proxy:
            yield proxy.url


@dataclass
class ColdCache(Planted):
    """Engine B finds nothing in its prefix cache."""

    row: ClassVar[str] = "cold_cache"
    cause: ClassVar[str] = "cold_cache"
    is_of_engine: ClassVar[bool] = True
    words: ClassVar[str] = (
        "prefill takes 1.5 s longer at engine B, with no cached tokens; A has 90 % of each prompt cached"
    )

    def pace(self, engine: int, number: int) -> Pace:
        usual = self.usual()
        return replace(usual, prefill_s=usual.prefill_s + 1.5, cached_share=0.0) if engine == B else usual


@dataclass
class AllFail(Planted):
    """The tool of all rollouts raises, in all attempts: no group is delivered."""

    row: ClassVar[str] = "all_fail"
    cause: ClassVar[str] = "nothing_delivered"
    words: ClassVar[str] = (
        "the tool raises in every attempt of every rollout (environment_failure); no group is delivered"
    )
    in_sentence: ClassVar[tuple[str, ...]] = ("environment_failure",)
    last_tool_s: ClassVar[float] = 0.3
    """After the last call, which asks for it."""
    settings: ClassVar[Json] = {"max_attempts": 2}

    def tool(self, rollout: tuple[int, int], attempt: int) -> tuple[float, bool]:
        return self.sizes.tool_s, True

    def start(self, server: ServerProcess, **settings: Any) -> Any:
        return super().start(server, oversampling=None, **settings)

    def train(self, engines: list[ThreadedEngine]) -> None:
        """Read until the run has ended, in vain."""
        self.wait_begun(engines)
        self.asked_s = time.monotonic()
        body = {"num_groups": self.sizes.num_groups, "wait_s": 60, "step": 0}
        reply = self.run.client.post(f"{self.run.path}/batches", json=body)
        assert reply.status_code == 410, reply.text  # the run has ended, and has nothing
        self.waits_s.append(time.monotonic() - self.asked_s)

    def costs_s(self) -> list[float]:
        return self.waits_s

    def is_cost(self, seconds: float, step: str | None) -> bool:
        """From the end of the last rollout to the end of the wait, in which the run ends: longer on a busy machine."""
        last_s = max(call.came_s + call.seconds for call in self.calls) + self.last_tool_s
        return (1 - TOLERANCE) * (last_s - self.asked_s) <= seconds <= (1 + TOLERANCE) * self.waits_s[0]


@dataclass
class AllInvalid(AllFail):
    """All rewards of a group are equal: no group is delivered."""

    row: ClassVar[str] = "all_invalid"
    words: ClassVar[str] = "all rewards are 1, so that each group is discarded as invalid; no group is delivered"
    in_sentence: ClassVar[tuple[str, ...]] = ("invalid",)
    last_tool_s: ClassVar[float] = 0.0
    settings: ClassVar[Json] = {}

    def tool(self, rollout: tuple[int, int], attempt: int) -> tuple[float, bool]:
        return self.sizes.tool_s, False

    def task(self, number: int) -> Json:
        return {"reward": 1.0}


@dataclass
class SlowDisk(Planted):
    """Each sync of the server's disk takes 0.7 s. Its server needs ``SLOW_DISK``."""

    row: ClassVar[str] = "write"
    cause: ClassVar[str] = "write"
    words: ClassVar[str] = "each fsync and fdatasync of the server takes 0.7 s longer"
    sync_s: ClassVar[float] = 0.7
    usual_write_s: ClassVar[float] = 0.1
    """From the end of a rollout until the trainer has it."""

    def costs_s(self) -> list[float]:
        # Syncs follow each other, and writes wait for them, so that their number on the path cannot be planted.
        pairs = zip(self.waits_s, self.usual_waits_s(), strict=True)
        return [wait_s - usual_s - self.usual_write_s for wait_s, usual_s in pairs]


@dataclass
class FailingTool(Planted):
    """A fifth of the calls of a tool raises, and the rollouts start again."""

    row: ClassVar[str] = "failures"
    cause: ClassVar[str] = "failures"
    event: ClassVar[str] = "search"
    max_failures: ClassVar[int] = 2
    words: ClassVar[str] = "20 % of the calls of the tool search raise, which fails the attempt; it is retried"

    def vary(self, rng: random.Random) -> Sizes:
        return replace(super().vary(rng), num_groups=rng.randint(5, 6), group_size=3, tool_s=1.0)

    def tool(self, rollout: tuple[int, int], attempt: int) -> tuple[float, bool]:
        rng = random.Random(f"{self.seed}-{rollout}-{attempt}")
        return self.sizes.tool_s, attempt < self.max_failures and rng.random() < 0.2


@dataclass
class SmallReads(Planted):
    """The trainer reads one group at a time, and works between the reads."""

    row: ClassVar[str] = "small_reads"
    cause: ClassVar[str] = "small_reads"
    words: ClassVar[str] = (
        "the trainer reads one group at a time, with pause_s seconds of work after each, although more are ready"
    )

    def vary(self, rng: random.Random) -> Sizes:
        self.pause_s = rng.uniform(0.6, 0.9)
        return replace(super().vary(rng), num_groups=rng.randint(7, 8), group_size=2)

    def read(self, step: int) -> None:
        asked_s = time.monotonic()
        for number in range(self.sizes.num_groups):
            if number:
                time.sleep(self.pause_s)  # it works: that is the fault
            self.run.ack(self.run.read(num_groups=1, wait_s=60, step=step))
        self.waits_s.append(time.monotonic() - asked_s)

    def costs_s(self) -> list[float]:
        pairs = zip(self.waits_s, self.usual_waits_s(), strict=True)
        return [wait_s - usual_s - SlowDisk.usual_write_s for wait_s, usual_s in pairs]


@dataclass
class OtherRun(Planted):
    """A second run uses the same engines, which get slower with their number of running calls."""

    row: ClassVar[str] = "shared_engines"
    cause: ClassVar[str] = "shared_engines"
    words: ClassVar[str] = (
        "from the second step on, another run uses both engines, whose rate falls with their running calls"
    )

    num_others: ClassVar[int] = 24

    def vary(self, rng: random.Random) -> Sizes:
        return replace(super().vary(rng), num_groups=4, group_size=3)

    def pace(self, engine: int, number: int) -> Pace:
        usual = self.usual()
        own = self.sizes.num_groups * self.sizes.group_size / 2 + 1
        return replace(usual, tokens_per_s=usual.tokens_per_s * min(1.0, own / self.served[engine].in_flight))

    def announce(self, step: int) -> None:
        if step == 1:
            self.start_other()
        super().announce(step)

    def start_other(self) -> None:
        """Start the other run; return when it has all its calls in flight."""
        self.other = self.start(self.run.server, num_process=self.num_others, oversampling=None, num_epoch=100)
        deadline_s = time.monotonic() + 60
        while sum(engine.in_flight for engine in self.served) < self.num_others:
            assert time.monotonic() < deadline_s, self.other.view()
            time.sleep(0.005)

    def train(self, engines: list[ThreadedEngine]) -> None:
        super().train(engines)
        self.other.stop()

    async def answer(self, engine: int, number: int, call: ScriptedCall) -> Reply:
        if (call.rid or "").startswith(run_rid_prefix(self.run.run_id)):
            return await super().answer(engine, number, call)
        # Calls of the other run are long: it nearly always has as many in flight.
        if call.messages[-1]["role"] == "user":
            return tool_call(0.0)
        return Reply(text="a" * 100, tokens_per_s=self.sizes.tokens_per_s / 4)

    @contextmanager
    def serving(self) -> Iterator[list[ThreadedEngine]]:
        with super().serving() as self.served:
            yield self.served


@dataclass
class SlowTool(Planted):
    """A tool takes 15 s in every rollout."""

    row: ClassVar[str] = "tool"
    cause: ClassVar[str] = "tool"
    event: ClassVar[str] = "search"
    words: ClassVar[str] = "the tool search takes 15 s in every rollout"
    is_only_finding: ClassVar[bool] = True

    def vary(self, rng: random.Random) -> Sizes:
        return replace(super().vary(rng), num_steps=2, tool_s=15.0)

    def usual_tool_s(self) -> float:
        return 0.0


@dataclass
class Clean(Planted):
    """Nothing is slow; the run is held between steps, and has no leftover."""

    words: ClassVar[str] = "nothing is slow, held between steps, tools of 3 s"
    train_s: ClassVar[float] = 0.5

    def vary(self, rng: random.Random) -> Sizes:
        return replace(super().vary(rng), num_tokens=rng.randint(140, 180), tokens_per_s=40.0, tool_s=3.0)

    def announce(self, step: int) -> None:
        if step:
            time.sleep(self.train_s)
        super().announce(step)

    def costs_s(self) -> list[float]:
        return [0.0] * self.sizes.num_steps


@dataclass
class CleanKept(Clean):
    """The same; rollouts in flight are kept when the step has its groups."""

    row: ClassVar[str] = "clean_kept"
    words: ClassVar[str] = "nothing is slow, rollouts are kept over steps, tools of 3 s"

    def num_rows(self) -> int:
        return super().num_rows() + self.sizes.num_groups

    def start(self, server: ServerProcess, **settings: Any) -> NativeRun:
        held = {"groups_per_step": self.sizes.num_groups, "leftover": "keep"}
        num_process = self.sizes.num_groups * self.sizes.group_size
        return super().start(server, oversampling=held, num_process=num_process, **settings)

    async def answer(self, engine: int, number: int, call: ScriptedCall) -> Reply:
        reply = await super().answer(engine, number, call)
        # At once: half a call of a tool cannot be gone on with.
        return replace(reply, tokens_per_s=None) if reply.tool_calls else reply

    def end(self) -> None:
        self.run.stop()


@dataclass
class CleanAsync(Clean):
    """The same; the run is never held."""

    row: ClassVar[str] = "clean_async"
    words: ClassVar[str] = "nothing is slow, never held, tools of 3 s"

    def start(self, server: ServerProcess, **settings: Any) -> NativeRun:
        num_process = self.sizes.num_groups * self.sizes.group_size
        return super().start(server, oversampling=None, num_process=num_process, **settings)


CLEAN: tuple[type[Planted], ...] = (Clean, CleanKept, CleanAsync)
