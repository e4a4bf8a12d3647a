"""What a scripted engine answers to the agents of the examples: each gets its answer by way of its tools."""

import json
import re
from typing import Any

from forebay.engines.scripted import Reply, ScriptedCall

CHORE = "```sh\nseq 5 > numbers.txt; echo $((1+2+3+4+5)) > answer.txt; cat answer.txt\n```"
SORT = "```sh\nprintf 'pear\\napple\\nfig\\n' | sort | head -n 1 > answer.txt\n```"


def answer(call: ScriptedCall) -> Reply | str:
    """The next message of whichever agent asks."""
    tools = {tool["function"]["name"] for tool in call.body.get("tools") or ()}
    for name, script in SCRIPTS.items():
        if name in tools:
            return script(call)
    return _shell(call) if "Work in a shell" in _text(call.messages[0]) else "yes"


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _question(call: ScriptedCall) -> str:
    return next(_text(message) for message in call.messages if message["role"] == "user")


def _results(call: ScriptedCall) -> list[str]:
    return [_text(message) for message in call.messages if message["role"] == "tool"]


def _calls(call: ScriptedCall, name: str, *arguments: dict[str, Any]) -> Reply:
    told = [{"name": name, "arguments": json.dumps(each)} for each in arguments]
    calls = [{"id": f"call_{call.number}_{n}", "type": "function", "function": each} for n, each in enumerate(told)]
    return Reply(tool_calls=calls)


def _multiply(call: ScriptedCall) -> Reply | str:
    results = _results(call)
    a, b = map(int, re.findall(r"\d+", _question(call)))
    if not results:
        return _calls(call, "multiply", {"a": a, "b": b})
    if len(results) == 1:
        return _calls(call, "check", {"input": f"{a} * {b} = {results[0]}"})
    return f"It is {results[0]}; my colleague says {results[1]}."


def _look_up(call: ScriptedCall) -> Reply | str:
    country = _question(call).rpartition(" ")[2].rstrip("?")
    return f"It is {_results(call)[0]}." if _results(call) else _calls(call, "look_up", {"country": country})


def _count_letter(call: ScriptedCall) -> Reply:
    found = re.search(r"How many (\w) are there in (\w+)", json.dumps(call.messages))
    assert found is not None
    results = [_text(told) for told in call.messages[1:] if "Observation" in _text(told)]
    if results:
        return _calls(call, "final_answer", {"answer": results[-1].split()[-1]})
    return _calls(call, "count_letter", {"letter": found[1], "word": found[2]})


def _in_stock(call: ScriptedCall) -> Reply | str:
    results = _results(call)
    items = [item for item in ("apples", "pears") if item in _question(call)]
    return str(sum(map(int, results))) if results else _calls(call, "in_stock", *({"item": item} for item in items))


def _shell(call: ScriptedCall) -> str:
    if len(call.messages) > 2:
        return "Done."
    return CHORE if "numbers" in _question(call) else SORT


SCRIPTS = {"multiply": _multiply, "look_up": _look_up, "count_letter": _count_letter, "in_stock": _in_stock}
