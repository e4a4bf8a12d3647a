"""Function calls: offers Python functions to a model as tools, answers its calls, and includes two tools.

The code from ``evaluate`` on computes arithmetic written by a model: only numbers and operators, with limited cost.
"""

import ast
import asyncio
import inspect
import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

import msgspec

from forebay.generators.failures import EnvironmentFailed
from forebay.generators.sandbox import Limits, Sandbox
from forebay.telemetry.tracing.tracer import span

PYTHON_LIMITS = Limits(wall_s=10, cpu_s=10, memory_bytes=512 << 20, file_bytes=16 << 20, output_bytes=8_192)
MAX_LENGTH = 500
MAX_BITS = 8_192
"""Largest whole number, also for intermediate results: a power of a power would use all memory."""
MAX_DIGITS = 400
"""Maximum digits for rounding, which computes a power of ten."""
Message = dict[str, Any]
Number = int | float


class ToolError(Exception):
    """Raised by a tool that cannot do what was requested. The model gets the message and may try something else."""


class Tool:
    """A function as a tool. The model sees its name, its docstring and its annotated arguments.

    The function, ``async`` or not, returns a text or another JSON value. It raises ``ToolError`` for mistakes of the
    model; any other error ends the rollout as an environment failure.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__
        self._function = function
        self._arguments = _arguments(function)
        (_, schemas) = msgspec.json.schema_components([self._arguments])
        parameters = {name: schema for name, schema in schemas.pop(self.name).items() if name != "title"}
        self.definition: dict[str, Any] = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": inspect.getdoc(function) or "",
                "parameters": {**parameters, "$defs": schemas} if schemas else parameters,
            },
        }

    async def __call__(self, arguments: str) -> str:
        """Call the function with ``arguments``, a JSON object, and return its answer as text. Raises ``ToolError``."""
        try:
            given = msgspec.json.decode(arguments or "{}", type=self._arguments)
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            raise ToolError(f"the arguments of {self.name} cannot be used: {error}") from None
        answer = self._function(**{name: getattr(given, name) for name in given.__struct_fields__})
        # Tests the answer, not the function, because a partial or a lambda may return a coroutine too.
        answer = await answer if inspect.isawaitable(answer) else answer
        return answer if isinstance(answer, str) else msgspec.json.encode(answer).decode()


def _arguments(function: Callable[..., Any]) -> type[msgspec.Struct]:
    """Return a type that checks the arguments of a call."""
    hints = get_type_hints(function)
    fields = [
        (name, hints.get(name, Any)) if each.default is each.empty else (name, hints.get(name, Any), each.default)
        for name, each in inspect.signature(function).parameters.items()
    ]
    # Unknown arguments are rejected, because the model can correct them.
    return msgspec.defstruct(function.__name__, fields, forbid_unknown_fields=True, kw_only=True)


class ToolBox:
    """The tools of a rollout. Pass ``definitions`` with each call of the engine."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self._tools = {tool.name: tool for tool in map(Tool, functions)}
        self.definitions = [tool.definition for tool in self._tools.values()]

    async def answer(self, calls: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Run the ``tool_calls`` of an assistant message concurrently. Returns one tool message per call, in order."""
        try:
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(self._answer(call.get("function") or {})) for call in calls]
        except BaseExceptionGroup as failures:  # the first failure cancelled the other calls
            raise failures.exceptions[0] from None
        named = zip(calls, asked, strict=True)
        return [{"role": "tool", "tool_call_id": call.get("id"), "content": task.result()} for call, task in named]

    async def _answer(self, call: Mapping[str, Any]) -> str:
        name, arguments = str(call.get("name")), call.get("arguments")
        try:
            if name not in self._tools:
                raise ToolError(f"there is no tool {name!r}; there are: {', '.join(self._tools)}")
            with span("tool", tool=name):
                return await self._tools[name](str(arguments or ""))
        except ToolError as error:
            return f"error: {error}"
        except Exception as error:  # any error in a tool's own code is an environment failure
            raise EnvironmentFailed(f"the tool {name} raised {error!r}") from error


def calculator(expression: str) -> str:
    """Work out an arithmetic expression, such as (3 + 4) * 12 / 5 or 2 ** 10."""
    try:
        return evaluate(expression)
    except ValueError as error:
        raise ToolError(str(error)) from None


def python_in(sandbox: Sandbox, limits: Limits = PYTHON_LIMITS) -> Callable[..., Any]:
    """Return a tool that runs Python code in ``sandbox``, each call in a new process in the same folder."""

    async def python(code: str) -> str:
        """Run a Python program and read what it prints. Files that it writes are there for the next one."""
        finished = await sandbox.run([sys.executable, "-I", "-"], stdin=code.encode("utf-8", "replace"), limits=limits)
        if finished.is_timed_out:
            return f"{finished.stdout}\nerror: killed after {limits.wall_s:g} s"
        failed = f"\nerror: ended with status {finished.exit_status}" if finished.exit_status else ""
        return finished.stdout + finished.stderr + failed

    return python


def evaluate(expression: str) -> str:
    """Return the value of ``expression`` as text. Raises ``ValueError`` with a message for the model."""
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression is longer than {MAX_LENGTH} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"not an arithmetic expression: {expression!r}") from None
    except (ArithmeticError, TypeError) as error:
        raise ValueError(f"{expression!r} has no value: {error}") from None
    return str(value)


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _checked(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.BinOp(left, operation, right) if type(operation) in _BINARY:
            return _binary(operation, _value(left), _value(right))
        case ast.UnaryOp(operation, operand) if type(operation) in _UNARY:
            return _checked(_UNARY[type(operation)](_value(operand)))
        case ast.Call(ast.Name(id=name), arguments, []) if name in _FUNCTIONS:
            return _checked(_FUNCTIONS[name](*map(_value, arguments)))
    raise ValueError(f"only numbers, + - * / // % **, brackets and {', '.join([*_FUNCTIONS, *_CONSTANTS])} can be used")


def _binary(operation: ast.operator, left: Number, right: Number) -> Number:
    is_power = isinstance(operation, ast.Pow) and isinstance(left, int) and isinstance(right, int)
    # Checked before computing: a power of a power would use all memory.
    if is_power and right > 0 and int(left).bit_length() * right > MAX_BITS:
        raise ValueError("the power is too large")
    return _checked(_BINARY[type(operation)](left, right))


def _checked(value: Any) -> Number:
    if not isinstance(value, int | float) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError("the value is not a finite real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError("the value is too large")
    return value


def _round(number: Number, num_digits: int | None = None) -> Number:
    if num_digits is not None and abs(num_digits) > MAX_DIGITS:
        raise ValueError(f"a number can be rounded to {MAX_DIGITS} digits, no more")
    return round(number, num_digits)


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{function.__name__: function for function in (abs, max, min)},
    "round": _round,
    **{name: getattr(math, name) for name in ("ceil", "cos", "exp", "floor", "log", "sin", "sqrt", "tan")},
}
_CONSTANTS = {"pi": math.pi, "e": math.e}
