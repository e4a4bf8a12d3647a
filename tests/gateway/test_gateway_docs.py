"""What docs/gateway.md says is so."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.gateway import refusals
from forebay.gateway.refusals import GatewayRefusal
from tests.gateway.conftest import Stage
from tests.gateway.gateway_kit import assert_whole
from tests.gateway.test_gateway_keys import gateway_routes

PAGE = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text(encoding="utf-8")
HEADINGS = "\n".join(line for line in PAGE.splitlines() if line.startswith("#"))


def test_every_route_has_a_heading_and_no_other() -> None:
    told = set(re.findall(r"`((?:GET|POST|PUT|DELETE) [^`]+)`", HEADINGS))
    routes = {f"{method} {path}" for method, path in gateway_routes() if "{rest}" not in path}
    assert told == routes | {"GET /gateway/healthz"}


@pytest.mark.parametrize("kind", GatewayRefusal.__subclasses__())
def test_every_error_of_the_gateway_is_told_with_its_status(kind: type[GatewayRefusal]) -> None:
    assert kind.__module__ == refusals.__name__
    assert re.search(rf"`{kind.code}`\s+\({int(kind.status)}", PAGE)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_rollout_by_hand_works(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    import httpx

    stage("4")
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1], names)
    admitted = {"url": stage.gateway.url, "key": "run-key"}
    monkeypatch.setattr(httpx, "post", lambda *_, **__: SimpleNamespace(json=lambda: admitted))
    assert_whole(await asyncio.to_thread(names["run_agent"], {"remote_buffer_url": "http://server/w/key"}))
