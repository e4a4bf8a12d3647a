"""The built-in task ``verifiers``: tasks, tools, turns and rewards of a taskset of the library ``verifiers``.

The taskset runs in a child with a Python of its own; see ``docs/verifiers.md``.
"""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forebay.core.errors import InvalidInput
from forebay.generators.agent import AgentGenerator, AgentTask, Limits
from forebay.generators.base import seconds_of
from forebay.generators.environments.child import EnvironmentChild, EnvironmentLibrary
from forebay.generators.process.run_logs import RUN_DIR_VARIABLE

TASK_TYPE = "verifiers"
AGENT_TIMEOUT_S = 600.0
LIBRARY = EnvironmentLibrary(
    module_file="verifiers_child.py",
    min_python="3.11",
    packages=("verifiers", "msgspec"),
    install="verifiers==0.4.0 msgspec uv",
)


def reward_func(item: dict[str, Any]) -> dict[str, float]:
    """Return the rewards that the taskset gave, and their total."""
    rewards: dict[str, float] = item["agent"]["output"]["rewards"]
    return rewards


async def run_taskset(data: dict[str, Any]) -> None:
    """Run the taskset of a start payload."""
    generator = AgentGenerator.from_payload(data)
    limits = Limits(wall_s=seconds_of("agent_timeout_s", data.get("agent_timeout_s", AGENT_TIMEOUT_S)))
    async with EnvironmentChild(LIBRARY, settings_of(data)) as child:

        async def agent(task: AgentTask) -> dict[str, Any]:
            address = {"base_url": task.base_url, "api_key": task.api_key}
            return await child.run(task=task.row["task"], model=task.model, **address)

        rows = Path(os.environ[RUN_DIR_VARIABLE]) / "rows.jsonl"
        if generator.is_lead and not rows.exists():  # a restarted run continues with the same rows
            await child.call("write_rows", path=str(rows))
        await generator.run_agent_async(rows, agent, reward_func, data.get("num_epoch", 1), limits=limits, hidden=())


def settings_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of ``verifiers_child.py``. Raises ``InvalidInput``."""
    taskset = data.get("taskset")
    if not isinstance(taskset, str) or not taskset:
        raise InvalidInput(
            f"taskset must name a taskset of verifiers (got {taskset!r:.100})",
            hint="start with --set taskset=ID, where vf-eval ID runs it",
            field="taskset",
        )
    env, select = (_block(data, name, name) for name in ("env", "select"))
    given = _block(env, "taskset", "env.taskset")
    return {"env": {**env, "taskset": {**given, "id": taskset}}, "select": select}


def _block(settings: Mapping[str, Any], name: str, field: str) -> dict[str, Any]:
    found = settings.get(name) or {}
    if not isinstance(found, dict):
        raise InvalidInput(f"{field} must be an object (got {found!r:.100})", field=field)
    return found


def run_rollout(data: dict[str, Any]) -> None:
    """Run the task with a start payload, which names the ``taskset``."""
    asyncio.run(run_taskset(data))
