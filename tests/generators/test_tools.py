"""Tools: functions described to a model, its calls answered, and what it did wrong told to it."""

import asyncio
import json

import pytest

from forebay.generators.failures import EnvironmentFailed
from forebay.generators.sandbox import Limits, Sandbox
from forebay.generators.tools import Tool, ToolBox, ToolError, calculator, evaluate, python_in


def call(name: str, arguments: object, call_id: str = "call_1") -> dict[str, object]:
    told = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": told}}


async def answer(name: str, arguments: object, *functions) -> str:
    (message,) = await ToolBox(functions or [calculator]).answer([call(name, arguments)])
    return message["content"]


def weather(city: str, days: int = 1) -> dict[str, object]:
    """The weather to come."""
    return {"city": city, "days": days}


def test_a_function_is_described_by_its_signature() -> None:
    assert Tool(weather).definition == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather to come.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }


async def test_arguments_that_are_left_out_have_their_default() -> None:
    assert await answer("weather", {"city": "Wien"}, weather) == '{"city":"Wien","days":1}'


async def test_a_tool_that_breaks_ends_the_others() -> None:
    ended: list[str] = []

    async def hang() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("hang")
        raise AssertionError("never set")

    async def broken() -> str:
        raise ValueError("no such host")

    with pytest.raises(EnvironmentFailed, match="no such host"):
        await ToolBox([hang, broken]).answer([call("hang", {}), call("broken", {})])
    assert ended == ["hang"]


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        (
            "calculator",
            '{"expression": "1+',
            "error: the arguments of calculator cannot be used: Input",
        ),
        ("calculator", "[]", "Expected `object`, got `array`"),
        ("calculator", "", "missing required field `expression`"),
        ("calculator", {"expression": 3}, "Expected `str`, got `int`"),
        ("calculator", {"expression": "1", "digits": 2}, "unknown field `digits`"),
        ("calculator", "[" * 100_000, "cannot be used"),
        ("browser", {}, "error: there is no tool 'browser'; there are: calculator"),
        ("calculator", {"expression": "1/0"}, "error: '1/0' has no value: division by zero"),
    ],
)
async def test_what_the_model_did_wrong_is_told_to_it(name, arguments, told) -> None:
    assert told in await answer(name, arguments)


async def test_parallel_calls_run_side_by_side_and_are_answered_in_order() -> None:
    both = asyncio.Barrier(2)

    async def meet(name: str) -> str:
        await both.wait()
        return name

    calls = [call("meet", {"name": "a"}, "call_1"), call("meet", {"name": "b"}, "call_2")]
    async with asyncio.timeout(30):
        messages = await ToolBox([meet]).answer(calls)
    assert messages == [
        {"role": "tool", "tool_call_id": "call_1", "content": "a"},
        {"role": "tool", "tool_call_id": "call_2", "content": "b"},
    ]


async def test_a_tool_that_breaks_is_no_fault_of_the_model() -> None:
    def broken() -> str:
        raise OSError("disk on fire")

    with pytest.raises(EnvironmentFailed, match="the tool broken raised OSError"):
        await answer("broken", {}, broken)


async def test_a_tool_may_refuse() -> None:
    def refusing() -> str:
        raise ToolError("not today")

    assert await answer("refusing", {}, refusing) == "error: not today"


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("-(7 - 10) ** 2", "-9"),
        ("7 // 2 + 7 % 2 + 1 / 4", "4.25"),
        ("2 ** 100", str(2**100)),
        ("2 ** -1", "0.5"),
        ("round(2.567, 1)", "2.6"),
        ("round(sqrt(2) * pi, 3)", "4.443"),
        ("max(1, min(5, 3))", "3"),
        (" 1\n", "1"),
    ],
)
def test_arithmetic(expression, value) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "2 +",
        "9 ** 9 ** 9",
        "2 ** 100000",
        "round(1, -1000000000)",
        "1e308 * 10",
        "1e999",
        "(-8) ** 0.5",
        "0 ** -1",
        "10 ** 400 / 3 ** 1",
        "sqrt(-1)",
        "round(1, ndigits=2)",
        "__import__('os')",
        "'a' * 1000000",
        "(1).real",
        "True + 1",
        "[1] * 3",
        "1 if 2 else 3",
        "1" * 600,
        "(" * 240 + "1" + ")" * 240,
        "round(2, 3, 4)",
        "1 << 3",
    ],
)
def test_anything_else_is_refused(expression) -> None:
    with pytest.raises(ValueError, match=r"."):
        evaluate(expression)


async def test_python_prints_and_keeps_its_files() -> None:
    async with Sandbox() as sandbox:
        python = python_in(sandbox)
        await answer("python", {"code": "open('x', 'w').write('7')"}, python)
        assert await answer("python", {"code": "print(6 * int(open('x').read()))"}, python) == "42\n"


async def test_python_shows_its_errors() -> None:
    async with Sandbox() as sandbox:
        told = await answer("python", {"code": "print(1)\n1/0"}, python_in(sandbox))
    assert told.startswith("1\n")
    assert "ZeroDivisionError" in told
    assert told.endswith("error: ended with status 1")


async def test_python_is_limited() -> None:
    async with Sandbox() as sandbox:
        python = python_in(sandbox, Limits(wall_s=0.3, memory_bytes=512 << 20))
        assert await answer("python", {"code": "while True: pass"}, python) == "\nerror: killed after 0.3 s"
