"""Bodies of the ordinary routes: short, and paid for by the one budget while they are worked on."""

import httpx
import pytest

from tests.conftest import MakeServer
from tests.kit import TIME_LIMIT_S, ServerProcess, assert_error

LIMIT = 50_000


@pytest.fixture(scope="module")
def limited(module_servers: MakeServer) -> ServerProcess:
    return module_servers(max_start_bytes=LIMIT)


@pytest.mark.parametrize("path", ["/start_rollout", "/s/a/start_rollout", "/v1/runs"])
def test_a_start_beyond_its_limit_is_refused_with_the_setting_named(limited: ServerProcess, path: str) -> None:
    body = {"task_type": "idle", "group_size": 1, "num_repeat_per_sample": 1, "padding": "x" * LIMIT}
    error = assert_error(limited.client.post(path, json=body), 413, "body_too_large")
    assert "max_start_bytes" in error["hint"]


@pytest.mark.parametrize("action", ["checkpoints", "rewind", "engines/pause", "engines/continue"])
def test_no_other_route_without_samples_reads_more(limited: ServerProcess, action: str) -> None:
    run = limited.start_run()
    answer = limited.client.post(f"{run.path}/{action}", content=b" " * (LIMIT + 1))
    assert_error(answer, 413, "body_too_large")


def test_samples_may_be_longer_than_a_start(limited: ServerProcess) -> None:
    sample = {"uid": "a", "instance_id": "one", "messages": [], "reward": 1.0, "pad": "x" * 2 * LIMIT}
    assert limited.start_run().write(sample)[0]["status"] == 200


def test_a_body_that_no_route_reads_does_no_harm(limited: ServerProcess) -> None:
    for method in ("GET", "DELETE"):
        answer = httpx.request(method, f"{limited.url}/v1/runs", content=b"x" * 5_000_000, timeout=TIME_LIMIT_S)
        assert answer.status_code == (200 if method == "GET" else 405)
    assert limited.client.get("/healthz").status_code == 200
