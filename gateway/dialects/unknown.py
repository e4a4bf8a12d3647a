"""Request features that the translations do not know: they are left out, or passed on for the engine to check.

Such requests are accepted, because agents send the features of their own provider. Each feature is recorded as a name,
which the gateway counts: ``left_out_…`` or ``passed_on_…``, the protocol, and the place.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Tag

Fields = dict[str, Any]


class LenientModel(BaseModel):
    """Accepts unknown fields; ``unknown_fields`` lists them."""

    model_config = ConfigDict(extra="allow")


class UnknownPart(LenientModel):
    """A content part of an unknown kind."""

    type: str

    @property
    def given(self) -> Fields:
        """The part, unchanged."""
        return self.model_dump()


def kind_of(value: object) -> str:
    """Return the ``type`` of a part, which is JSON or a model."""
    return str(value.get("type")) if isinstance(value, dict) else str(getattr(value, "type", None))


ListT = TypeVar("ListT")
TextOr = Annotated[
    Annotated[str, Tag("~text")] | Annotated[ListT, Tag("~list")],
    Discriminator(lambda value: "~text" if isinstance(value, str) else "~list"),
]
"""A text, or a list."""


class UnknownFieldLog:
    """Collects in ``names`` the unknown features of one request of ``protocol``."""

    def __init__(self, protocol: str) -> None:
        self.names: list[str] = []
        self._protocol = protocol

    def left_out(self, *place: str) -> None:
        """Record that the feature at ``place`` is left out of the chat."""
        self.names.append("_".join(("left_out", self._protocol, *place)))

    def passed_on(self, *place: str) -> None:
        """Record that the feature at ``place`` is passed on unchanged."""
        self.names.append("_".join(("passed_on", self._protocol, *place)))

    def note_fields(self, model: BaseModel, *place: str) -> None:
        """Record all unknown fields of a model and of its nested models."""
        for name in unknown_fields(model, place):
            self.left_out(*name)

    def known_tools(self, tools: object, kinds: Iterable[object]) -> object:
        """Drop tools of other ``kinds``, which engines cannot run. Anything but a list is returned unchanged."""
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
    """Yield the paths of fields that have a value and are unknown to their model."""
    if isinstance(value, list):
        for item in value:
            yield from unknown_fields(item, place)
    elif isinstance(value, BaseModel) and not isinstance(value, UnknownPart):
        for name, given in (value.model_extra or {}).items():
            if given is not None:
                yield (*place, name)
        for name in type(value).model_fields:
            yield from unknown_fields(getattr(value, name), (*place, name))
