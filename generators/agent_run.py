"""Running an agent to its end: a Python callable in this process, or a command in a process tree of its own."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

from forebay.generators.agent_task import AgentResult, AgentTask
from forebay.generators.failures import AgentFailed
from forebay.generators.rewards import is_async
from forebay.generators.samples import plain
from forebay.generators.sandbox import Command, Limits, Sandbox, shown

AgentFunc = Callable[[AgentTask], Any | Awaitable[Any]]
Agent = AgentFunc | Command
"""A function of one ``AgentTask``, ``async`` or not; or a command: a list of words, or a line of shell."""


async def run_agent(agent: Agent, task: AgentTask, sandbox: Sandbox, limits: Limits) -> AgentResult:
    """What ``agent`` made of ``task``. Raises ``AgentFailed``, or whatever a callable raises."""
    began_s = time.monotonic()
    running = _call(agent, task, limits) if callable(agent) else _execute(agent, task, sandbox, limits)
    output = await running
    return AgentResult(output=output, wall_s=time.monotonic() - began_s, folder=task.folder)


async def _call(agent: AgentFunc, task: AgentTask, limits: Limits) -> Any:
    try:
        async with asyncio.timeout(limits.wall_s) as limit:
            returned = await _returned(agent, task)
    except TimeoutError as error:
        if limit.expired():
            raise AgentFailed(f"the agent took longer than {limits.wall_s:g} s") from error
        raise
    try:
        return plain(returned)
    except TypeError as error:
        raise AgentFailed(f"the agent returned {returned!r:.200}: {error}") from error


async def _returned(agent: AgentFunc, task: AgentTask) -> Any:
    if is_async(agent):
        return await cast(Awaitable[Any], agent(task))
    # Looked up only now: it imports the openai package, which reading a generator file need not wait for.
    from forebay.generators.runner import in_thread

    return await in_thread(agent, task)


async def _execute(command: Command, task: AgentTask, sandbox: Sandbox, limits: Limits) -> str:
    task.write_instance()
    finished = await sandbox.run(command, env=task.environment(), limits=limits)
    if finished.problem:
        raise AgentFailed(f"the agent {shown(command):.200} {finished.problem}")
    return finished.stdout
