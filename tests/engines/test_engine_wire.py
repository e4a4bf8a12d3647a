"""The scripted engine on the wire that the real one speaks."""

from collections.abc import AsyncIterator

import httpx
import pytest

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from tests.engines.engine_wire import LIMIT_S, EngineWire, Wire

SPEECH = "one two three four five " * 80


def speak(call: ScriptedCall) -> Reply:
    """Go on with the speech, slowly where much is asked for."""
    slowly = 500.0 if (call.limit or 0) > 100 else None
    return Reply(text=SPEECH[len(call.said) :], tokens_per_s=slowly)


class TestScripted(EngineWire):
    @pytest.fixture
    async def wire(self) -> AsyncIterator[Wire]:
        async with (
            ScriptedEngine(speak, model="tiny") as engine,
            httpx.AsyncClient(base_url=engine.url, timeout=LIMIT_S) as http,
        ):
            yield Wire(http, "somewhere")
