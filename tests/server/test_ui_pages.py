"""The page's files and headers, the viewer's token, and the overview that the page shows first."""

import httpx
import pytest

from tests.conftest import MakeServer
from tests.kit import ServerProcess, make_group, poll_until

TOKENS = {"token": "secret", "viewer_token": "look"}


@pytest.fixture(scope="module")
def guarded(module_servers: MakeServer) -> ServerProcess:
    return module_servers(**TOKENS)


def ask(server: ServerProcess, method: str, path: str, token: str) -> int:
    headers = {"authorization": f"Bearer {token}"}
    return httpx.request(method, f"{server.url}{path}", headers=headers, timeout=30).status_code


@pytest.mark.parametrize("path", ["", "charts", "main.mjs", "page.css", "plotly.min.js"])
def test_every_file_of_the_page_comes_without_a_token_and_may_load_nothing_from_elsewhere(
    guarded: ServerProcess, path: str
) -> None:
    reply = guarded.client.get(f"/ui/{path}")
    assert reply.status_code == 200
    policy = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == "'self'"
    assert ("'unsafe-inline'" in policy["style-src"]) == (path == "charts")
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("path", ["../pages.py", "%2e%2e/pages.py", "none.mjs", "charts/x"])
def test_no_other_file_is_served(guarded: ServerProcess, path: str) -> None:
    reply = guarded.client.get(f"/ui/{path}", headers={"authorization": "Bearer secret"})
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "no_such_route"


def test_the_viewers_token_reads_and_changes_nothing(guarded: ServerProcess) -> None:
    assert ask(guarded, "GET", "/v1/overview", "look") == 200
    assert ask(guarded, "GET", "/metrics", "look") == 200
    for method, path in (("POST", "/v1/runs"), ("POST", "/v1/gc"), ("DELETE", "/v1/runs/x"), ("POST", "/buffer/read")):
        assert ask(guarded, method, path, "look") == 401
        assert ask(guarded, method, path, "secret") != 401
    assert ask(guarded, "GET", "/v1/overview", "wrong") == 401


def test_the_overview_says_first_which_run_waits_for_which_engine(make_server: MakeServer) -> None:
    server = make_server()
    fine = server.start_run(name="fine")
    stuck = server.start_run(name="stuck", remote_engine_url="http://127.0.0.1:9")
    for run in (fine, stuck):
        run.write(*make_group("open", [1.0]))

    def first() -> str:
        found = server.client.get("/v1/overview").json()
        return str(found["findings"][0]["text"]) if found["findings"] else ""

    expected = "stuck: rollouts of 1 open group wait for http://127.0.0.1:9, which does not answer"
    assert poll_until(first) == expected
    shown = server.client.get("/v1/overview").json()
    assert [run["name"] for run in shown["runs"]] == ["stuck", "fine"]
    assert {group["instance_id"] for group in shown["open_groups"]} == {"open"}
    assert all(0 < group["left_s"] <= 300 for group in shown["open_groups"])
    assert [row["answers"] for row in shown["engines"]] == [False]


def test_the_history_has_the_figures_of_each_batch_and_what_was_discarded_before_it(make_server: MakeServer) -> None:
    run = make_server().start_run(group_size=2)
    batches = []
    for step, rewards in enumerate([[0.0, 1.0], [1.0, 3.0]]):
        run.write(*make_group(f"dull-{step}", [5.0, 5.0]))
        run.write(*make_group(f"good-{step}", rewards, weight_version=step))
        run.client.put(f"{run.path}/weight_version", json={"weight_version": 1}).raise_for_status()
        batches.append(run.take(num_groups=1, step=step))
        run.ack(batches[-1])
    reply = run.client.get(f"{run.path}/history").json()
    assert [each["batch_id"] for each in reply["batches"]] == [each["batch_id"] for each in batches]
    assert [each["step"] for each in reply["batches"]] == [0, 1]
    assert [each["rewards"]["mean"] for each in reply["batches"]] == [0.5, 2.0]
    assert [each["staleness"]["max"] for each in reply["batches"]] == [1, 0]
    assert [each["discarded"] for each in reply["batches"]] == [{"invalid": 1}, {"invalid": 1}]
    newer = run.client.get(f"{run.path}/history", params={"after": 1}).json()
    assert [each["number"] for each in newer["batches"]] == [2]
    listed = run.client.get(f"{run.path}/groups", params={"batch": batches[1]["batch_id"]}).json()["groups"]
    assert [(each["instance_id"], each["reason"]) for each in listed] == [("good-1", ""), ("dull-1", "invalid")]
    assert run.client.get(f"{run.path}/groups", params={"batch": "none"}).json()["error"]["code"] == "batch_not_found"
