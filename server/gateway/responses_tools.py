"""The tools of the Responses API as those of a chat. A custom tool becomes a function that takes one text."""

import json
from collections.abc import Collection

from forebay.server.gateway.protocol_chat import Fields, arguments_object, arguments_text
from forebay.server.gateway.responses_errors import ResponsesRefused
from forebay.server.gateway.responses_models import CustomTool, FunctionTool
from forebay.server.gateway.responses_request import ResponsesRequest

INPUT = "input"


def tool_fields(request: ResponsesRequest) -> Fields:
    """The fields ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of the chat, as far as they are needed."""
    choice = _choice(request.tool_choice or "auto", [tool.name for tool in request.tools])
    if not request.tools:
        return {}
    parallel = request.parallel_tool_calls is not False
    return {"tools": [_tool(tool) for tool in request.tools], "tool_choice": choice, "parallel_tool_calls": parallel}


def custom_names(request: ResponsesRequest) -> frozenset[str]:
    """The names of the custom tools."""
    return frozenset(tool.name for tool in request.tools if isinstance(tool, CustomTool))


def custom_arguments(text: str) -> str:
    """The arguments of the function that stands for a custom tool."""
    return arguments_text({INPUT: text})


def custom_input(arguments: str) -> str:
    """The text in such arguments; all of them where the model did not keep to the form."""
    given = arguments_object(arguments) or {}
    return given[INPUT] if isinstance(given.get(INPUT), str) else arguments


def _tool(tool: FunctionTool | CustomTool) -> Fields:
    """The definition that SGLang's own route makes of it, to the word: it stands in the prompt."""
    function = {
        "name": tool.name,
        "description": _custom_description(tool) if isinstance(tool, CustomTool) else tool.description,
        "parameters": CUSTOM_PARAMETERS if isinstance(tool, CustomTool) else tool.parameters,
        "strict": isinstance(tool, FunctionTool) and tool.strict is True,
    }
    return {"type": "function", "function": function}


CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": [INPUT],
    "additionalProperties": False,
}


def _custom_description(tool: CustomTool) -> str | None:
    """A grammar is told to the model; nothing enforces it."""
    parts = [tool.description] if tool.description else []
    if tool.format and tool.format.get("type") == "grammar":
        syntax, definition = tool.format.get("syntax") or "lark", tool.format.get("definition") or ""
        parts.append(f"The payload must conform to this {syntax} grammar:\n{definition}")
    return "\n\n".join(parts) or None


def _choice(choice: str | Fields, names: Collection[str]) -> str | Fields:
    if isinstance(choice, str):
        if choice == "required" and not names:
            raise ResponsesRefused('tool_choice="required" requires at least one tool', param="tool_choice")
        return choice
    if choice.get("type") not in ("function", "custom") or not choice.get("name"):
        raise ResponsesRefused(f"the engine cannot force this choice: {json.dumps(choice)}", param="tool_choice")
    if choice["name"] not in names:
        raise ResponsesRefused(f"Tool {choice['name']!r} is not declared in tools", param="tool_choice")
    return {"type": "function", "function": {"name": choice["name"]}}
