"""What the tests of ``forebay compare`` share."""

import sys

import pytest


@pytest.fixture(autouse=True)
def own_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reward functions are imported from a test's folder, in which one test has a file ``json.py``."""
    monkeypatch.setattr(sys, "path", [*sys.path])
