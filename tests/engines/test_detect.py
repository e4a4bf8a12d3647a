"""Which kind of engine answers at an address."""

from typing import Any

import pytest

from forebay.core.errors import EngineUnavailable
from forebay.engines.detect import DetectedEngine
from forebay.engines.openai import OpenAIEngine
from forebay.engines.scripted import ScriptedEngine
from forebay.engines.sglang import SGLangEngine


@pytest.mark.parametrize(
    ("bodies", "kind"),
    [
        ({"/model_info": {"model_path": "m"}}, SGLangEngine),
        ({"/get_model_info": {"model_path": "m"}}, SGLangEngine),
        ({"/workers": {"workers": []}}, SGLangEngine),
        ({"/v1/models": {"data": []}}, OpenAIEngine),
        ({}, OpenAIEngine),
    ],
)
async def test_kind_of_engine_is_found_out(bodies: dict[str, Any], kind: type, serve_json: Any) -> None:
    async with serve_json(bodies) as url, DetectedEngine(url) as engine:
        assert type(await engine.found()) is kind
        assert await engine.found() is await engine.found()


async def test_starting_server_is_not_taken_for_a_plain_one() -> None:
    async with ScriptedEngine(lambda _: "") as server, DetectedEngine(server.url) as engine:
        server.available = False
        with pytest.raises(EngineUnavailable):
            await engine.found()
        server.available = True
        assert type(await engine.found()) is SGLangEngine
