"""A Responses request, checked."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Discriminator, Field, Tag, ValidationError

from forebay.server.gateway.protocol_chat import Fields, first_problem, split_engine_fields
from forebay.server.gateway.responses_errors import ResponsesRefused
from forebay.server.gateway.responses_models import ITEMS, AnyItem, Strict, Tool, text_or_list

ListT = TypeVar("ListT")
TextOr = Annotated[Annotated[str, Tag("~text")] | Annotated[ListT, Tag("~list")], Discriminator(text_or_list)]
Choice = Annotated[
    Annotated[Literal["auto", "required", "none"], Tag("~text")] | Annotated[dict[str, Any], Tag("~list")],
    Discriminator(text_or_list),
]
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"


class ReasoningConfig(Strict):
    """How the model is to reason, and whether the client wants a summary: the reasoning itself."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"] | None = "medium"
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(Strict):
    """Plain text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = "response"
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(Strict):
    """The format of the answer. The verbosity reaches no engine."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(Strict):
    """A request for an answer. The fields of the last paragraph have no effect."""

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
    tool_choice: Choice | None = "auto"
    parallel_tool_calls: bool | None = True
    user: str | None = None

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
        """Whether reasoning is told as a summary too."""
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
