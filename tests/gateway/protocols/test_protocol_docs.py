"""Every field that is taken has its place in docs/gateway_protocols.md."""

from pathlib import Path

import pytest

from forebay.gateway.dialects.anthropic.request import MessagesRequest, OutputConfig
from forebay.gateway.dialects.history import ENGINE_FIELDS
from forebay.gateway.dialects.responses.request import ITEMS, ResponsesRequest

PAGE = (Path(__file__).parents[3] / "docs" / "gateway_protocols.md").read_text(encoding="utf-8")
MESSAGES, RESPONSES = PAGE.split("### Messages")[1].split("### Responses")


@pytest.mark.parametrize("name", [*MessagesRequest.model_fields, *OutputConfig.model_fields, "thread"])
def test_fields_of_messages(name: str) -> None:
    assert f"`{name}`" in MESSAGES


@pytest.mark.parametrize("name", [*ResponsesRequest.model_fields, "verbosity", "item_reference"])
def test_fields_of_responses(name: str) -> None:
    assert f"`{name}`" in RESPONSES


@pytest.mark.parametrize("name", sorted(ENGINE_FIELDS))
def test_fields_of_the_engine(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_kinds_of_items() -> None:
    kinds = [name for name in ITEMS if not name.endswith("_output") and name != "message"]
    assert [name for name in kinds if f"`{name}`" not in RESPONSES] == []
