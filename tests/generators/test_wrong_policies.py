"""Policies of users that do what they should not: the run goes on, or says what is wrong; nothing hangs."""

import asyncio
from collections.abc import Callable

import pytest

from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.policy import NextRollout, PolicyInputs, RolloutKey
from forebay.core.scheduling.scheduler import Scheduler
from forebay.engines.scripted import ScriptedEngine
from forebay.generators.base import BaseGenerator, Totals, single_turn
from forebay.generators.job import dispatcher, run_job
from forebay.workers.scheduling.pull import Pull
from tests.generators.bench_kit import reward

LIMIT_S = 60.0


class Hasty(Pull):
    """Begins groups although one waits for room, names engines that are none, and makes rollouts up."""

    def next(self, loads: EngineLoads) -> NextRollout | None:
        loads.may_begin = True
        self._num_asked = getattr(self, "_num_asked", 0) + 1
        if self._num_asked % 3 == 0:
            return NextRollout(RolloutKey("no-such-group", self._num_asked))
        chosen = super().next(loads)
        return chosen and NextRollout(chosen.rollout, "http://nowhere:1")


class Idle(Pull):
    """Starts nothing."""

    def next(self, loads: EngineLoads) -> NextRollout | None:
        return None


class Raising(Pull):
    """Has a mistake in it."""

    def next(self, loads: EngineLoads) -> NextRollout | None:
        raise KeyError(f"of {loads.total}")


Run = Callable[[type[Pull]], "asyncio.Task[Totals]"]


@pytest.fixture
async def run(buffer, write_rows, monkeypatch: pytest.MonkeyPatch) -> Run:
    async def running(policy: type[Pull]) -> Totals:
        def policy_of(plan, max_tokens: int) -> Pull:
            return policy(PolicyInputs(Scheduler(), 4, plan.group_size, max_tokens))

        monkeypatch.setattr(run_job, "policy_of", policy_of)
        async with ScriptedEngine(lambda call: str(call.number)) as engine, asyncio.timeout(LIMIT_S):
            rows = write_rows(*({"prompt": f"row {number}"} for number in range(6)))
            return await BaseGenerator(engine.url, buffer.url, 2).run_async(rows, single_turn, reward)

    return lambda policy: asyncio.create_task(running(policy))


async def test_whatever_it_chooses_each_rollout_runs_once(run: Run, buffer) -> None:
    totals = await run(Hasty)
    assert (totals.num_completed, totals.num_groups_opened) == (12, 6)
    assert len({sample["uid"] for sample in buffer.samples}) == len(buffer.samples) == 12


async def test_a_run_whose_policy_starts_nothing_ends_with_its_name(run: Run, monkeypatch) -> None:
    monkeypatch.setattr(dispatcher, "STUCK_S", 0.2)
    monkeypatch.setattr(dispatcher, "LOOK_AGAIN_S", 0.05)
    with pytest.raises(dispatcher.PolicyStuck, match="Idle has started nothing"):
        await run(Idle)


async def test_a_mistake_in_a_policy_ends_the_run_with_it(run: Run) -> None:
    with pytest.raises(KeyError, match="of 0"):
        await run(Raising)
