"""Every route of the server, the gateway and the embedded engines; and the key that docs/security.md says it needs."""

import re
from collections.abc import Iterable
from pathlib import Path

from starlette.routing import BaseRoute, Route

from forebay.engines.fake_sglang.routes import create_app
from forebay.engines.scripted.answers import ScriptedBackend
from forebay.engines.scripted.script import PARSERS
from forebay.gateway.app import create_gateway
from forebay.gateway.spec import GatewaySpec
from forebay.server.app import create_api
from forebay.server.routes import read_batches, write_samples

PAGE = Path(__file__).parents[1] / "docs" / "security.md"
ROUTE = tuple[str, str]
"""Method and path."""

NOTHING = "nothing"
TOKEN = "token"
RUN_KEY = "run key"
CONTROL_KEY = "control key"
RUNS_GATEWAY_KEY = "run's gateway key"
ROLLOUT_KEY = "rollout key"

_NAMES = {"": "", "s": "/{name}", "w": "/{run_key}", "v1/runs": "/{run_id}"}
_ROW = re.compile(r"^\| `([A-Z]+) (/\S*)` \| ([^|]+?) \|", re.MULTILINE)


def told(heading: str) -> dict[ROUTE, str]:
    """The table of routes below a heading of the page."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n### {heading}\n")[2].partition("\n#")[0]
    rows = {(method, path): key for method, path, key in _ROW.findall(section)}
    assert rows, heading
    return rows


def server_routes() -> set[ROUTE]:
    """What the framework serves, its own document, and what goes past it."""
    api = create_api()
    described = {(method.upper(), path) for path, told in api.openapi()["paths"].items() for method in told}
    sampled = {("POST", f"/{kind}{_NAMES[kind]}/{end}".replace("//", "/")) for kind, end in _sample_paths()}
    return described | _methods(api.routes) | sampled


def _sample_paths() -> Iterable[ROUTE]:
    return write_samples.PATHS | read_batches.PATHS


def gateway_routes() -> set[ROUTE]:
    """Of agents, of runs and of the server."""
    app = create_gateway(GatewaySpec("control", "", max_body_bytes=1, max_bodies_bytes=1))
    return {(method, path.replace(":path}", "}")) for method, path in _methods(app.routes)}


def engine_routes() -> set[ROUTE]:
    """Of the scripted engine, which has all those of the tiny one."""
    return _methods(create_app(ScriptedBackend(lambda _: "", "any"), parsers=PARSERS).routes)


def _methods(routes: Iterable[BaseRoute]) -> set[ROUTE]:
    plain = [route for route in routes if isinstance(route, Route)]
    return {(method, route.path) for route in plain for method in route.methods or () if method != "HEAD"}
