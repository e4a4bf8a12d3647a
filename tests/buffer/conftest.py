"""The stores over which the buffer's promises are tested."""

from pathlib import Path

import pytest

from forebay.buffer.store.abc import Store
from forebay.buffer.store.journal import JournalStore
from forebay.buffer.store.memory import MemoryStore
from forebay.core.clock import ManualClock


@pytest.fixture(params=["memory", "journal"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Not entered: a buffer does that, more than once where a test restarts it."""
    return MemoryStore() if request.param == "memory" else JournalStore(tmp_path / "data")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()
