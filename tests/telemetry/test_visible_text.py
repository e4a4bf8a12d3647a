"""Text of others is made visible by one table of cases; the page's twin of it is held to the same one."""

import json
from pathlib import Path

import pytest

from forebay.telemetry.visible_text import visible

CASES = json.loads((Path(__file__).parents[1] / "visible_cases.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("text", "shown"), CASES)
def test_hidden_characters_become_their_codes(text: str, shown: str) -> None:
    assert visible(text) == shown
