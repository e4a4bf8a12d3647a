"""Running an agent to its end: a Python callable in this process, or a command in a process tree of its own.

The agent's time is counted here: it is paused while its run is held, its engines are paused, or no engine answers.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

from forebay.core.waiting import timeout_when
from forebay.generators.agents.task import AgentResult, AgentTask
from forebay.generators.failures import AgentFailed, EngineWaitOver, RolloutFailed
from forebay.generators.rewards import is_async
from forebay.generators.rollouts.open_group import StepBarrier
from forebay.generators.rollouts.samples import plain
from forebay.generators.sandbox import Command, Limits, Sandbox, shown
from forebay.telemetry.tracing.tracer import span

LOOK_S = 1.0
"""How often time is counted. Of the seconds before a standstill, so many may be left out."""
NO_LIMIT_S = 10_000_000.0
"""For the sandbox, which cannot tell when an agent's time stands still."""
AgentFunc = Callable[[AgentTask], Any | Awaitable[Any]]
Agent = AgentFunc | Command
"""A function of one ``AgentTask``, ``async`` or not; or a command: a list of words, or a line of shell."""
Keep = Callable[[str], None]
"""Takes the end of what a command printed."""


async def run_agent(
    agent: Agent, task: AgentTask, sandbox: Sandbox, limits: Limits, hold: StepBarrier, keep: Keep = lambda _: None
) -> AgentResult:
    """What ``agent`` made of ``task``. Raises ``AgentFailed``, ``EngineWaitOver``, or whatever a callable raises.

    ``limits.wall_s`` counts while ``hold`` lets engine calls go out and an engine answers. What a command printed goes
    to ``keep``, however it ended.
    """
    began_s = time.monotonic()
    with span("environment"):
        if callable(agent):
            output = await _call(agent, task, limits, hold)
        else:
            output = await _execute(agent, task, sandbox, limits, hold, keep)
    return AgentResult(output=output, wall_s=time.monotonic() - began_s, folder=task.folder)


async def _call(agent: AgentFunc, task: AgentTask, limits: Limits, hold: StepBarrier) -> Any:
    try:
        async with timeout_when(_count(hold, limits.wall_s)) as limit:
            returned = await _returned(agent, task)
    except TimeoutError as error:
        # The agent's own code may raise one too: that is its own failure.
        if limit.expired():
            raise _stopped(hold, f"the agent took longer than {limits.wall_s:g} s") from error
        raise
    try:
        return plain(returned)
    except TypeError as error:
        raise AgentFailed(f"the agent returned {returned!r:.200}: {error}") from error


async def _returned(agent: AgentFunc, task: AgentTask) -> Any:
    if is_async(agent):
        return await cast(Awaitable[Any], agent(task))
    # Looked up only now: it imports the openai package, which reading a generator file need not wait for.
    from forebay.generators.rollouts.attempts import in_thread

    return await in_thread(agent, task)


async def _execute(
    command: Command, task: AgentTask, sandbox: Sandbox, limits: Limits, hold: StepBarrier, keep: Keep
) -> str:
    task.write_instance()
    # The sandbox counts every second; ours leave out those in which no engine call may go out.
    without_wall = replace(limits, wall_s=NO_LIMIT_S)
    over = asyncio.Event()

    async def set_at_limit() -> None:
        await _count(hold, limits.wall_s)
        over.set()

    counting = asyncio.create_task(set_at_limit())
    try:
        finished = await sandbox.run(command, env=task.environment(), limits=without_wall, stop=over)
    finally:
        counting.cancel()
    await asyncio.to_thread(keep, finished.printed)
    is_over = over.is_set() and finished.is_timed_out
    # Its own measure would count the standstills.
    problem = finished.with_last_words(f"was killed after {limits.wall_s:g} s") if is_over else finished.problem
    if problem:
        problem = f"the agent {shown(command):.200} {problem}"
        raise _stopped(hold, problem) if is_over else AgentFailed(problem)
    return finished.stdout


def _stopped(hold: StepBarrier, problem: str) -> RolloutFailed:
    """Why an agent was stopped; while no engine answers, its own time does not count."""
    return EngineWaitOver(hold.engine_wait_s) if hold.is_waiting else AgentFailed(problem)


async def _count(hold: StepBarrier, left_s: float) -> None:
    """Return after ``left_s`` seconds of the agent's time, or too many of waiting for an engine."""
    now_s, wait_left_s = asyncio.get_running_loop().time, hold.engine_wait_s
    while left_s > 0 and wait_left_s > 0:
        await hold.wait_call()
        began_s = now_s()
        # In short steps: a hold that begins in the middle of one costs the agent no more than that.
        await asyncio.sleep(min(left_s, wait_left_s, LOOK_S))
        if hold.is_waiting:
            wait_left_s -= now_s() - began_s
        elif hold.may_call:
            left_s -= now_s() - began_s
