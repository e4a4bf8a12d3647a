"""The pytest fixture ``recorded_engine``. Every session imports this module, so the engine is imported lazily."""

from collections.abc import Iterator
from urllib.parse import quote

import pytest

from forebay import replay


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--record-engine``."""
    words = "Engine from which tests with the fixture recorded_engine make recordings that do not exist yet."
    parser.addoption("--record-engine", metavar="URL", help=words)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", "recorded_engine(file, **options): the fixture's file, and its options")


@pytest.fixture
def recorded_engine(request: pytest.FixtureRequest) -> Iterator["replay.RecordedEngine"]:
    """A recorded engine, served until the test ends: `recordings/FILE.TEST.fbr`, unless its marker names a file."""
    test = quote(request.node.getmodpath(), safe="[] ")
    marker = request.node.get_closest_marker("recorded_engine") or pytest.mark.recorded_engine().mark
    (name,) = marker.args or (f"recordings/{request.path.stem}.{test}.fbr",)
    file, upstream = request.path.parent / name, request.config.getoption("record_engine")
    if upstream:
        file.parent.mkdir(parents=True, exist_ok=True)
    with replay.RecordedEngine(file, **{"upstream": upstream, "record": "once", **marker.kwargs}).in_thread() as engine:
        yield engine
