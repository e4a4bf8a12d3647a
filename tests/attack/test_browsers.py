"""Pages that are open in a user's browser, against a server without a token and the embedded engines."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.client import BufferClient
from forebay.core.errors import InvalidInput
from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from tests.attack.raw_requests import ask_raw, head
from tests.conftest import MakeServer
from tests.kit import TIME_LIMIT_S, ServerProcess, assert_error, first_line, make_group, poll_until
from tests.route_keys import ROUTE, told

EVIL = "evil.example"
PAGE = {"Origin": f"http://{EVIL}"}
REBOUND = {"Host": f"{EVIL}:8889"}
MODEL_LIMIT_S = 180.0
"""For an engine that may have to make its model first."""

HTTP = httpx.Client(timeout=TIME_LIMIT_S)

FOREIGN = [
    PAGE,
    {"Origin": f"https://{EVIL}"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Origin": "file://"},
    {"Origin": "chrome-extension://abc"},
    {"Origin": ""},
]
OTHER_SITES = ["cross-site", "same-site", "anything"]


def filled(path: str) -> str:
    """A path of the table with something in the place of names."""
    return re.sub(r"{\w+}", "none", path)


def asked(url: str, route: ROUTE, headers: dict[str, str], content: bytes = b"{}") -> httpx.Response:
    method, path = route
    body = None if method == "GET" else content
    return HTTP.request(method, url + filled(path), headers=headers, content=body)


@pytest.fixture(scope="module", autouse=True)
def connections() -> Iterator[None]:
    with HTTP:
        yield


@pytest.fixture(scope="module")
def named(module_servers: MakeServer) -> ServerProcess:
    """Called by names as well."""
    return module_servers(
        public_url="http://Buffer.test:9000/", allowed_hosts="other.test, .lab.test,*.star.test", start_wait_s=60
    )


# --- the scenarios


def calls_python(marker: Path) -> Callable[[ScriptedCall], Reply]:
    """An engine of the attacker's: what it says is run by the task."""
    code = f"open({str(marker)!r}, 'w').write('pwned')"
    call = {"id": "c", "type": "function", "function": {"name": "python", "arguments": json.dumps({"code": code})}}

    def script(call_: ScriptedCall) -> Reply:
        is_first = all(message["role"] != "tool" for message in call_.messages)
        return Reply(text="", tool_calls=[call]) if is_first else Reply(text="\\boxed{4}")

    return script


def test_a_page_cannot_start_the_tool_task_against_an_engine_of_its_own(server: ServerProcess, tmp_path: Path) -> None:
    rows, marker = tmp_path / "rows.jsonl", tmp_path / "marker"
    rows.write_text('{"prompt": "2+2?", "label": "4"}\n')
    with ScriptedEngine(calls_python(marker)).in_thread() as engine:
        start = {
            "task_type": "tool",
            "num_repeat_per_sample": 1,
            "num_epoch": 1,
            "input_file": str(rows),
            "remote_engine_url": engine.url,
        }
        plain = {"Content-Type": "text/plain"}  # needs no leave of the server's
        before = server.client.get("/v1/runs").json()["runs"]
        for header in ({**PAGE, "Sec-Fetch-Site": "cross-site"}, PAGE, {"Origin": "null"}, REBOUND):
            refused = server.client.post("/start_rollout", content=json.dumps(start), headers=plain | header)
            assert refused.status_code == (421 if header is REBOUND else 403)
        assert server.client.get("/v1/runs").json()["runs"] == before
        assert engine.calls == []
        # The same from a program does run the engine's code: it was those headers that kept the page out.
        started = server.client.post("/start_rollout", content=json.dumps(start), headers=plain)
        assert started.status_code == 200, started.text
        poll_until(marker.exists)


def test_a_rebound_name_reads_no_reply(named: ServerProcess) -> None:
    run = named.start_run()
    run.write(*make_group("secret-task", [0.0, 1.0, 0.0, 1.0]))
    for path in ("/v1/runs", run.path, f"{run.path}/groups", "/openapi.json", "/metrics", "/", "/healthz", "/nothing"):
        seen = HTTP.get(named.url + path, headers={"Host": f"{EVIL}:{named.port}"})
        error = assert_error(seen, 421, "host_not_allowed")
        assert run.run_id not in seen.text
        assert "allowed_hosts" in error["hint"]
        assert "--insecure" in error["hint"]
    run.stop()


# --- every route


@pytest.mark.parametrize("route", sorted(told("Routes of the server")), ids=" ".join)
def test_every_route_of_the_server_is_closed_to_pages(named: ServerProcess, route: ROUTE) -> None:
    assert_error(asked(named.url, route, REBOUND), 421, "host_not_allowed")
    for headers in FOREIGN:
        assert "FOREBAY_TOKEN" in assert_error(asked(named.url, route, headers), 403, "foreign_origin")["hint"]
    for site in OTHER_SITES:
        answer = asked(named.url, route, {"Sec-Fetch-Site": site})
        assert (answer.status_code == 403) is (route[0] != "GET"), site
    for headers in ({}, {"Sec-Fetch-Site": "none"}, {"Sec-Fetch-Site": "same-origin", "Origin": named.url}):
        assert asked(named.url, route, headers).status_code not in (403, 421)


@pytest.mark.parametrize("method", ["OPTIONS", "DELETE", "PATCH", "HEAD"])
def test_no_preflight_and_no_other_method_is_answered_to_a_page(named: ServerProcess, method: str) -> None:
    asks = {**PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    for path in ("/v1/runs", "/start_rollout", "/buffer/write", "/nothing"):
        answer = HTTP.request(method, named.url + path, headers=asks)
        assert answer.status_code == 403
        assert not [name for name in answer.headers if name.startswith("access-control")]


# --- names


def status_of(server: ServerProcess, *headers: str, target: str = "/v1/runs", version: str = "1.1") -> int:
    return ask_raw(server.url, head("GET", target, *headers, version=version)).status


OWN = [
    "127.0.0.1",
    "127.0.0.1:9",
    "10.1.2.3:8889",
    "[::1]",
    "[::1]:8889",
    "[fe80::1%25eth0]:8889",
    "localhost",
    "LocalHost:1234",
    "localhost.",
    "app.localhost:80",
    socket.gethostname(),
    f"{socket.gethostname().partition('.')[0].upper()}:8889",
    "buffer.test:9000",
    "other.test",
    "OTHER.TEST.:80",
    "lab.test.lab.test",
    "a.b.lab.test:1",
    "x.star.test",
]


@pytest.mark.parametrize("name", OWN)
def test_names_of_the_machine_and_those_that_the_user_named_pass(named: ServerProcess, name: str) -> None:
    assert status_of(named, f"Host: {name}") == 200
    for scheme in ("http", "https"):  # a proxy in front may speak TLS
        assert status_of(named, f"Host: {name}", f"Origin: {scheme}://{name.lower()}") == 200


OTHERS = [
    EVIL,
    f"{EVIL}:8889",
    f"localhost.{EVIL}",
    f"127.0.0.1.{EVIL}",
    f"{socket.gethostname()}.{EVIL}",
    "evillocalhost",
    "lab.test",
    "star.test",
    "evilother.test",
    "evillab.test",
    f"127.0.0.1@{EVIL}",
    f"{EVIL}#.lab.test",
    f"{EVIL}/.lab.test",
    f"{EVIL}\\.lab.test",
    f"127.0.0.1, {EVIL}",
    "[::1].lab.test.evil",
    "[evil]",
    "::1",
    "127.0.0.1:80:80",
    "1.2.3.4.5",
    "\xeb.lab.test",
    "*",
    ".",
    "",
]


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_name_is_refused(named: ServerProcess, name: str) -> None:
    assert status_of(named, f"Host: {name}") == 421
    assert status_of(named, f"Host: {name}", f"Origin: http://{name}") == 421


def test_headers_that_come_twice_and_targets_with_a_name_hide_nothing(named: ServerProcess) -> None:
    ours, evil = f"Host: 127.0.0.1:{named.port}", f"Host: {EVIL}"
    assert status_of(named, ours, evil) == 421
    assert status_of(named, evil, ours) == 421
    assert status_of(named, ours, ours) == 200
    own, foreign = f"Origin: {named.url}", f"Origin: http://{EVIL}"
    assert status_of(named, ours, own, foreign) == 403
    assert status_of(named, ours, foreign, own) == 403
    assert status_of(named, ours, "Host: other.test", own) == 403
    assert status_of(named, ours, own, "Origin: http://other.test") == 403
    assert status_of(named, evil, target=f"http://127.0.0.1:{named.port}/v1/runs") == 421
    assert status_of(named, foreign) == 403
    written = ask_raw(named.url, head("POST", "/v1/gc", ours, "Sec-Fetch-Site: none", "Sec-Fetch-Site: cross-site"))
    assert written.status == 403


def test_a_request_without_a_host_is_a_programs(named: ServerProcess) -> None:
    assert status_of(named, version="1.0") == 200
    assert status_of(named) == 200


# --- what lifts the checks


def test_insecure_lets_names_through_and_no_pages(make_server: MakeServer) -> None:
    server = make_server(insecure=True)
    assert server.client.get("/v1/runs", headers=REBOUND).status_code == 200
    for headers in FOREIGN:
        assert_error(server.client.get("/v1/runs", headers=headers), 403, "foreign_origin")
    assert_error(server.client.post("/v1/gc", headers={"Sec-Fetch-Site": "cross-site"}), 403, "foreign_origin")


def test_where_a_token_is_asked_for_nothing_else_is(make_server: MakeServer) -> None:
    server = make_server(token="secret")
    headers = {**REBOUND, **PAGE, "Sec-Fetch-Site": "cross-site"}
    assert_error(server.client.get("/v1/runs", headers=headers), 401, "unauthorized")
    known = {"Authorization": "Bearer secret"}
    assert server.client.get("/v1/runs", headers=headers | known).status_code == 200
    assert server.client.post("/v1/gc", headers=headers | known).status_code == 200


@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["engine", "tiny", "--port", "0"]], ids=" ".join)
def test_a_name_that_is_none_is_told_at_the_start(tmp_path: Path, command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "forebay.server.cli", *command, "--allowed-hosts", "a.test,http://other.test"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "'http://other.test' is not a host name" in done.stderr
    assert "Traceback" not in done.stderr


# --- clients


def test_clients_of_a_server_with_a_name_notice_nothing(named: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def to_this_machine(host: Any, *rest: Any, **more: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        return resolve("127.0.0.1" if name in ("buffer.test", EVIL) else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", to_this_machine)
    run = named.start_run()
    run.write(*make_group("a", [0.0, 1.0, 0.0, 1.0]))
    with BufferClient(f"http://buffer.test:{named.port}") as client:
        client.attach(run.run_id)
        batch = client.read(num_groups=1)
        client.ack(batch)
    assert run.view()["groups"]["acked"] == 1
    answer = HTTP.get(f"http://{EVIL}:{named.port}/v1/runs")
    assert_error(answer, 421, "host_not_allowed")
    curl = subprocess.run(
        ["curl", "-sS", "-X", "POST", "-d", "{}", f"{named.url}{run.path}/stop"],
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=True,
    )
    assert json.loads(curl.stdout)["state"] == "stopped"


def test_no_page_of_the_servers_loads_scripts(named: ServerProcess) -> None:
    for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
        assert_error(named.client.get(path), 404, "no_such_route")
    assert "/v1/runs" in named.client.get("/openapi.json").json()["paths"]


# --- engines


@contextmanager
def tiny(*command: str) -> Iterator[str]:
    """The tiny engine as a process; its URL."""
    with subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = first_line(process.stdout, MODEL_LIMIT_S)
            yield json.loads(line)["url"]
        finally:
            process.kill()


@pytest.fixture(scope="module", params=["scripted", "tiny"])
def engine_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each embedded engine, with a name of its own."""
    if request.param == "scripted":
        with ScriptedEngine(lambda _: "4", allowed_hosts=["engine.test"]).in_thread() as engine:
            yield engine.url
    else:
        options = ["--port", "0", "--json", "--allowed-hosts", "engine.test"]
        with tiny("forebay.server.cli", "engine", "tiny", *options) as url:
            yield url


def test_every_route_of_an_engine_is_closed_to_pages(engine_url: str) -> None:
    for route in told("Routes of the embedded engines"):
        for headers, status in [(REBOUND, 421), *((each, 403) for each in FOREIGN)]:
            refused = asked(engine_url, route, headers, b"")
            assert refused.status_code == status, route
            assert refused.json()["code"] == status
        sent = asked(engine_url, route, {"Sec-Fetch-Site": "cross-site"}, b"")
        assert (sent.status_code == 403) is (route[0] != "GET"), route
        assert asked(engine_url, route, {}, b"").status_code not in (403, 421)


def test_an_engine_has_names_of_its_own(engine_url: str) -> None:
    for name in ("engine.test:30000", "localhost", socket.gethostname(), "[::1]:1"):
        assert ask_raw(engine_url, head("GET", "/health", f"Host: {name}")).status == 200
    refused = HTTP.get(f"{engine_url}/health", headers=REBOUND).json()["message"]
    assert "allowed_hosts" in refused
    assert "--insecure" in refused


def test_insecure_engines_let_names_through_and_no_pages() -> None:
    with (
        ScriptedEngine(lambda _: "4", insecure=True).in_thread() as scripted,
        tiny("forebay.engines.tiny", "--insecure") as tiny_url,
    ):
        for url in (scripted.url, tiny_url):
            assert HTTP.get(f"{url}/health", headers=REBOUND).status_code == 200
            assert HTTP.post(f"{url}/flush_cache", headers=PAGE).status_code == 403


def test_a_scripted_engine_is_told_of_a_name_that_is_none() -> None:
    with pytest.raises(InvalidInput, match="not a host name"):
        ScriptedEngine(lambda _: "4", allowed_hosts=["http://engine.test"])
