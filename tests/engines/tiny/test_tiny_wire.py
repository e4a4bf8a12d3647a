"""The embedded engine on the wire that the real one speaks."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.engines.engine_wire import LIMIT_S, EngineWire, Wire


class TestTiny(EngineWire):
    @pytest.fixture
    async def wire(self, own_engine_url: str, model_folder: Path) -> AsyncIterator[Wire]:
        async with httpx.AsyncClient(base_url=own_engine_url, timeout=LIMIT_S) as http:
            yield Wire(http, str(model_folder))
