"""A Messages request, checked: its content blocks and its tools. What these models do not know is noted.

Refused is what cannot be understood, such as a text for a number, and a ``thread``, whose beginning lies elsewhere.
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
"""Tells the official client's tool runner to ask again with the whole conversation."""


class MessagesModel(LenientModel):
    """Anything of a request. ``cache_control`` has no meaning here."""

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


def _read_input(given: object) -> object:
    # Of a streamed call that max_tokens cut off, clients send back the text they received. Engines refuse such text.
    return (arguments_object(given) or {}) if isinstance(given, str) else given


class ToolUseBlock(MessagesModel):
    """A call by the model. An ``input`` that is not the text of a JSON object counts as an empty one."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Annotated[dict[str, Any], BeforeValidator(_read_input)]
    caller: object = None


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


def _tag(value: object) -> str:
    """The tag of a block: its type, as far as that is known."""
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
    """What a call gave. ``is_error`` reaches no chat template."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOr[list[ResultBlock]] = ""
    is_error: bool | None = None


class ThinkingBlock(MessagesModel):
    """The model's reasoning. Nobody checks the signature."""

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
    """Whether the model is to reason first. The budget cannot be enforced and is not: any will do."""

    type: str
    budget_tokens: object = None
    display: object = None


class OutputFormat(MessagesModel):
    """The JSON schema that the answer follows."""

    type: str
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")


class OutputConfig(MessagesModel):
    """Effort and format of the answer. A task budget is a hint that reaches no engine."""

    effort: str | None = None
    format: OutputFormat | None = None
    task_budget: object = None


class MessagesPrompt(MessagesModel):
    """What a count of tokens and an answer have in common."""

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
    """A request for an answer, or for a count, and the fields that are for the engine. Raises ``ProtocolRefused``."""
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
    """Take out of the fields what a chat has nothing for."""
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
