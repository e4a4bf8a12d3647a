"""The content blocks and tools of a Messages request. Fields that these models do not know are refused."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag


class Strict(BaseModel):
    """Refuses fields that it does not know, as Anthropic's API does. ``cache_control`` has no meaning here."""

    model_config = ConfigDict(extra="forbid")
    cache_control: object = None


class TextBlock(Strict):
    """Text."""

    type: Literal["text"]
    text: str
    citations: object = None
    parsed_output: object = None
    """What the official client adds to a text that it has parsed."""


class ImageBlock(Strict):
    """An image: base64 or the address of one."""

    type: Literal["image"]
    source: dict[str, Any]


class ToolUseBlock(Strict):
    """A call by the model."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: object = None
    toolset_name: None = None


class SearchResultBlock(Strict):
    """A passage that a search found."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]
    citations: object = None


class ToolReferenceBlock(Strict):
    """SGLang's own: names a tool whose definition was held back."""

    type: Literal["tool_reference"]
    tool_name: str


ResultBlock = Annotated[TextBlock | ImageBlock | SearchResultBlock | ToolReferenceBlock, Field(discriminator="type")]


def text_or_list(value: object) -> str:
    """The tag of a content: a text, or a list."""
    return "~text" if isinstance(value, str) else "~list"


class ToolResultBlock(Strict):
    """What a call gave. ``is_error`` reaches no chat template."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        Annotated[str, Tag("~text")] | Annotated[list[ResultBlock], Tag("~list")], Discriminator(text_or_list)
    ] = ""
    is_error: bool | None = None
    toolset_name: None = None


class ThinkingBlock(Strict):
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


class CustomTool(Strict):
    """A tool of the client. ``eager_input_streaming`` and ``input_examples`` reach no engine."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
