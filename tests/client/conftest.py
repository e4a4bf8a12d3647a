"""A run on a real server, and a proxy before it that loses things."""

from collections.abc import Iterator

import pytest

from tests.client.faulty_proxy import FaultyProxy
from tests.kit import NativeRun, ServerProcess


@pytest.fixture
def run(server: ServerProcess) -> NativeRun:
    """A run into which the test writes."""
    return server.start_run()


@pytest.fixture
def proxy(server: ServerProcess) -> Iterator[FaultyProxy]:
    """Between the client and the server."""
    with FaultyProxy(server.url) as proxy:
        yield proxy
