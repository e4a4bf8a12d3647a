"""Tasksets of ``verifiers`` (its v1 API) for ``verifiers_generator.py``. Run by ``child_main.py`` with another Python.

Settings: ``env``, the block ``[env]`` of verifiers' own programs, and ``select``, their choice of tasks.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.runtimes import runtime_is_local
from verifiers.v1.utils.loaders import harness_class

KEY_VARIABLE = "FOREBAY_API_KEY_"
"""Beginning of the names of variables with rollouts' keys. verifiers hides variables named so from programs."""
UNRECORDED = {"X-Forebay-Record": "false"}
ENVIRONMENT_ERRORS = ("EnvError", "InterceptionError", "SandboxError", "ToolsetError", "TunnelError")


@asynccontextmanager
async def serving(settings: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Load the environment, and serve its rows and its rollouts."""
    env = vf.load_environment(vf.resolve_env_config(with_local_seats(settings["env"])))
    tasks = env.taskset.select(vf.SelectConfig(**settings["select"]))
    env.setup = seats_for_forebay(env)
    numbers = itertools.count()

    async def write_rows(path: str) -> None:
        Path(f"{path}.new").write_bytes(rows_of(tasks))
        Path(f"{path}.new").replace(path)

    async def run(task: dict[str, Any], base_url: str, api_key: str, model: str) -> dict[str, Any]:
        task_type, variable = type(env.taskset).task_type(), f"{KEY_VARIABLE}{next(numbers)}"
        (slot,) = env.slots(task_type(task_type.data_type().model_validate(task), env.config.taskset.task))
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
        os.environ[variable] = api_key
        try:
            return result_of(await env.run_slot(slot, vf.ModelContext(model=model, client=client)))
        finally:
            del os.environ[variable]

    async with env.serving():
        yield {"write_rows": write_rows, "run": run}


def with_local_seats(env: dict[str, Any]) -> dict[str, Any]:
    """Let seats without a harness only chat, and programs that execute no code of a model run on this machine.

    verifiers' own defaults are the harness ``bash``, and a sandbox at a provider.
    """
    taskset_id = env["taskset"]["id"]
    default = vf.default_agent_harness(taskset_id)
    for name, field in vf.env_config_type(taskset_id, env.get("id", "")).model_fields.items():
        if isinstance(seat := field.default, vf.AgentConfig):
            given = env[name] = block(env, name, f"env.{name}")
            if seat.harness is None and default.id == "bash":
                given.setdefault("harness", {"id": "null"})
            harness_id = block(given, "harness", f"env.{name}.harness").get("id") or (seat.harness or default).id
            if isinstance(seat.runtime, vf.PrimeConfig) and not harness_class(harness_id).EXECUTES_CODE:
                given.setdefault("runtime", {"type": "subprocess"})
    return env


def block(settings: dict[str, Any], name: str, field: str) -> dict[str, Any]:
    """Return a part of the settings, empty if it is missing. Raises ``ValueError`` unless it is an object."""
    if not isinstance(found := settings.get(name) or {}, dict):
        raise ValueError(f"{field} must be an object (got {found!r:.100})")
    return found


def seats_for_forebay(env: Any) -> Any:
    """Return the ``setup`` of ``env``, followed by what each seat of an episode needs."""
    prepare = env.setup

    async def setup(agents: Any) -> None:
        await prepare(agents)
        for name in agent_config_fields(env.config):
            agent = getattr(agents, name)
            if runtime_is_local(agent.runtime_config):
                # A server of the rollout's own: shared ones keep a client for each address until they end.
                agent.interception = None
            client = agent.ctx.client
            if not agent.trainable and client.api_key_var.startswith(KEY_VARIABLE):
                agent.ctx = replace(agent.ctx, client=client.model_copy(update={"headers": UNRECORDED}))

    return setup


def rows_of(tasks: Any) -> bytes:
    """Return the tasks as lines of an input file. Raises ``ValueError`` if there are none, or no end of them."""
    if not tasks.bounded:
        raise ValueError("the taskset is infinite: choose the number of its tasks, for example select.limit=1000")
    rows = [
        {"instance_id": data.idx, "prompt": data.prompt_text, "task": data.model_dump(mode="json")}
        for data in (task.data for task in tasks)
    ]
    if not rows:
        raise ValueError("the taskset has no tasks, or select chooses none of them")
    return msgspec.json.Encoder().encode_lines(rows)


def result_of(episode: Any) -> dict[str, Any]:
    """Return an episode's ``rewards``, with the total as ``reward``; or ``error`` and its ``kind``."""
    if not episode.ok:
        return failure_of(episode)
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) != 1:
        return failed("agent", f"a rollout needs one trained agent run (the episode has {len(trained)})")
    (trace,) = trained
    missing = [name for name, reward in trace.rewards.items() if reward is None]
    if missing or not trace.rewards:
        return failed("judge", f"no value of {', '.join(missing)}" if missing else "the taskset gave no reward")
    # A function may itself be called `reward`, the name of the total.
    parts = {"reward_" if name == "reward" else name: reward.score for name, reward in trace.rewards.items()}
    return {"rewards": {"reward": trace.reward, **parts}, "metrics": trace.metrics, "stop": trace.stop_condition}


def failure_of(episode: Any) -> dict[str, Any]:
    """Return the last error of an episode that failed, and which part failed."""
    errors = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
    if not errors:
        return failed("agent", "the episode failed without an error")
    error = errors[-1]
    kind = "environment" if error.type in ENVIRONMENT_ERRORS else "agent"
    if error.type == "TaskError":
        kind = "judge" if any(trace.timing.scoring.start for trace in episode.traces) else "environment"
    return failed(kind, f"{error.type}: {error.message}")


def failed(kind: str, message: str) -> dict[str, Any]:
    """Return a failure as a result."""
    return {"error": message, "kind": kind}
