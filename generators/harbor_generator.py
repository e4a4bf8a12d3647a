"""The built-in task ``harbor``: tasks of Harbor, an agent of Harbor's or a command, and the tasks' own verifiers.

Harbor runs in a child with a Python of its own; see ``docs/harbor.md``.
"""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from forebay.core.errors import InvalidInput
from forebay.core.files import write_durably
from forebay.generators.agent import AgentGenerator, AgentTask, Limits
from forebay.generators.environments.child import EnvironmentChild, EnvironmentLibrary
from forebay.generators.process.run_logs import RUN_DIR_VARIABLE
from forebay.generators.rewards import TOTAL

TASK_TYPE = "harbor"
LIBRARY = EnvironmentLibrary(
    module_file="harbor_child.py",
    min_python="3.12",
    packages=("harbor", "msgspec"),
    install="harbor==0.25.0 msgspec",
)


def reward_func(item: dict[str, Any]) -> dict[str, float]:
    """Return what the task's verifier wrote. Of a single number with another name, that number is the total."""
    rewards: dict[str, float] = item["agent"]["output"]["rewards"]
    return rewards if TOTAL in rewards or len(rewards) != 1 else {TOTAL: next(iter(rewards.values())), **rewards}


async def run_tasks(data: dict[str, Any]) -> None:
    """Run the tasks of a start payload."""
    generator = AgentGenerator.from_payload(data)
    async with EnvironmentChild(LIBRARY, settings_of(data)) as child:
        found = await child.call("tasks")
        if "problem" in found:
            raise InvalidInput(found["problem"], hint=found["hint"], field=found["field"])

        async def agent(task: AgentTask) -> dict[str, Any]:
            access = {"base_url": task.base_url, "anthropic_url": task.anthropic_url, "api_key": task.api_key}
            row_task, folder = task.row["task"], str(task.folder)
            return await child.run(task=row_task, folder=folder, model=task.model, **access)

        rows = Path(os.environ[RUN_DIR_VARIABLE]) / "rows.jsonl"
        if generator.is_lead and not rows.exists():  # a restarted run continues with the same rows
            write_durably(rows, msgspec.json.Encoder().encode_lines(found["rows"]))
        await generator.run_agent_async(
            rows,
            agent,
            reward_func,
            data.get("num_epoch", 1),
            limits=Limits(wall_s=found["wall_s"]),
            calls_model=found["calls_model"],
        )


def settings_of(data: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of ``harbor_child.py``. Raises ``InvalidInput``."""
    for name, example in (("tasks", "FOLDER"), ("agent", "terminus-2")):
        if not isinstance(data.get(name), str) or not data[name].strip():
            raise InvalidInput(
                f"{name} must be a text (got {data.get(name)!r:.100})",
                hint=f"start with --set {name}={example}",
                field=name,
            )
    return {"tasks": data["tasks"], "agent": data["agent"], "environment": str(data.get("environment") or "docker")}


def run_rollout(data: dict[str, Any]) -> None:
    """Run the task with a start payload, which names ``tasks``, ``agent`` and optionally Harbor's ``environment``."""
    asyncio.run(run_tasks(data))
