"""Real servers for tests, ended with them, their logs shown when a test fails."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.kit import ServerProcess

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

MakeServer = Callable[..., ServerProcess]
SERVERS = pytest.StashKey[list[ServerProcess]]()
LONGEST = (
    "slime",
    "soak",
    "examples",
    "e2e",
    "earlier_data",
    "cli/test_demo.py",
    "engines/tiny",
    "generators/test_agent.py",
    "generators/test_runtime.py",
    "server/test_run_life.py",
    "server/test_pause_deadlines.py",
    "client/test_slime_crashes.py",
    "test_package.py",
    "test_readme.py",
    "test_slime_example.py",
)
"""Files and folders, below this one, that take longest: what is begun last decides when a parallel run ends."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; ``make test`` keeps this order."""
    items.sort(key=lambda item: _rank(item.path.relative_to(Path(__file__).parent).as_posix()))


def _rank(path: str) -> int:
    return next((rank for rank, beginning in enumerate(LONGEST) if path.startswith(beginning)), len(LONGEST))


class _Farm:
    """Starts servers and ends them all."""

    def __init__(self, config: pytest.Config, make_directory: Callable[[], Path]) -> None:
        self._living = config.stash.setdefault(SERVERS, [])
        self._make_directory = make_directory
        self._own: list[ServerProcess] = []

    def make(self, **settings: Any) -> ServerProcess:
        server = ServerProcess(self._make_directory(), **settings)
        self._own.append(server)
        self._living.append(server)
        return server.start()

    def close(self) -> None:
        for server in self._own:
            server.close()
            self._living.remove(server)


def _farm(request: pytest.FixtureRequest, factory: pytest.TempPathFactory) -> Iterator[MakeServer]:
    farm = _Farm(request.config, lambda: factory.mktemp("server"))
    yield farm.make
    farm.close()


@pytest.fixture
def make_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeServer]:
    """Starts servers of the test's own; keyword arguments are those of ``ServerProcess``."""
    yield from _farm(request, tmp_path_factory)


@pytest.fixture(scope="module")
def module_servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeServer]:
    """The same for a whole test file."""
    yield from _farm(request, tmp_path_factory)


@pytest.fixture(scope="session")
def session_servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeServer]:
    """The same for all test files."""
    yield from _farm(request, tmp_path_factory)


@pytest.fixture(scope="session")
def server(session_servers: MakeServer) -> ServerProcess:
    """One server with default settings for every test that keeps to runs of its own."""
    return session_servers()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    if report.failed:
        for server in item.config.stash.get(SERVERS, []):
            report.sections.append((f"log of the server in {server.directory}", server.log()))
    return report
