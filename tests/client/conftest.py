"""A run on a real server, a proxy before it that loses things, and a trainer's client."""

from collections.abc import Iterator

import pytest

from forebay.client import BufferClient
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


@pytest.fixture
def client(run: NativeRun, proxy: FaultyProxy) -> Iterator[BufferClient]:
    """Attached to the run, through the proxy."""
    with BufferClient(proxy.url) as client:
        client.attach(run.run_id)
        yield client
