"""Real servers for tests, ended with them, their logs shown when a test fails."""

import gc
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.kit import ServerProcess

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Tests ask over plain HTTP: to read this machine's certificates, for each client anew, would take longer than that.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

# Pytest and the libraries of the tests keep hundreds of megabytes: at its defaults, the collector would walk through
# all of them again and again.
gc.set_threshold(100_000, 50, 1_000)

MakeServer = Callable[..., ServerProcess]
SERVERS = pytest.StashKey[list[ServerProcess]]()
LONGEST = (
    "slime",
    "workers/test_run_workers.py",
    "soak",
    "examples",
    "e2e",
    "cli/test_demo.py",
    "engines/tiny",
    "generators/test_agent.py",
    "generators/test_runtime.py",
    "server/test_run_life.py",
    "server/test_pause_deadlines.py",
    "client/test_slime_crashes.py",
    "install",
    "test_readme.py",
    "test_slime_example.py",
    "server/test_group_ageing.py",
    "server/test_longest_first_runs.py",
    "server/test_gc_route.py",
    "server/test_deadlines.py",
    "generators/test_run_trace_events.py",
    "generators/test_agent_trace.py",
    "hooks/test_hook_host.py",
    "workers",
    "server",
    "generators",
    "gateway",
)
"""Files and folders, below this one, that take longest: what is begun last decides when a parallel run ends."""
STARTED_IN_FULL = ("attack", "benchmarks", "crash", "e2e", "profile", "sglang", "soak")
"""Folders whose servers are started as users start theirs; so is the shared ``server``. Others are ``preloaded``."""
MARKED_FOLDERS = {
    "attack": "attack",
    "benchmarks": "bench",
    "browser": "browser",
    "environments": "environments",
    "profile": "profile",
    "sglang": "sglang",
    "trainers": "trainers",
}
"""Folders of which every test has one marker. Each worker would load what they import, only to deselect them all."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the folders alone whose tests are not asked for."""
    marker = MARKED_FOLDERS.get(collection_path.name) if collection_path.parent == Path(__file__).parent else None
    asked = config.option.markexpr
    # Only `make test-browser` installs what the tests in a browser import.
    return True if marker and (f"not {marker}" in asked or (marker == "browser" and marker not in asked)) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; ``make test`` keeps this order."""
    items.sort(key=lambda item: _rank(item.path.relative_to(Path(__file__).parent).as_posix()))


def pytest_collection_finish() -> None:
    gc.freeze()


def _rank(path: str) -> int:
    return next((rank for rank, beginning in enumerate(LONGEST) if path.startswith(beginning)), len(LONGEST))


class _Farm:
    """Starts servers and ends them all."""

    def __init__(self, config: pytest.Config, make_directory: Callable[[], Path], *, is_preloaded: bool) -> None:
        self._living = config.stash.setdefault(SERVERS, [])
        self._make_directory = make_directory
        self._is_preloaded = is_preloaded
        self._own: list[ServerProcess] = []

    def make(self, **settings: Any) -> ServerProcess:
        server = ServerProcess(self._make_directory(), is_preloaded=self._is_preloaded, **settings)
        self._own.append(server)
        self._living.append(server)
        return server.start()

    def close(self) -> None:
        for server in self._own:
            server.close()
            self._living.remove(server)


def _folder(path: Path) -> str:
    """The part of the tests to which a file belongs."""
    return path.relative_to(Path(__file__).parent).parts[0]


def _farm(request: pytest.FixtureRequest, factory: pytest.TempPathFactory) -> Iterator[MakeServer]:
    is_preloaded = request.scope != "session" and _folder(request.path) not in STARTED_IN_FULL
    farm = _Farm(request.config, lambda: factory.mktemp("server"), is_preloaded=is_preloaded)
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


@pytest.fixture(autouse=True)
def _log_of_one_test() -> Iterator[None]:
    """A command that runs in this process sends its log where pytest shows it, and closes that with the test."""
    level = logging.root.level
    yield
    for handler in [each for each in logging.root.handlers if type(each) is logging.StreamHandler]:
        logging.root.removeHandler(handler)
    logging.root.setLevel(level)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    if report.failed:
        for server in item.config.stash.get(SERVERS, []):
            report.sections.append((f"log of the server in {server.directory}", server.log()))
    return report
