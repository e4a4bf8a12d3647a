"""Everything in this folder attacks a real server, gateway or engine; `make test-attack` runs it."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The hook sees all tests that were collected, not only those of this folder."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.attack)
