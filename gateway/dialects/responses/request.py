"""Validate a Responses request. Unknown features are left out of the chat and noted.

Rejects what cannot be interpreted, such as a text for a number, and a prompt that is not in the request: the record
would contain another prompt than the agent meant.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError

from forebay.gateway.dialects.errors import ProtocolRefused
from forebay.gateway.dialects.history import Fields, first_problem, split_engine_fields
from forebay.gateway.dialects.responses.tools import Tool, known_choice, known_tools
from forebay.gateway.dialects.unknown import LenientModel, TextOr, UnknownFieldLog, UnknownPart, kind_of

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
"""Values of ``include`` that are supported."""
ELSEWHERE = {"conversation": "send the whole conversation as input", "prompt": "send its text as input"}
"""Fields that refer to a part of the prompt stored at OpenAI, with the remedy."""


class TextContent(LenientModel):
    """A text part of any author."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: object = None
    logprobs: object = None
    # OpenAI's client adds this to a text it parsed, and returns it in the next history.
    parsed: object = None


class RefusalContent(LenientModel):
    """A model's refusal to answer."""

    type: Literal["refusal"]
    refusal: str


class ImageContent(LenientModel):
    """An image by URL, or as a data URL."""

    type: Literal["input_image"]
    image_url: str
    detail: str | None = None


ContentPart = Annotated[
    Annotated[TextContent, Tag("~text")]
    | Annotated[RefusalContent, Tag("~refusal")]
    | Annotated[ImageContent, Tag("~image")]
    | Annotated[UnknownPart, Tag("~unknown")],
    Discriminator(lambda value: _PART_TAGS.get(kind_of(value), "~unknown")),
]
Content = TextOr[list[ContentPart]]
_PART_TAGS = {
    **dict.fromkeys(("input_text", "output_text", "text"), "~text"),
    "refusal": "~refusal",
    "input_image": "~image",
}


class Item(LenientModel):
    """Fields shared by all items. ``id`` and ``status`` do not reach the model."""

    id: str | None = None
    status: str | None = None


class MessageItem(Item):
    """A message of any role."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: str | None = None


class FunctionCall(Item):
    """A function call by the model."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    caller: object = None
    parsed_arguments: object = None


class CustomCall(Item):
    """A call with a text instead of arguments."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None
    caller: object = None


class CallOutput(Item):
    """The output of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content
    caller: object = None


class ReasoningText(LenientModel):
    """A part of reasoning."""

    type: Literal["summary_text", "reasoning_text"]
    text: str


class Reasoning(Item):
    """The model's reasoning, in one of three fields."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] = Field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


AnyItem = MessageItem | FunctionCall | CustomCall | CallOutput | Reasoning
ITEMS: dict[str, type[AnyItem]] = {
    "message": MessageItem,
    "function_call": FunctionCall,
    "custom_tool_call": CustomCall,
    "function_call_output": CallOutput,
    "custom_tool_call_output": CallOutput,
    "reasoning": Reasoning,
}


class ReasoningConfig(LenientModel):
    """How much the model is to reason, and whether the client wants a summary: the reasoning itself."""

    effort: str | None = "medium"
    summary: object = None
    generate_summary: object = None


class TextFormat(LenientModel):
    """Format: plain text, any JSON object, or JSON by a schema."""

    type: str
    name: str = "response"
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(LenientModel):
    """The format of the answer. The verbosity is not sent to the engine."""

    format: TextFormat | None = None
    verbosity: object = None


class ResponsesRequest(LenientModel):
    """A request for an answer."""

    model: str = "default"
    input: TextOr[list[dict[str, Any]]]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    stream: bool | None = False
    include: list[str] | None = None
    max_output_tokens: Annotated[int, Field(gt=0)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: TextOr[list[str]] | None = None
    top_logprobs: int | None = 0
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = "auto"
    parallel_tool_calls: bool | None = True
    user: str | None = None

    # No effect: these concern OpenAI's servers and are not sent to the engine.
    metadata: dict[str, Any] | None = None
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: object = None
    safety_identifier: str | None = None
    service_tier: str | None = "auto"
    stream_options: object = None
    truncation: str | None = "disabled"

    def includes(self, name: str) -> bool:
        """Whether the client requested this part of the answer."""
        return name in (self.include or [])

    @property
    def wants_summary(self) -> bool:
        """Whether the client also gets the reasoning as a summary."""
        return self.reasoning is not None and bool(self.reasoning.summary or self.reasoning.generate_summary)

    @property
    def input_items(self) -> list[Fields]:
        """The input as items."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input


def parsed(body: Fields, unknown: UnknownFieldLog) -> tuple[ResponsesRequest, Fields]:
    """Parse a request; also returns the engine's own fields. Raises ``ProtocolRefused``."""
    own, engine_fields = split_engine_fields(body)
    for name, remedy in ELSEWHERE.items():
        if own.pop(name, None) is not None:
            raise ProtocolRefused(f"{name}: the gateway cannot access stored prompts: {remedy}", param=name)
    _leave_out(own, unknown)
    try:
        request = ResponsesRequest.model_validate(own)
    except ValidationError as error:
        raise _refusal(error) from error
    unknown.note_fields(request)
    return request, engine_fields


def _leave_out(own: Fields, unknown: UnknownFieldLog) -> None:
    """Remove features that have no equivalent in a chat."""
    given = own.get("tools")
    own["tools"] = known_tools(given, unknown)
    own["tool_choice"] = known_choice(
        own.get("tool_choice"), has_tools=bool(own["tools"]), were_tools=bool(given), unknown=unknown
    )
    if own.pop("background", None):  # the gateway answers while the client waits
        unknown.left_out("background")
    include = own.get("include")
    if isinstance(include, list):
        known = (ENCRYPTED_REASONING,) if own.get("stream") else (ENCRYPTED_REASONING, LOGPROBS)
        own["include"] = [name for name in include if name in known]
        for name in include:
            if name not in known:
                unknown.left_out("include", str(name))


def parsed_items(items: list[Fields], unknown: UnknownFieldLog) -> list[AnyItem]:
    """Return the items of a conversation that a chat can contain. Raises ``ProtocolRefused``."""
    known = []
    for index, item in enumerate(items):
        kind = ITEMS.get(str(item.get("type") or "message"))
        if kind is None:
            unknown.left_out("input", str(item["type"]))
            continue
        try:
            parsed_item = kind.model_validate(item)
        except ValidationError as error:
            raise _refusal(error, "input", index) from error
        unknown.note_fields(parsed_item, "input")
        known.append(parsed_item)
    return known


def _refusal(error: ValidationError, *before: str | int) -> ProtocolRefused:
    place, message = first_problem(error)
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in [*before, *place]).lstrip(".")
    return ProtocolRefused(f"{param}: {message}" if param else message, param=param or None)
