"""The input items and tools of a Responses request. Fields that these models do not know are refused."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag


class Strict(BaseModel):
    """Refuses fields that it does not know, as OpenAI's API does."""

    model_config = ConfigDict(extra="forbid")


class Text(Strict):
    """Text, whoever wrote it. What the client adds to a text that it has parsed is let pass."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: object = None
    logprobs: object = None
    parsed: object = None


class Refusal(Strict):
    """What a model said in place of an answer."""

    type: Literal["refusal"]
    refusal: str


class Image(Strict):
    """An image by its address, or in it."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["low", "high", "auto", "original"] | None = None
    file_id: None = None


def text_or_list(value: object) -> str:
    """The tag of a content: a text, or a list."""
    return "~text" if isinstance(value, str) else "~list"


ContentPart = Annotated[
    Annotated[Text, Tag("~text")] | Annotated[Refusal, Tag("~refusal")] | Annotated[Image, Tag("~image")],
    Discriminator(lambda value: _PART_TAGS.get(_kind(value), "~text")),
]
Content = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[ContentPart], Tag("~list")], Discriminator(text_or_list)
]
_PART_TAGS = {"refusal": "~refusal", "input_image": "~image"}


class Item(Strict):
    """What items have in common. ``id`` and ``status`` say nothing to a model."""

    id: str | None = None
    status: str | None = None


class Message(Item):
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


class ReasoningText(Strict):
    """A piece of reasoning."""

    type: Literal["summary_text", "reasoning_text"]
    text: str


class Reasoning(Item):
    """The model's reasoning, in one of three places."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] = Field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


AnyItem = Message | FunctionCall | CustomCall | CallOutput | Reasoning
ITEMS: dict[str, type[AnyItem]] = {
    "message": Message,
    "function_call": FunctionCall,
    "custom_tool_call": CustomCall,
    "function_call_output": CallOutput,
    "custom_tool_call_output": CallOutput,
    "reasoning": Reasoning,
}


def _kind(value: object) -> str:
    return str(value.get("type")) if isinstance(value, dict) else str(getattr(value, "type", None))


class FunctionTool(Strict):
    """A function of the client."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None


class CustomTool(Strict):
    """A tool of the client that takes a text."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


Tool = Annotated[
    Annotated[FunctionTool, Tag("~function")] | Annotated[CustomTool, Tag("~custom")],
    Discriminator(lambda value: "~custom" if _kind(value) == "custom" else "~function"),
]
