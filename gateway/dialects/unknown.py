"""What a request has that the translations do not know: it is left out, or passed on for the engine to judge.

Both translations take such a request, since agents send what their own provider has. They write down what they met
in a list of names, which the gateway counts: ``left_out_…`` or ``passed_on_…``, the protocol, and the place.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Tag

Fields = dict[str, Any]


class LenientModel(BaseModel):
    """Takes fields that it does not know; ``unknown_fields`` finds them."""

    model_config = ConfigDict(extra="allow")


class UnknownPart(LenientModel):
    """A part of a content of a kind that the translation does not know."""

    type: str

    @property
    def given(self) -> Fields:
        """As it came."""
        return self.model_dump()


def kind_of(value: object) -> str:
    """The ``type`` of a part, given as JSON or as a model."""
    return str(value.get("type")) if isinstance(value, dict) else str(getattr(value, "type", None))


ListT = TypeVar("ListT")
TextOr = Annotated[
    Annotated[str, Tag("~text")] | Annotated[ListT, Tag("~list")],
    Discriminator(lambda value: "~text" if isinstance(value, str) else "~list"),
]
"""A text, or a list."""


class UnknownFieldLog:
    """Writes down in ``names`` what one request of ``protocol`` has."""

    def __init__(self, protocol: str) -> None:
        self.names: list[str] = []
        self._protocol = protocol

    def left_out(self, *place: str) -> None:
        """What stands there has no part in the chat."""
        self.names.append("_".join(("left_out", self._protocol, *place)))

    def passed_on(self, *place: str) -> None:
        """What stands there is in the chat as it came."""
        self.names.append("_".join(("passed_on", self._protocol, *place)))

    def note_fields(self, model: BaseModel, *place: str) -> None:
        """Everything in a model, and in the models in it, that none of them knows."""
        for name in unknown_fields(model, place):
            self.left_out(*name)

    def known_tools(self, tools: object, kinds: Iterable[object]) -> object:
        """The tools without those of other kinds: engines have no tools of their own. Anything else as it is."""
        if not isinstance(tools, list):
            return tools
        kept = []
        for tool in tools:
            kind = tool.get("type") if isinstance(tool, Mapping) else None
            if not isinstance(tool, Mapping) or kind in kinds:
                kept.append(tool)
            else:
                self.left_out("tool", str(kind))
        return kept


def unknown_fields(value: object, place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The places of fields that have a value, and that the model they stand in does not know."""
    if isinstance(value, list):
        for item in value:
            yield from unknown_fields(item, place)
    elif isinstance(value, BaseModel) and not isinstance(value, UnknownPart):
        for name, given in (value.model_extra or {}).items():
            if given is not None:
                yield (*place, name)
        for name in type(value).model_fields:
            yield from unknown_fields(getattr(value, name), (*place, name))
