"""Function calls: Python functions offered to a model as tools, its calls answered, and two tools to begin with."""

import asyncio
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

import msgspec

from forebay.generators.arithmetic import evaluate
from forebay.generators.failures import EnvironmentFailed
from forebay.generators.sandbox import Limits, Sandbox

Message = dict[str, Any]

PYTHON_LIMITS = Limits(wall_s=10, cpu_s=10, memory_bytes=512 << 20, file_bytes=16 << 20, output_bytes=8_192)


class ToolError(Exception):
    """A tool could not do what it was asked: the model is told, and may try something else."""


class Tool:
    """A function as a tool: its name, its docstring and its annotated arguments are what the model is told of it.

    The function, ``async`` or not, returns a text or another JSON value. It raises ``ToolError`` for what the model did
    wrong; anything else that it raises ends the rollout as an environment failure.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__
        self._function = function
        self._arguments = _arguments(function)
        (_, schemas) = msgspec.json.schema_components([self._arguments])
        parameters = {name: told for name, told in schemas.pop(self.name).items() if name != "title"}
        self.definition: dict[str, Any] = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": inspect.getdoc(function) or "",
                "parameters": {**parameters, "$defs": schemas} if schemas else parameters,
            },
        }

    async def __call__(self, arguments: str) -> str:
        """What the function answers to ``arguments``, a JSON object. Raises ``ToolError``."""
        try:
            given = msgspec.json.decode(arguments or "{}", type=self._arguments)
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            raise ToolError(f"the arguments of {self.name} cannot be used: {error}") from None
        answer = self._function(**{name: getattr(given, name) for name in given.__struct_fields__})
        answer = await answer if inspect.isawaitable(answer) else answer
        return answer if isinstance(answer, str) else msgspec.json.encode(answer).decode()


def _arguments(function: Callable[..., Any]) -> type[msgspec.Struct]:
    """A type that checks the arguments of a call."""
    hints = get_type_hints(function)
    fields = [
        (name, hints.get(name, Any)) if each.default is each.empty else (name, hints.get(name, Any), each.default)
        for name, each in inspect.signature(function).parameters.items()
    ]
    return msgspec.defstruct(function.__name__, fields, forbid_unknown_fields=True, kw_only=True)


class ToolBox:
    """The tools that a rollout offers. ``definitions`` go into each call of the engine."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self._tools = {tool.name: tool for tool in map(Tool, functions)}
        self.definitions = [tool.definition for tool in self._tools.values()]

    async def answer(self, calls: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Run the ``tool_calls`` of an assistant message side by side: a tool message for each, in their order."""
        try:
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(self._answer(call.get("function") or {})) for call in calls]
        except BaseExceptionGroup as failures:  # the first one ended the others: nobody waits for them
            raise failures.exceptions[0] from None
        named = zip(calls, asked, strict=True)
        return [{"role": "tool", "tool_call_id": call.get("id"), "content": task.result()} for call, task in named]

    async def _answer(self, call: Mapping[str, Any]) -> str:
        name, arguments = str(call.get("name")), call.get("arguments")
        try:
            if name not in self._tools:
                raise ToolError(f"there is no tool {name!r}; there are: {', '.join(self._tools)}")
            return await self._tools[name](str(arguments or ""))
        except ToolError as error:
            return f"error: {error}"
        except Exception as error:  # a tool is the user's code: whatever it raises is the environment's failure
            raise EnvironmentFailed(f"the tool {name} raised {error!r}") from error


def calculator(expression: str) -> str:
    """Work out an arithmetic expression, such as (3 + 4) * 12 / 5 or 2 ** 10."""
    try:
        return evaluate(expression)
    except ValueError as error:
        raise ToolError(str(error)) from None


def python_in(sandbox: Sandbox, limits: Limits = PYTHON_LIMITS) -> Callable[..., Any]:
    """A tool that runs Python code in ``sandbox``, each call in a process of its own over the same folder."""

    async def python(code: str) -> str:
        """Run a Python program and read what it prints. Files that it writes are there for the next one."""
        finished = await sandbox.run([sys.executable, "-I", "-"], stdin=code.encode("utf-8", "replace"), limits=limits)
        if finished.is_timed_out:
            return f"{finished.stdout}\nerror: killed after {limits.wall_s:g} s"
        failed = f"\nerror: ended with status {finished.exit_status}" if finished.exit_status else ""
        return finished.stdout + finished.stderr + failed

    return python
