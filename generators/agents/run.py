"""Running an agent: a Python callable in this process, or a command in its own process tree.

The agent's time does not count while its run or its engines are paused, or no engine answers.
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
"""Step in which time is counted. Up to this much time before a pause is not counted."""
NO_LIMIT_S = 10_000_000.0
"""Time limit for the sandbox, which does not know when an agent's time is paused."""
AgentFunc = Callable[[AgentTask], Any | Awaitable[Any]]
Agent = AgentFunc | Command
"""A function of one ``AgentTask``, ``async`` or not, or a command: a list of words or a shell line."""
Keep = Callable[[str], None]
"""Receives the end of a command's output."""


async def run_agent(
    agent: Agent, task: AgentTask, sandbox: Sandbox, limits: Limits, hold: StepBarrier, keep: Keep = lambda _: None
) -> AgentResult:
    """Run ``agent`` on ``task``. Raises ``AgentFailed``, ``EngineWaitOver``, or any error of a callable.

    ``limits.wall_s`` counts only while ``hold`` allows engine calls and an engine answers. A command's output goes to
    ``keep``, even if the command failed.
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
        # The agent's own code may raise `TimeoutError` too.
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
    # Imported only now: it imports the openai package, for which inspecting a generator file need not wait.
    from forebay.generators.rollouts.attempts import in_thread

    return await in_thread(agent, task)


async def _execute(
    command: Command, task: AgentTask, sandbox: Sandbox, limits: Limits, hold: StepBarrier, keep: Keep
) -> str:
    task.write_instance()
    # The sandbox counts every second; the agent's time excludes those in which no engine call may be sent.
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
    # `finished.problem` would also count the pauses.
    problem = finished.with_last_words(f"was killed after {limits.wall_s:g} s") if is_over else finished.problem
    if problem:
        problem = f"the agent {shown(command):.200} {problem}"
        raise _stopped(hold, problem) if is_over else AgentFailed(problem)
    return finished.stdout


def _stopped(hold: StepBarrier, problem: str) -> RolloutFailed:
    """Return the error of a stopped agent: ``EngineWaitOver`` if no engine answers, else ``AgentFailed``."""
    return EngineWaitOver(hold.engine_wait_s) if hold.is_waiting else AgentFailed(problem)


async def _count(hold: StepBarrier, left_s: float) -> None:
    """Wait for ``left_s`` seconds of the agent's time, or until no engine has answered for ``engine_wait_s``."""
    now_s, wait_left_s = asyncio.get_running_loop().time, hold.engine_wait_s
    while left_s > 0 and wait_left_s > 0:
        await hold.wait_call()
        began_s = now_s()
        # In short steps, because a pause that begins within a step does not stop it.
        await asyncio.sleep(min(left_s, wait_left_s, LOOK_S))
        if hold.is_waiting:
            wait_left_s -= now_s() - began_s
        elif hold.may_call:
            left_s -= now_s() - began_s
