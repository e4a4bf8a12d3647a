"""What a client is told that asks for the right path with the wrong method, or before anything was started."""

import pytest

from forebay.server.routes.openapi import SAMPLE_PATHS
from tests.conftest import MakeServer
from tests.kit import ServerProcess, assert_error, make_sample


@pytest.mark.parametrize("path", sorted(SAMPLE_PATHS))
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_path_that_is_posted_to_answers_other_methods_with_what_it_allows(
    server: ServerProcess, path: str, method: str
) -> None:
    document = server.client.get("/openapi.json").json()["paths"][path]
    allowed = {name.upper() for name in document}
    assert "POST" in allowed
    url = path.format(name="a-name", run_key="a-key", run_id="a-run")
    answer = server.client.request(method, url)
    if method in allowed:
        assert answer.status_code != 405
        return
    assert_error(answer, 405, "method_not_allowed")
    assert set(answer.headers["Allow"].split(", ")) - {"HEAD"} == allowed


@pytest.mark.parametrize("path", ["/buffer/writes", "/w/a/b/samples", "/v1/runs/x/y/batches", "/s/buffer/write/x"])
def test_a_path_that_nobody_serves_is_still_unknown(server: ServerProcess, path: str) -> None:
    for method in ("GET", "POST"):
        assert_error(server.client.request(method, path), 404, "no_such_route")


def test_a_write_before_any_start_says_so(make_server: MakeServer) -> None:
    server = make_server()
    for path, told in (("/buffer/write", "yet"), ("/s/mine/buffer/write", "under the name 'mine'")):
        error = assert_error(server.client.post(path, json=make_sample()), 404, "run_not_found")
        assert error["message"] == f"no run was started {told}"
        assert error["hint"] == "POST /start_rollout starts one"
    for path in ("buffer/write", "samples"):
        error = assert_error(server.client.post(f"/w/secret/{path}", json=make_sample()), 404, "run_not_found")
        assert error["message"] == "no run has this key"
        assert "remote_buffer_url" in error["hint"]
