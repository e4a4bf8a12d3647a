"""A rollout's key opens that rollout, until its end, and nothing else anywhere."""

import httpx
import pytest
from starlette.routing import Route

from forebay.gateway.app import create_gateway
from forebay.gateway.spec import GatewaySpec
from forebay.server.app import create_api
from tests.conftest import MakeServer
from tests.gateway.conftest import Stage
from tests.gateway.gateway_kit import CONTROL_KEY, RUN_KEY, USER, OpenedAt
from tests.kit import ServerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAMES = {"run_id": "run-0123456789ab", "rest": "v1/images", "response_id": "resp-1", "model": "m"}
BODY = {"model": "m", "messages": [USER], "input": "2+2?", "max_tokens": 8}


def gateway_routes() -> list[tuple[str, str]]:
    """Method and path of every route, with names in place of what varies but for the rollout."""
    app = create_gateway(GatewaySpec("control", "", max_body_bytes=1, max_bodies_bytes=1))
    routes = [route for route in app.routes if isinstance(route, Route)]
    filled = [(method, route.path.replace(":path}", "}")) for route in routes for method in sorted(route.methods or ())]
    return [(method, path) for method, path in filled if method != "HEAD" and path != "/gateway/healthz"]


def server_routes() -> list[tuple[str, str]]:
    paths = create_api().openapi()["paths"]
    return [(method.upper(), path) for path, methods in paths.items() for method in methods]


async def ask(rollout: OpenedAt, method: str, path: str, rollout_id: str, key: str) -> list[httpx.Response]:
    """The same request with the key as OpenAI's clients send it, and as Anthropic's do."""
    url = rollout.gateway.url + path.format(**NAMES, rollout_id=rollout_id)
    headers = [{"Authorization": f"Bearer {key}"}, {"x-api-key": key}]
    http = rollout.gateway.http
    return [await http.request(method, url, json=BODY, headers=each) for each in headers]


AGENT_ROUTES = [route for route in gateway_routes() if route[1].startswith("/gateway/{rollout_id}/")]
CONTROL_ROUTES = [route for route in gateway_routes() if route not in AGENT_ROUTES]


async def test_all_routes_are_looked_at() -> None:
    assert {path for _, path in CONTROL_ROUTES} == {
        "/gateway/runs/{run_id}",
        "/gateway/rollouts",
        "/gateway/rollouts/{rollout_id}",
        "/gateway/rollouts/{rollout_id}/close",
        "/gateway/broken",
    }
    assert len(AGENT_ROUTES) > 10


async def test_a_key_is_refused_for_another_rollout_and_after_its_end(stage: Stage) -> None:
    stage("4")
    one, other, ended = [await stage.open() for _ in range(3)]
    await ended.close()
    wrong = [
        (other.rollout_id, one.key),
        (ended.rollout_id, ended.key),
        (one.rollout_id, RUN_KEY),
        (one.rollout_id, CONTROL_KEY),
        (one.rollout_id, "none"),
        (one.rollout_id, one.key[:-1]),
        ("rollouts", one.key),
    ]
    for method, path in AGENT_ROUTES:
        for rollout_id, key in wrong:
            for reply in await ask(one, method, path, rollout_id, key):
                assert reply.status_code == 401, (method, path, reply.text)
                assert reply.json()["error"]["message"].startswith("there is no open rollout")
    assert stage.calls == []
    for method, path in AGENT_ROUTES:
        for reply in await ask(one, method, path, one.rollout_id, one.key):
            assert reply.status_code != 401, (method, path)


async def test_a_rollouts_key_opens_no_route_of_runs_or_of_the_server(stage: Stage) -> None:
    rollout = await stage.open()
    for method, path in CONTROL_ROUTES:
        for reply in await ask(rollout, method, path, rollout.rollout_id, rollout.key):
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "unauthorized"), (method, path)
    await rollout.chat()


async def test_a_runs_key_registers_no_runs(stage: Stage) -> None:
    rollout = await stage.open()
    for method in ("PUT", "DELETE"):
        for reply in await ask(rollout, method, "/gateway/runs/{run_id}", rollout.rollout_id, RUN_KEY):
            assert reply.status_code == 401
    await rollout.chat()


async def test_one_run_neither_sees_nor_closes_anothers_rollout(stage: Stage) -> None:
    rollout = await stage.open()
    await stage.gateway.register(stage.engine.url, run_id="run-another000000", key="another")
    for method, path in (("GET", rollout.rollout_id), ("POST", f"{rollout.rollout_id}/close")):
        assert (await stage.gateway.ask(method, f"rollouts/{path}", key="another")).status_code == 404
    same_name = await stage.gateway.open(rollout.rollout_id, key="another")
    await same_name.chat()
    await rollout.chat()


@pytest.fixture(scope="module")
def guarded(module_servers: MakeServer) -> ServerProcess:
    return module_servers(token="secret")


async def test_a_rollouts_key_opens_no_route_of_the_server(stage: Stage, guarded: ServerProcess) -> None:
    rollout = await stage.open()
    names = {"name": "n", "run_key": rollout.key, "batch_id": "b", "group_id": "g", "digest": "d", **NAMES}
    for method, path in server_routes():
        is_open = path in ("/", "/healthz", "/readyz")
        status = 200 if is_open else 404 if path.startswith("/w/") else 401
        url = guarded.url + path.format(**names)
        for headers in ({"Authorization": f"Bearer {rollout.key}"}, {"x-api-key": rollout.key}):
            reply = await stage.gateway.http.request(method, url, headers=headers, json={})
            assert reply.status_code == status, (method, path, reply.text)
