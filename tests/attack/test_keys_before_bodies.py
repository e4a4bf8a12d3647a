"""Whoever has no key is refused before the first byte of a body is read, at the server and at the gateway."""

import json
import re
import time
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import psutil
import pytest

from forebay.engines.scripted import ScriptedEngine
from tests.attack.raw_requests import RawReply, ask_raw, connected, head, reply_to
from tests.conftest import MakeServer
from tests.kit import TIME_LIMIT_S, ServerProcess
from tests.lent import lend_runs, lent_url
from tests.route_keys import CONTROL_KEY, NOTHING, ROLLOUT_KEY, ROUTE, RUN_KEY, RUNS_GATEWAY_KEY, TOKEN, told

TOKEN_HEADER = {"Authorization": "Bearer secret"}
NEVER_SENT = ["Content-Length: 1073741824", "Transfer-Encoding: chunked"]
"""Bodies of which nothing ever comes."""
AT_ONCE_S = 20.0
"""For an answer that takes a millisecond, on a machine with other work: whoever waits for the body takes 30 s."""
ROUTES = told("Routes of the server")
GATEWAY_ROUTES = told("Routes of the gateway")
LARGE_BODY = json.dumps({"opened": [[n, 0] for n in range(1_000_000)]}).encode()
GROWTH_BYTES = 100 << 20


class Site(NamedTuple):
    """A server with a token, a run on it, and its gateway."""

    server: ServerProcess
    run_url: str
    """The run's private address."""
    gateway_url: str
    gateway_key: str


@pytest.fixture(scope="module")
def site(module_servers: MakeServer) -> Iterator[Site]:
    server = module_servers(token="secret", start_wait_s=60)
    server.client.headers.update(TOKEN_HEADER)
    lend_runs(server)
    rows = server.directory / "rows.jsonl"
    rows.write_text('{"prompt": "2+2?"}\n')
    with ScriptedEngine(lambda _: "4").in_thread() as engine:
        run = server.start_run("lent", remote_engine_url=engine.url, input_file=str(rows))
        run_url = lent_url(server, run.run_id)
        told_of = server.client.post(f"{run_url}/gateway").raise_for_status().json()
        yield Site(server, run_url, told_of["url"], told_of["key"])


def unsent(url: str, route: ROUTE, *headers: str, **names: str) -> Iterator[RawReply]:
    """The replies to requests whose client waits to be told to go on, and sends nothing of its body."""
    method, path = route
    target = re.sub(r"{(\w+)}", lambda name: names.get(name[1], "none"), path)
    for length in NEVER_SENT:
        began_s = time.monotonic()
        yield ask_raw(url, head(method, target, "Host: localhost", *headers, length, "Expect: 100-continue"))
        assert time.monotonic() - began_s < AT_ONCE_S


def assert_unauthorized(reply: RawReply) -> None:
    assert reply.status == 401, reply
    assert json.loads(reply.body)["error"]["code"] == "unauthorized"


def assert_no_run(reply: RawReply) -> None:
    assert reply.status == 404, reply
    assert json.loads(reply.body)["error"]["code"] == "run_not_found"


# --- the server


@pytest.mark.parametrize(
    "route", [*ROUTES, ("POST", "/nothing"), ("PUT", "/w"), ("PATCH", "//w/none/samples")], ids=" ".join
)
def test_no_route_of_the_server_reads_a_body_without_its_key(site: Site, route: ROUTE) -> None:
    key = ROUTES.get(route, TOKEN)
    for headers in ([], ["Authorization: Bearer secreT"], [f"Authorization: Bearer {site.gateway_key}"]):
        for reply in unsent(site.server.url, route, *headers):
            if key == TOKEN:
                assert_unauthorized(reply)
            elif key == RUN_KEY:
                assert_no_run(reply)
            else:
                assert (key, reply.status) == (NOTHING, 200)


@pytest.mark.parametrize("route", [route for route, key in ROUTES.items() if key == RUN_KEY], ids=" ".join)
def test_the_token_is_no_runs_key(site: Site, route: ROUTE) -> None:
    for reply in unsent(site.server.url, route, "Authorization: Bearer secret"):
        assert_no_run(reply)
    for reply in unsent(site.server.url, route, run_key="secret"):
        assert_no_run(reply)


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS"])
def test_paths_that_no_route_has_need_the_runs_key_too(site: Site, method: str) -> None:
    for path in ("/w/", "/w//", "/w/none", "/w/none/nothing", "/w/none%2Fplan", "/w/../v1/runs", "/w//progress"):
        for reply in unsent(site.server.url, (method, path)):
            assert_no_run(reply)


def test_a_server_without_a_token_asks_for_the_runs_key_all_the_same(server: ServerProcess) -> None:
    for route, key in ROUTES.items():
        if key == RUN_KEY:
            for reply in unsent(server.url, route):
                assert_no_run(reply)


def test_a_run_key_opens_what_it_is_for(site: Site) -> None:
    key = site.run_url.rpartition("/")[2]
    for method, path in (route for route, needed in ROUTES.items() if needed == RUN_KEY):
        url = site.server.url + path.format(run_key=key, group_id="none")
        reply = httpx.request(method, url, content=b"{}" if method == "POST" else None, timeout=TIME_LIMIT_S)
        assert reply.status_code not in (401, 403), (path, reply.text)
        # The run replays nothing: that says who knows it.
        assert reply.status_code != 404 or reply.json()["error"]["code"] == "not_recorded", (path, reply.text)
    unknown = httpx.post(f"{site.run_url}/nothing", timeout=TIME_LIMIT_S)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "no_such_route")


@pytest.mark.parametrize("path", ["/v1/runs", "/w/none/progress", "/w/none/samples"])
def test_a_connection_goes_on_after_a_refusal(site: Site, path: str) -> None:
    with connected(site.server.url) as opened:
        refused = reply_to(opened, head("POST", path, "Host: localhost", "Content-Length: 5"))
        assert refused.status in (401, 404)
        # What comes after all is no next request.
        assert reply_to(opened, b"GET /" + head("GET", "/healthz", "Host: localhost")).status == 200


@pytest.mark.parametrize("path", ["/w/anything/progress", "/w/anything/gateway", "/w/anything/samples", "/v1/runs"])
def test_a_large_body_without_a_key_costs_nothing(site: Site, path: str) -> None:
    process = psutil.Process(site.server.pid)
    before, began_s = process.memory_info().rss, time.monotonic()
    for _ in range(3):
        reply = httpx.post(f"{site.server.url}{path}", content=LARGE_BODY, timeout=TIME_LIMIT_S)
        assert reply.status_code in (401, 404)
    assert time.monotonic() - began_s < 3 * AT_ONCE_S
    assert process.memory_info().rss - before < GROWTH_BYTES


# --- the gateway


@pytest.mark.parametrize("route", list(GATEWAY_ROUTES), ids=" ".join)
def test_no_route_of_the_gateway_reads_a_body_without_its_key(site: Site, route: ROUTE) -> None:
    needed = GATEWAY_ROUTES[route]
    wrong = ["Authorization: Bearer none", "x-api-key: none", "Authorization: Bearer secret"]
    if needed != RUNS_GATEWAY_KEY:
        wrong.append(f"Authorization: Bearer {site.gateway_key}")
    for headers in ([], *([each] for each in wrong)):
        for reply in unsent(site.gateway_url, route, *headers):
            if needed == NOTHING:
                assert reply.status == 200
            elif needed == ROLLOUT_KEY:
                assert reply.status == 401
                assert "there is no open rollout" in reply.body
            else:
                assert_unauthorized(reply)


def test_a_rollouts_key_opens_that_rollout_alone(site: Site) -> None:
    opened = httpx.post(
        f"{site.gateway_url}/gateway/rollouts",
        json={"rollout_id": "r-1", "deadline_s": 60},
        headers={"Authorization": f"Bearer {site.gateway_key}"},
        timeout=TIME_LIMIT_S,
    ).raise_for_status()
    bearer = f"Authorization: Bearer {opened.json()['key']}"
    for route, needed in GATEWAY_ROUTES.items():
        if needed in (CONTROL_KEY, RUNS_GATEWAY_KEY):
            for reply in unsent(site.gateway_url, route, bearer, rollout_id="r-1"):
                assert_unauthorized(reply)
        elif needed == ROLLOUT_KEY:
            for reply in unsent(site.gateway_url, route, bearer, rollout_id="r-2"):
                assert reply.status == 401
    models = ask_raw(site.gateway_url, head("GET", "/gateway/r-1/v1/models", "Host: gateway.test", bearer))
    assert models.status == 200
