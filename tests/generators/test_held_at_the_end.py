"""A run whose last groups complete its step: it ends, and waits for no weights that its trainer has no use for."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.core.clock import ActiveClock, ManualClock
from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.oversampling import Oversampling
from forebay.core.task_row import TaskRow
from forebay.generators.buffer_link.abc import Plan
from forebay.generators.job.composition import policy_of
from forebay.generators.job.deferral import Deferral
from forebay.generators.job.dispatcher import Dispatcher
from forebay.generators.job.group_feed import GroupFeed, ScheduledGroups
from forebay.generators.job.open_groups import OpenGroups
from forebay.generators.job.ports import JobParts
from forebay.generators.rollouts.open_group import GroupPlan, OpenGroup, StepBarrier
from forebay.generators.rollouts.rollout_slot import RolloutSlot
from forebay.generators.rollouts.rollout_trace import RolloutTrace, RolloutTraces
from forebay.telemetry.tracing.tracer import NO_TRACE

PLAN = Plan("run-0123456789ab", 1, oversampling=Oversampling(groups_per_step=1))
URL = "http://127.0.0.1:1"
LIMIT_S = 20.0


async def nothing(*_: object) -> None:
    pass


async def engines() -> tuple[str, ...]:
    return (URL,)


@pytest.mark.parametrize("looks_again", [True, False], ids=["between", "after"])
async def test_the_dispatcher_ends_with_the_last_group_although_the_run_is_held(*, looks_again: bool) -> None:
    """Something wakes it after the step was complete, and before its last rollout has ended."""
    hold = StepBarrier(PLAN.groups_per_step)
    deferral = Deferral(PLAN, lambda: hold.num_counted)
    policy = policy_of(PLAN, 100, [])
    groups = [GroupPlan(TaskRow(0, "a", [{"role": "user", "content": "q"}], {}), 0, (0,), (0,))]

    async def run(group: OpenGroup, trace: RolloutTrace, rollout_slot: RolloutSlot) -> None:
        trace.end()
        hold.note_complete(group.group_id)
        if looks_again:
            dispatcher.changed.notify()
            await asyncio.sleep(0.05)
        group.note_rollout_ended()
        rollout_slot.leave()
        dispatcher.changed.notify()

    stub: Any = SimpleNamespace(when_up=engines, when_ready=nothing, announce=nothing, note_group=lambda _: None)
    feed = GroupFeed(ScheduledGroups(iter(groups)), policy, PLAN, deferral)
    parts = JobParts(
        plan=PLAN,
        schedule=stub,
        link=stub,
        pool=stub,
        runner=stub,
        writer=stub,
        reporter=stub,
        clock=ActiveClock(ManualClock()),
        hold=hold,
        policy=policy,
        loads=EngineLoads(4, [URL]),
        traces=RolloutTraces(NO_TRACE, PLAN.run_id),
    )
    dispatcher = Dispatcher(parts, feed, deferral, OpenGroups(stub, stub, hold, lambda _: None), run)
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        await dispatcher.start_all(tasks)
    assert hold.is_held
