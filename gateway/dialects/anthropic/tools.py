"""Anthropic's tools and tool choice as those of a chat."""

from forebay.gateway.dialects.anthropic.errors import MessagesRefused
from forebay.gateway.dialects.anthropic.request import CustomTool, Prompt, ToolChoice
from forebay.gateway.dialects.history import Fields


def tool_fields(prompt: Prompt) -> Fields:
    """The fields ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of the chat, as far as they are needed."""
    choice = prompt.tool_choice
    if not prompt.tools:
        if choice is not None and choice.type in ("any", "tool"):
            raise MessagesRefused(f"tool_choice: the type {choice.type!r} needs at least one tool")
        return {}
    fields: Fields = {"tools": [_tool(tool) for tool in prompt.tools]}
    if choice is None:
        return {**fields, "tool_choice": "auto"}
    return {**fields, **_choice(choice, prompt), "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _tool(tool: CustomTool) -> Fields:
    """The definition that SGLang's own route makes of it, to the word: it stands in the prompt."""
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema if "type" in tool.input_schema else {**tool.input_schema, "type": "object"},
        "strict": tool.strict,
    }
    deferred = {} if tool.defer_loading is None else {"defer_loading": tool.defer_loading}
    return {"type": "function", "function": function, **deferred}


def _choice(choice: ToolChoice, prompt: Prompt) -> Fields:
    if choice.type != "tool":
        return {"tool_choice": {"auto": "auto", "any": "required", "none": "none"}[choice.type]}
    if choice.name not in [tool.name for tool in prompt.tools]:
        raise MessagesRefused(f"tool_choice.name: {choice.name!r} is not among the tools")
    return {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
