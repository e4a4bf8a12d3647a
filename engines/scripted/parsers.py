"""The scripted engine's parsers: reasoning and calls of tools out of a text, as SGLang's routes answer them."""

import json
import re
from typing import Any

from forebay.engines.scripted.script import THINK, THOUGHT

REASONING_PARSER = "qwen3"
TOOL_CALL_PARSER = "qwen25"
"""SGLang's names for the forms in which the scripted engine thinks and calls."""

_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>\n?", re.DOTALL)


def parse_function_call(body: dict[str, Any]) -> dict[str, Any]:
    """``POST /parse_function_call``: the text without its calls, and the calls. What is no call stays text."""
    text = str(body.get("text") or "")
    found = [(match.group(0), call) for match in _CALL.finditer(text) if (call := _call(match.group(1))) is not None]
    for spelled, _ in found:
        text = text.replace(spelled, "", 1)
    calls = [
        {"tool_index": index, "name": call["name"], "parameters": json.dumps(call["arguments"])}
        for index, (_, call) in enumerate(found)
    ]
    return {"normal_text": text, "calls": calls}


def separate_reasoning(body: dict[str, Any]) -> dict[str, Any]:
    """``POST /separate_reasoning``: what was thought, and what was said."""
    text = str(body.get("text") or "")
    thought, mark, said = text.partition(THOUGHT.rstrip())
    if not thought.startswith(THINK):
        return {"reasoning_text": "", "text": text}
    return {"reasoning_text": thought.removeprefix(THINK), "text": said.lstrip() if mark else ""}


def _call(spelled: str) -> dict[str, Any] | None:
    try:
        call = json.loads(spelled)
    except json.JSONDecodeError:
        return None
    return call if isinstance(call, dict) and {"name", "arguments"} <= call.keys() else None


PARSERS = {"/parse_function_call": parse_function_call, "/separate_reasoning": separate_reasoning}
"""By the path that each answers."""
