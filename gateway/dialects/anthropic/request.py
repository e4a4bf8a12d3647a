"""Validate a Messages request: its content blocks and its tools. Unknown features are noted.

Rejects what cannot be interpreted, such as a text for a number, and a ``thread``, whose beginning is not in the body.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError, model_validator

from forebay.gateway.dialects.errors import ProtocolRefused
from forebay.gateway.dialects.history import Fields, arguments_object, first_problem, split_engine_fields
from forebay.gateway.dialects.unknown import LenientModel, TextOr, UnknownFieldLog, UnknownPart, kind_of

TOOL_KINDS = (None, "custom")
CHOICES = ("auto", "any", "tool", "none")

NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Makes the official client's tool runner retry with the whole conversation."""


class MessagesModel(LenientModel):
    """Base of all parts of a request. ``cache_control`` has no effect."""

    cache_control: object = None


class TextBlock(MessagesModel):
    """A text block."""

    type: Literal["text"]
    text: str
    citations: object = None
    # Anthropic's client adds this to a text it parsed, and returns it in the next history.
    parsed_output: object = None


class ImageBlock(MessagesModel):
    """An image: base64 data or a URL."""

    type: Literal["image"]
    source: dict[str, Any]


def _read_input(given: object) -> object:
    # After a streamed call that max_tokens cut off, clients return the received text, which engines reject.
    return (arguments_object(given) or {}) if isinstance(given, str) else given


class ToolUseBlock(MessagesModel):
    """A tool call by the model. An ``input`` text that is not a JSON object counts as an empty object."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Annotated[dict[str, Any], BeforeValidator(_read_input)]
    caller: object = None


class SearchResultBlock(MessagesModel):
    """A passage found by a search."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]
    citations: object = None


class ToolReferenceBlock(MessagesModel):
    """SGLang's extension: names a tool whose definition was deferred."""

    type: Literal["tool_reference"]
    tool_name: str


def _tag(value: object) -> str:
    """Discriminator of a block: its type if known."""
    return kind if (kind := kind_of(value)) in BLOCKS else "~unknown"


BLOCKS = ("text", "image", "tool_use", "tool_result", "search_result", "thinking", "tool_reference")
ResultBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[ToolReferenceBlock, Tag("tool_reference")]
    | Annotated[UnknownPart, Tag("~unknown")],
    Discriminator(_tag),
]


class ToolResultBlock(MessagesModel):
    """The result of a tool call. ``is_error`` is not passed to the chat template."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOr[list[ResultBlock]] = ""
    is_error: bool | None = None


class ThinkingBlock(MessagesModel):
    """The model's reasoning. The signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[UnknownPart, Tag("~unknown")],
    Discriminator(_tag),
]
Content = TextOr[list[Block]]


class MessagesTool(MessagesModel):
    """A tool of the client. ``eager_input_streaming`` and ``input_examples`` are not sent to the engine."""

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
    """Whether the model is to reason first. The budget is ignored, because it cannot be enforced."""

    type: str
    budget_tokens: object = None
    display: object = None


class OutputFormat(MessagesModel):
    """The JSON schema of the answer."""

    type: str
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")


class OutputConfig(MessagesModel):
    """Effort and format of the answer. A task budget is a hint that is not sent to the engine."""

    effort: str | None = None
    format: OutputFormat | None = None
    task_budget: object = None


class MessagesPrompt(MessagesModel):
    """Fields shared by requests for an answer and for a token count."""

    model: Annotated[str, Field(min_length=1)]
    messages: list[InputMessage]
    system: Content | None = None
    thinking: Thinking | None = None
    tool_choice: ToolChoice | None = None
    tools: list[MessagesTool] = Field(default_factory=list)
    output_config: OutputConfig | None = None
    betas: object = None
    context_management: object = None


class MessagesRequest(MessagesPrompt):
    """A request for an answer. ``metadata``, ``service_tier`` and ``betas`` have no effect."""

    max_tokens: Annotated[int, Field(gt=0)]
    stream: bool | None = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: object = None
    service_tier: object = None


PromptT = TypeVar("PromptT", bound=MessagesPrompt)


def parsed(kind: type[PromptT], body: Fields, unknown: UnknownFieldLog) -> tuple[PromptT, Fields]:
    """Parse a request for an answer or a count; also returns the engine's own fields. Raises ``ProtocolRefused``."""
    own, engine_fields = split_engine_fields(body)
    if own.pop("thread", None) is not None:
        raise ProtocolRefused("thread: send the whole conversation, without this field", details=NO_THREADS)
    _leave_out(own, unknown)
    try:
        prompt = kind.model_validate(own)
    except ValidationError as error:
        place, message = first_problem(error)
        raise ProtocolRefused(f"{'.'.join(map(str, place))}: {message}" if place else message) from error
    unknown.note_fields(prompt)
    return prompt, engine_fields


def _names(tools: list[Any]) -> list[Any]:
    return [tool.get("name") for tool in tools if isinstance(tool, Mapping)]


def _leave_out(own: Fields, unknown: UnknownFieldLog) -> None:
    """Remove tools and tool choices that have no equivalent in a chat."""
    given = own.get("tools")
    own["tools"] = unknown.known_tools(given if given is not None else [], TOOL_KINDS)
    choice = own.get("tool_choice")
    if not isinstance(choice, Mapping) or not isinstance(own["tools"], list):
        return
    names = _names(own["tools"])
    left = [name for name in _names(given or []) if name not in names]
    is_about_left = choice.get("name") in left if choice.get("type") == "tool" else bool(given) and not names
    if choice.get("type") not in CHOICES or (choice.get("type") in ("any", "tool") and is_about_left):
        del own["tool_choice"]
        unknown.left_out("tool_choice")
