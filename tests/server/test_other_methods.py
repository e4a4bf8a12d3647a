"""What a client is told that asks for the right path with the wrong method, or before anything was started."""

import pytest

from forebay.server.routes.openapi import SAMPLE_PATHS
from tests.conftest import MakeServer
from tests.kit import ServerProcess, assert_error, make_sample
from tests.lent import lend_runs, lent_url


@pytest.fixture(scope="module")
def lending(module_servers: MakeServer) -> tuple[ServerProcess, str]:
    """A server, and the key of a run there."""
    server = module_servers()
    lend_runs(server)
    (server.directory / "rows.jsonl").write_text('{"prompt": "2+2?"}\n')
    run = server.start_run("lent", input_file="rows.jsonl")
    return server, lent_url(server, run.run_id).rpartition("/")[2]


@pytest.mark.parametrize("path", sorted(SAMPLE_PATHS))
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_path_that_is_posted_to_answers_other_methods_with_what_it_allows(
    lending: tuple[ServerProcess, str], path: str, method: str
) -> None:
    server, run_key = lending
    document = server.client.get("/openapi.json").json()["paths"][path]
    allowed = {name.upper() for name in document}
    assert "POST" in allowed
    url = path.format(name="a-name", run_key=run_key, run_id="a-run", batch_id="a-batch")
    answer = server.client.request(method, url)
    if method in allowed:
        assert answer.status_code != 405
        return
    assert_error(answer, 405, "method_not_allowed")
    assert set(answer.headers["Allow"].split(", ")) - {"HEAD"} == allowed


@pytest.mark.parametrize(
    "path", ["/buffer/writes", "/w/{run_key}/b/samples", "/v1/runs/x/y/batches", "/s/buffer/write/x"]
)
def test_a_path_that_nobody_serves_is_still_unknown(lending: tuple[ServerProcess, str], path: str) -> None:
    server, run_key = lending
    for method in ("GET", "POST"):
        assert_error(server.client.request(method, path.format(run_key=run_key)), 404, "no_such_route")


def test_who_has_no_run_key_learns_of_no_route_behind_one(server: ServerProcess) -> None:
    for path in ("/w/a-key/samples", "/w/a-key/b/samples"):
        for method in ("GET", "POST"):
            assert_error(server.client.request(method, path), 404, "run_not_found")


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
