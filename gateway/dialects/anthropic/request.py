"""A Messages request, checked: its content blocks and its tools. Fields that these models do not know are refused."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from forebay.gateway.dialects.errors import MessagesRefused
from forebay.gateway.dialects.history import Fields, first_problem, split_engine_fields

NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Tells the official client's tool runner to ask again with the whole conversation."""


class MessagesModel(BaseModel):
    """Refuses fields that it does not know, as Anthropic's API does. ``cache_control`` has no meaning here."""

    model_config = ConfigDict(extra="forbid")
    cache_control: object = None


class TextBlock(MessagesModel):
    """Text."""

    type: Literal["text"]
    text: str
    citations: object = None
    # Anthropic's client adds this to a text that it has parsed, and sends it back in the next history.
    parsed_output: object = None


class ImageBlock(MessagesModel):
    """An image: base64 or the address of one."""

    type: Literal["image"]
    source: dict[str, Any]


class ToolUseBlock(MessagesModel):
    """A call by the model."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: object = None
    toolset_name: None = None


class SearchResultBlock(MessagesModel):
    """A passage that a search found."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]
    citations: object = None


class ToolReferenceBlock(MessagesModel):
    """SGLang's own: names a tool whose definition was deferred."""

    type: Literal["tool_reference"]
    tool_name: str


ResultBlock = Annotated[TextBlock | ImageBlock | SearchResultBlock | ToolReferenceBlock, Field(discriminator="type")]


def text_or_list(value: object) -> str:
    """The tag of a content: a text, or a list."""
    return "~text" if isinstance(value, str) else "~list"


class ToolResultBlock(MessagesModel):
    """What a call gave. ``is_error`` reaches no chat template."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        Annotated[str, Tag("~text")] | Annotated[list[ResultBlock], Tag("~list")], Discriminator(text_or_list)
    ] = ""
    is_error: bool | None = None
    toolset_name: None = None


class ThinkingBlock(MessagesModel):
    """The model's reasoning. Nobody checks the signature."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


Block = Annotated[
    TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | SearchResultBlock | ThinkingBlock,
    Field(discriminator="type"),
]
Content = Annotated[Annotated[str, Tag("~text")] | Annotated[list[Block], Tag("~list")], Discriminator(text_or_list)]
SystemContent = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[TextBlock], Tag("~list")], Discriminator(text_or_list)
]


class MessagesTool(MessagesModel):
    """A tool of the client. ``eager_input_streaming`` and ``input_examples`` reach no engine."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = None


class InputMessage(MessagesModel):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Content


class ToolChoice(MessagesModel):
    """Which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.type == "tool" and not self.name:
            raise ValueError("name: Field required")
        return self


class Thinking(MessagesModel):
    """Whether the model is to reason first. The budget cannot be enforced and is not."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1024)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.type == "enabled" and self.budget_tokens is None:
            raise ValueError("budget_tokens is required when the type is 'enabled'")
        if self.type != "enabled" and self.budget_tokens is not None:
            raise ValueError(f"budget_tokens is not allowed when the type is '{self.type}'")
        return self


class OutputFormat(MessagesModel):
    """The JSON schema that the answer follows."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(MessagesModel):
    """Effort and format of the answer. A task budget is a hint that reaches no engine."""

    effort: Literal["minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: dict[str, Any] | None = None


class MessagesPrompt(MessagesModel):
    """What a count of tokens and an answer have in common."""

    model: Annotated[str, Field(min_length=1)]
    messages: list[InputMessage]
    system: SystemContent | None = None
    thinking: Thinking | None = None
    tool_choice: ToolChoice | None = None
    tools: list[MessagesTool] = Field(default_factory=list)
    output_config: OutputConfig | None = None
    betas: list[str] | None = None
    context_management: dict[str, Any] | None = None


class MessagesRequest(MessagesPrompt):
    """A request for an answer. ``metadata``, ``service_tier`` and ``betas`` have no effect."""

    max_tokens: Annotated[int, Field(gt=0)]
    stream: bool | None = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


PromptT = TypeVar("PromptT", bound=MessagesPrompt)


def parsed(kind: type[PromptT], body: object) -> tuple[PromptT, Fields]:
    """A request for an answer, or for a count, and the fields that are for the engine. Raises ``MessagesRefused``."""
    if not isinstance(body, Mapping):
        raise MessagesRefused("the body is no JSON object")
    own, engine_fields = split_engine_fields(body)
    # Before the models: they would only say that a field of such a tool is missing.
    _refuse_server_tools(own.get("tools"))
    if own.pop("thread", None) is not None:
        raise MessagesRefused("thread: send the whole conversation, without this field", details=NO_THREADS)
    try:
        return kind.model_validate(own), engine_fields
    except ValidationError as error:
        place, message = first_problem(error)
        raise MessagesRefused(f"{'.'.join(map(str, place))}: {message}" if place else message) from error


def _refuse_server_tools(tools: object) -> None:
    for index, tool in enumerate(tools if isinstance(tools, list) else []):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind not in (None, "custom"):
            raise MessagesRefused(
                f"tools.{index}: {kind!r} is a tool of Anthropic's own, which the engine behind this address does not "
                "have: declare a tool with an input_schema and run it in the client"
            )
