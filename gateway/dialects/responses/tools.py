"""The tools of a Responses request, mapped to functions of a chat.

A custom tool becomes a function that takes one text. A function of a namespace becomes ``namespace__function``, the
name that SGLang's own route also uses where possible. Calls of it are returned under the namespace, and the next
history contains them so; the model always reads the name that it sampled.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from forebay.gateway.dialects.errors import ProtocolRefused
from forebay.gateway.dialects.history import Fields, arguments_object, arguments_text
from forebay.gateway.dialects.unknown import LenientModel, UnknownFieldLog, kind_of

INPUT = "input"
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": [INPUT],
    "additionalProperties": False,
}
MEMBER_KINDS = ("function", "custom")
KINDS = (*MEMBER_KINDS, "namespace")
CHOICES = ("auto", "required", "none")


class FunctionTool(LenientModel):
    """A function tool of the client."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None


class CustomTool(LenientModel):
    """A tool of the client whose input is a text."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


MemberTool = Annotated[
    Annotated[FunctionTool, Tag("~function")] | Annotated[CustomTool, Tag("~custom")],
    Discriminator(lambda value: "~custom" if kind_of(value) == "custom" else "~function"),
]


class NamespaceTool(LenientModel):
    """A group of tools under a common name."""

    type: Literal["namespace"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    tools: list[MemberTool]


Tool = Annotated[
    Annotated[FunctionTool, Tag("~function")]
    | Annotated[CustomTool, Tag("~custom")]
    | Annotated[NamespaceTool, Tag("~namespace")],
    Discriminator(lambda value: {"custom": "~custom", "namespace": "~namespace"}.get(kind_of(value), "~function")),
]


@dataclass(frozen=True, slots=True)
class FlatTool:
    """A tool as offered to the model, under one flat name."""

    flat_name: str
    tool: FunctionTool | CustomTool
    namespace: NamespaceTool | None = None

    @property
    def is_custom(self) -> bool:
        """Whether its input is a text."""
        return isinstance(self.tool, CustomTool)

    @property
    def name_fields(self) -> Fields:
        """Return the name fields of a call to it."""
        own: Fields = {"name": self.tool.name}
        return own if self.namespace is None else {**own, "namespace": self.namespace.name}

    @property
    def definition(self) -> Fields:
        """Return the definition for the prompt, identical to that of SGLang's own Responses route."""
        tool = self.tool
        function = {
            "name": self.flat_name,
            "description": self._description,
            "parameters": CUSTOM_PARAMETERS if isinstance(tool, CustomTool) else tool.parameters,
            "strict": isinstance(tool, FunctionTool) and tool.strict is True,
        }
        return {"type": "function", "function": function}

    @property
    def _description(self) -> str | None:
        tool, namespace = self.tool, self.namespace
        own = _custom_description(tool) if isinstance(tool, CustomTool) else tool.description
        if namespace is None or not namespace.description:
            return own
        return f"Namespace {namespace.name}: {namespace.description}\n\n{own or ''}"


def _custom_description(tool: CustomTool) -> str | None:
    parts = [tool.description] if tool.description else []
    if tool.format and tool.format.get("type") == "grammar":
        # The grammar is only described to the model, not enforced.
        syntax, definition = tool.format.get("syntax") or "lark", tool.format.get("definition") or ""
        parts.append(f"The payload must conform to this {syntax} grammar:\n{definition}")
    return "\n\n".join(parts) or None


class OfferedTools:
    """All tools of a request. A namespace's function is left out if another tool has its flat name."""

    def __init__(self, tools: Sequence[FunctionTool | CustomTool | NamespaceTool]) -> None:
        plain = {tool.name for tool in tools if not isinstance(tool, NamespaceTool)}
        self.all: list[FlatTool] = []
        self.num_left_out = 0
        for tool in tools:
            if not isinstance(tool, NamespaceTool):
                self.all.append(FlatTool(tool.name, tool))
                continue
            for member in tool.tools:
                offered = FlatTool(flat_name(tool.name, member.name), member, tool)
                if offered.flat_name not in plain and self.get(offered.flat_name) is None:
                    self.all.append(offered)
                else:
                    self.num_left_out += 1

    def get(self, name: str) -> FlatTool | None:
        """Return the tool that a call of the model names, or None."""
        return next((offered for offered in self.all if offered.flat_name == name), None)

    def name_fields(self, name: str) -> Fields:
        """Return the client's name fields for a call of the model; the model's own name for an unknown tool."""
        offered = self.get(name)
        return offered.name_fields if offered is not None else {"name": name}

    def is_custom(self, name: str) -> bool:
        """Whether the model's call is returned with a text."""
        offered = self.get(name)
        return offered is not None and offered.is_custom


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model knows a tool."""
    return f"{namespace}__{name}" if namespace else name


def known_tools(tools: object, unknown: UnknownFieldLog) -> object:
    """Return the tools that can be offered, unchanged."""
    kept = unknown.known_tools(tools if tools is not None else [], KINDS)
    if not isinstance(kept, list):
        return kept
    return [
        {**tool, "tools": unknown.known_tools(tool.get("tools"), MEMBER_KINDS)}
        if kind_of(tool) == "namespace"
        else tool
        for tool in kept
    ]


def known_choice(choice: object, *, has_tools: bool, were_tools: bool, unknown: UnknownFieldLog) -> object:
    """Return a choice that an engine can enforce. Unsupported choices become ``auto`` or ``required``."""
    known = choice
    if isinstance(choice, Mapping) and (choice.get("type") not in MEMBER_KINDS or not choice.get("name")):
        known = "required" if choice.get("type") == "allowed_tools" and choice.get("mode") == "required" else "auto"
    elif isinstance(choice, str) and choice not in CHOICES:
        known = "auto"
    if known not in (None, "auto", "none") and were_tools and not has_tools:
        known = "auto"  # all tools that it refers to were left out
    if known != choice:
        unknown.left_out("tool_choice")
    return known


def chat_choice(choice: str | Fields, tools: OfferedTools) -> str | Fields:
    """Return ``tool_choice`` of the chat. Raises ``ProtocolRefused`` for an undeclared tool."""
    if isinstance(choice, str):
        if choice == "required" and not tools.all:
            raise ProtocolRefused('tool_choice="required" requires at least one tool', param="tool_choice")
        return choice
    offered = tools.get(flat_name(choice.get("namespace"), choice["name"]))
    if offered is None:
        name = json.dumps(choice["name"])
        raise ProtocolRefused(f"Tool {name} is not declared in tools", param="tool_choice")
    return {"type": "function", "function": {"name": offered.flat_name}}


def custom_arguments(text: str) -> str:
    """Return the function arguments of a custom tool's input."""
    return arguments_text({INPUT: text})


def custom_input(arguments: str) -> str:
    """Return the custom tool's input from function arguments; all of them if the model used another format."""
    given = arguments_object(arguments) or {}
    return given[INPUT] if isinstance(given.get(INPUT), str) else arguments
