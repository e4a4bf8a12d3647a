"""A Responses request, checked: its input items and its tools. Fields that these models do not know are refused."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from forebay.gateway.dialects.errors import ResponsesRefused
from forebay.gateway.dialects.history import Fields, first_problem, split_engine_fields

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
"""What a client can ``include``."""


class ResponsesModel(BaseModel):
    """Refuses fields that it does not know, as OpenAI's API does."""

    model_config = ConfigDict(extra="forbid")


class TextContent(ResponsesModel):
    """Text, whoever wrote it."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: object = None
    logprobs: object = None
    # OpenAI's client adds this to a text that it has parsed, and sends it back in the next history.
    parsed: object = None


class RefusalContent(ResponsesModel):
    """What a model said in place of an answer."""

    type: Literal["refusal"]
    refusal: str


class ImageContent(ResponsesModel):
    """An image by its address, or in it."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["low", "high", "auto", "original"] | None = None
    file_id: None = None


def text_or_list(value: object) -> str:
    """The tag of a content: a text, or a list."""
    return "~text" if isinstance(value, str) else "~list"


ListT = TypeVar("ListT")
TextOr = Annotated[Annotated[str, Tag("~text")] | Annotated[ListT, Tag("~list")], Discriminator(text_or_list)]
ContentPart = Annotated[
    Annotated[TextContent, Tag("~text")]
    | Annotated[RefusalContent, Tag("~refusal")]
    | Annotated[ImageContent, Tag("~image")],
    Discriminator(lambda value: _PART_TAGS.get(_kind(value), "~text")),
]
Content = TextOr[list[ContentPart]]
_PART_TAGS = {"refusal": "~refusal", "input_image": "~image"}


class Item(ResponsesModel):
    """What items have in common. ``id`` and ``status`` say nothing to a model."""

    id: str | None = None
    status: str | None = None


class MessageItem(Item):
    """A message of anyone."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: str | None = None


class FunctionCall(Item):
    """A call by the model."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: None = None
    caller: object = None
    parsed_arguments: object = None


class CustomCall(Item):
    """A call with a text in place of arguments."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: None = None
    caller: object = None


class CallOutput(Item):
    """What a call gave."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content
    caller: object = None


class ReasoningText(ResponsesModel):
    """A piece of reasoning."""

    type: Literal["summary_text", "reasoning_text"]
    text: str


class Reasoning(Item):
    """The model's reasoning, in one of three places."""

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


def _kind(value: object) -> str:
    return str(value.get("type")) if isinstance(value, dict) else str(getattr(value, "type", None))


class FunctionTool(ResponsesModel):
    """A function of the client."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None


class CustomTool(ResponsesModel):
    """A tool of the client that takes a text."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


Tool = Annotated[
    Annotated[FunctionTool, Tag("~function")] | Annotated[CustomTool, Tag("~custom")],
    Discriminator(lambda value: "~custom" if _kind(value) == "custom" else "~function"),
]
ToolChoice = Annotated[
    Annotated[Literal["auto", "required", "none"], Tag("~text")] | Annotated[dict[str, Any], Tag("~list")],
    Discriminator(text_or_list),
]


class ReasoningConfig(ResponsesModel):
    """How the model is to reason, and whether the client wants a summary: the reasoning itself."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"] | None = "medium"
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(ResponsesModel):
    """Plain text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = "response"
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(ResponsesModel):
    """The format of the answer. The verbosity reaches no engine."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(ResponsesModel):
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
    tool_choice: ToolChoice | None = "auto"
    parallel_tool_calls: bool | None = True
    user: str | None = None

    # Without effect: what a server of OpenAI's would do with them reaches no engine.
    background: Literal[False] | None = False
    conversation: None = None
    prompt: None = None
    metadata: dict[str, str] | None = None
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = "auto"
    stream_options: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = "disabled"

    def includes(self, name: str) -> bool:
        """Whether the client asked for this part of the answer."""
        return name in (self.include or [])

    @property
    def wants_summary(self) -> bool:
        """Whether the client gets the reasoning as a summary too."""
        return self.reasoning is not None and bool(self.reasoning.summary or self.reasoning.generate_summary)

    @property
    def input_items(self) -> list[Fields]:
        """The input as items."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input


def parsed(body: object) -> tuple[ResponsesRequest, Fields]:
    """The request, and the fields that are for the engine. Raises ``ResponsesRefused``."""
    if not isinstance(body, Mapping):
        raise ResponsesRefused("the body is no JSON object")
    own, engine_fields = split_engine_fields(body)
    # Before the models: they would only say that a field of such a tool is missing.
    _refuse_hosted_tools(own.get("tools"))
    try:
        request = ResponsesRequest.model_validate(own)
    except ValidationError as error:
        raise _refusal(error) from error
    if request.stream and request.includes(LOGPROBS):
        raise ResponsesRefused("logprobs are not supported in streaming mode", param="logprobs")
    return request, engine_fields


def parsed_items(items: list[Fields]) -> list[AnyItem]:
    """The items of a conversation. Raises ``ResponsesRefused``."""
    return [_parsed_item(index, item) for index, item in enumerate(items)]


def _parsed_item(index: int, item: Fields) -> AnyItem:
    kind = ITEMS.get(item.get("type") or "message")
    if kind is None:
        message = f"Unsupported Responses API input item type: {item.get('type')!r}"
        raise ResponsesRefused(message, param=f"input[{index}].type")
    try:
        return kind.model_validate(item)
    except ValidationError as error:
        raise _refusal(error, "input", index) from error


def _refusal(error: ValidationError, *before: str | int) -> ResponsesRefused:
    place, message = first_problem(error)
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in [*before, *place]).lstrip(".")
    return ResponsesRefused(f"{param}: {message}" if param else message, param=param or None)


def _refuse_hosted_tools(tools: object) -> None:
    for index, tool in enumerate(tools if isinstance(tools, list) else []):
        kind = tool.get("type") if isinstance(tool, Mapping) else "function"
        if kind not in ("function", "custom"):
            raise ResponsesRefused(
                f"tools[{index}]: the engine behind this address has no tools of its own, such as {kind!r}: "
                "declare one of the type function or custom and run it in the client",
                param=f"tools[{index}].type",
            )
