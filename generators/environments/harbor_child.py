"""Harbor in the environment's child: lists the tasks of a data set, and runs trials of them.

``serving`` gets ``tasks`` (a folder or a name of Harbor's registry), ``agent`` and ``environment``.
"""

import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from harbor.agents.factory import AgentFactory
from harbor.environments.factory import EnvironmentFactory
from harbor.models.environment_type import EnvironmentType
from harbor.models.job.config import DatasetConfig
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.tasks.client import TaskClient
from harbor.trial.trial import Trial

TASK_FILE = "task.toml"
PROCESS = "process"
OTHER_ENVIRONMENT = "choose another one of Harbor's with --set environment=NAME, or process for trusted tasks"
NO_CALLS = ("oracle", "nop")
"""Agents that call no model."""
NO_LIMIT_S = 21_600.0
"""Seconds for an agent whose task sets no ``timeout_sec``."""
Json = dict[str, Any]


class Refused(Exception):
    """A setting of the start is invalid; ``field`` names it."""

    def __init__(self, field: str, problem: str, hint: str) -> None:
        super().__init__(problem)
        self.field, self.hint = field, hint


@asynccontextmanager
async def serving(settings: Json) -> AsyncIterator[Json]:
    """Serve the methods ``tasks`` and ``run``."""
    sys.path.append(str(Path(__file__).parent))  # Harbor loads the module of `environment=process` by its name
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else LiteLLM downloads prices, and waits for them
    harbor = _Harbor(**settings)
    yield {"tasks": harbor.tasks, "run": harbor.run}


class _Harbor:
    def __init__(self, tasks: str, agent: str, environment: str) -> None:
        self._tasks, self._agent, self._environment = tasks, agent, environment

    async def tasks(self) -> Json:
        """Check everything that can be checked, and list the tasks as rows.

        Returns ``rows``, ``wall_s`` (the longest time that a task allows itself) and ``calls_model``; or ``problem``,
        ``hint`` and ``field``.
        """
        try:
            self._check_environment()
            self._check_agent()
            configs = await _task_configs(self._tasks)
            with tempfile.TemporaryDirectory() as folder:
                checked = [await self._checked(config, folder) for config in configs]
        except Refused as refused:
            return {"problem": str(refused), "hint": refused.hint, "field": refused.field}
        rows, wall_s = zip(*checked, strict=True)
        return {"rows": rows, "wall_s": max(wall_s), "calls_model": self._agent not in NO_CALLS}

    async def run(self, *, task: Json, folder: str, **access: str) -> Json:
        """Run one trial in ``folder``. Returns its ``rewards``, or an ``error`` and its ``kind``."""
        trial = await Trial.create(self._trial(TaskConfig(**task), folder, **access))
        result = await trial.run()
        for part in (result, *(result.step_results or ())):
            if (error := part.exception_info) is not None:
                kind = "environment" if part.agent_execution is None else "agent"
                if part.verifier is not None and error.occurred_at >= part.verifier.started_at:
                    kind = "judge"
                return {"kind": kind, "error": f"{error.exception_type}: {error.exception_message}"}
        if result.verifier_result is None:
            return {"kind": "judge", "error": "the verifier gave no reward"}
        return {"rewards": result.verifier_result.rewards}

    def _check_environment(self) -> None:
        try:
            config = self._environment_config()
        except ValueError:
            known = ", ".join([PROCESS, *(each.value for each in EnvironmentType)])
            problem = f"Harbor has no environment {self._environment!r}"
            raise Refused("environment", problem, f"it has {known}") from None
        try:
            EnvironmentFactory.run_preflight(config.type, config.import_path)
        except (Exception, SystemExit) as error:  # the checks of Harbor and its plugins raise anything
            problem = f"the environment {self._environment!r} cannot be used: {error}"
            raise Refused("environment", problem, OTHER_ENVIRONMENT) from error

    def _check_agent(self) -> None:
        if self._is_command:
            return
        try:
            AgentFactory.get_agent_class_from_config(AgentConfig(name=self._agent))
        except ValueError:
            known = ", ".join(AgentFactory.registered_names())
            hint = f"it has {known}; a command is recognised by a space or a slash"
            raise Refused("agent", f"Harbor has no agent {self._agent!r}", hint) from None

    @property
    def _is_command(self) -> bool:
        return any(character in self._agent for character in "/ \n")

    async def _checked(self, config: TaskConfig, folder: str) -> tuple[Json, float]:
        """Create a trial of the task as a rollout would. Returns the row, and the seconds that a trial may take."""
        access = {"model": "model", "base_url": "http://x/v1", "anthropic_url": "http://x", "api_key": "key"}
        try:
            trial = await Trial.create(self._trial(config, folder, **access))
            if self._environment == PROCESS:
                import_module("harbor_process").check_task(trial.task)  # it is found once `serving` has run
        except Exception as error:  # tasks are files of users, and agents plugins
            hint = OTHER_ENVIRONMENT if self._environment == PROCESS else "`harbor check` examines a task"
            raise Refused("tasks", f"the task {config.path or config.name} cannot be run: {error}", hint) from error
        for handler in list(trial.logger.handlers):  # its log is open, and there may be thousands of tasks
            trial.logger.removeHandler(handler)
            handler.close()
        task = trial.task
        prompt = task.instruction or task.step_instruction(task.config.steps[0].name)
        row = {"instance_id": task.name, "prompt": prompt, "task": config.model_dump(mode="json", exclude_none=True)}
        return row, trial.environment_build_timeout_sec + trial.agent_setup_timeout_sec + _working_s(task.config)

    def _trial(
        self, task: TaskConfig, folder: str, *, model: str, base_url: str, anthropic_url: str, api_key: str
    ) -> TrialConfig:
        env = {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": api_key,
            "ANTHROPIC_BASE_URL": anthropic_url,
            "ANTHROPIC_API_KEY": api_key,
            "FOREBAY_MODEL": model,
        }
        agent, environment = self._agent_config(model, env), self._environment_config()
        return TrialConfig(task=task, trials_dir=Path(folder), agent=agent, environment=environment)

    def _agent_config(self, model: str, env: dict[str, str]) -> AgentConfig:
        if self._is_command:
            return AgentConfig(import_path="harbor_process:CommandAgent", kwargs={"command": self._agent}, env=env)
        config = AgentConfig(name=self._agent, env=env)
        if self._agent in NO_CALLS:
            return config
        connection = AgentFactory.get_agent_class_from_config(config).MODEL_CONNECTION
        protocol = "anthropic" if connection and connection.default_provider == "anthropic" else "openai"
        return config.model_copy(update={"model_name": f"{protocol}/{model}"})

    def _environment_config(self) -> EnvironmentConfig:
        if self._environment == PROCESS:
            return EnvironmentConfig(import_path="harbor_process:ProcessEnvironment")
        if ":" in self._environment:
            return EnvironmentConfig(import_path=self._environment)
        return EnvironmentConfig(type=EnvironmentType(self._environment))


def _working_s(config: Any) -> float:
    """Return the seconds that a task allows the agents and verifiers of all its steps together."""
    seconds = 0.0
    for step in config.steps or [config]:
        limits = (step.agent.timeout_sec, config.agent.timeout_sec, NO_LIMIT_S)
        seconds += next(limit for limit in limits if limit is not None) + step.verifier.timeout_sec
    return seconds


async def _task_configs(tasks: str) -> list[TaskConfig]:
    """Return the tasks of a folder, or of a data set in Harbor's registry, which are downloaded. Raises ``Refused``."""
    path = Path(tasks).expanduser().absolute()
    if path.is_dir():
        found = [path] if (path / TASK_FILE).is_file() else sorted(file.parent for file in path.glob(f"*/{TASK_FILE}"))
        if not found:
            raise Refused("tasks", f"{path} holds no Harbor task", f"a task is a folder with {TASK_FILE}")
        return [TaskConfig(path=folder) for folder in found]
    hint = f"give a folder of the run's machine ({path} is none), or NAME@VERSION of Harbor's registry"
    if tasks.startswith(("/", ".", "~")):
        raise Refused("tasks", f"there is no folder {path}", hint)
    name, _, version = tasks.partition("@")
    try:
        configs = list(await DatasetConfig(name=name, version=version or None).get_task_configs())
        await TaskClient().download_tasks(task_ids=[config.get_task_id() for config in configs])
    except Exception as error:  # of the network, the registry or a file of it
        raise Refused("tasks", f"Harbor's registry gave no tasks for {tasks!r}: {error}", hint) from error
    if not configs:
        raise Refused("tasks", f"the data set {tasks!r} of Harbor's registry has no tasks", hint)
    return configs
