"""Writes a new generator file that works without changes."""

import re
from pathlib import Path
from string import Template

from forebay.core.errors import InvalidInput

_TEMPLATE = Template('''\
"""A generator: how rollouts of one task type are made, and what each is worth."""

from typing import Any

from forebay.generators.base import BaseGenerator, single_turn

TASK_TYPE = $task_type


async def rollout_func(client: Any, messages: list[dict[str, Any]], sampling_params: dict[str, Any]) -> Any:
    """One rollout, from the row's prompt to the final messages and the finish reason. Here: one answer.

    ``client`` is an ``openai.AsyncOpenAI``: call tools, an environment or the model again as often as the task asks.
    """
    return await single_turn(client, messages, sampling_params)


def reward_func(item: dict[str, Any]) -> float:
    """The reward, from the row's fields and ``messages``. Here: 1 if the answer contains the row's ``label``."""
    answer = item["messages"][-1].get("content") or ""
    return float(str(item["label"]) in answer)


def run_rollout(data: dict[str, Any]) -> None:
    """Called once in a process of its own, with the payload that started the run."""
    generator = BaseGenerator.from_payload(data)
    generator.entry(data["input_file"], rollout_func, reward_func, data.get("num_epoch", 1))
''')


OWN_FOLDER = Path("generators")
FOLDER_IN_A_CHECKOUT = Path("my_tasks")
"""Found only if named with ``--generators``: a server searches only ``./generators`` by itself."""


def default_folder() -> Path:
    """Return the default folder for new generators: ``generators``, unless that is the package of a checkout."""
    return FOLDER_IN_A_CHECKOUT if is_the_package(OWN_FOLDER) else OWN_FOLDER


def is_the_package(folder: Path) -> bool:
    """Whether ``folder`` is a copy of Forebay's own package ``generators``, which contains this module."""
    return (folder / Path(__file__).parent.name / Path(__file__).name).is_file()


def write_scaffold(task_type: str, folder: Path) -> Path:
    """Write a generator file for ``task_type`` into ``folder``, creating the folder, and return its path.

    Raises InvalidInput if ``task_type`` is empty or the file exists.
    """
    if not task_type.strip():
        raise InvalidInput("the task type is empty", hint="give it a name, such as my_task", field="task_type")
    path = folder / f"{_file_stem(task_type)}_generator.py"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(_TEMPLATE.substitute(task_type=_quoted(task_type)))
    except FileExistsError:
        raise InvalidInput(
            f"{path} exists already", hint="edit it, or choose another task type or folder", field="task_type"
        ) from None
    return path


def _file_stem(task_type: str) -> str:
    stem = re.sub(r"[^a-z0-9]+", "_", task_type.lower()).strip("_") or "my_task"
    return f"task_{stem}" if stem[0].isdigit() else stem


def _quoted(text: str) -> str:
    """Return ``text`` as a Python literal, in double quotes if that needs no escapes."""
    return f'"{text}"' if text.isprintable() and not set(text) & set('"\\') else repr(text)
