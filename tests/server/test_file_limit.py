"""A thousand engine calls and readers need as many open files, whatever limit the shell had."""

import resource
from collections.abc import Iterator

import psutil
import pytest

from tests.conftest import MakeServer
from tests.kit import NativeRun, poll_until

SHELL_LIMIT = 512
WANTED = 65_536


@pytest.fixture
def shell_limit() -> Iterator[int]:
    """Of everything that is started meanwhile; the hard limit, which stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SHELL_LIMIT, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def soft_limits(run: NativeRun) -> set[int]:
    server = psutil.Process(run.server.pid)
    return {process.rlimit(resource.RLIMIT_NOFILE)[0] for process in (server, *server.children(recursive=True))}


def test_the_server_and_its_run_processes_may_open_more_than_the_shell(
    make_server: MakeServer, shell_limit: int
) -> None:
    run = make_server().start_run("idle")
    poll_until(lambda: run.view()["state"] == "running")
    expected = WANTED if shell_limit == resource.RLIM_INFINITY else min(WANTED, shell_limit)
    assert soft_limits(run) == {expected}
