"""The real SGLang on the wire that our own engines imitate."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.engines.engine_wire import LIMIT_S, EngineWire, Wire

pytestmark = pytest.mark.sglang


class TestSGLang(EngineWire):
    @pytest.fixture
    async def wire(self, sglang_url: str, sglang_model: Path) -> AsyncIterator[Wire]:
        async with httpx.AsyncClient(base_url=sglang_url, timeout=LIMIT_S) as http:
            yield Wire(http, str(sglang_model))
            # The engine is shared.
            await http.post("/continue_generation", json={})
            restored = {"model_path": str(sglang_model), "weight_version": "default", "flush_cache": False}
            await http.post("/update_weights_from_disk", json=restored)
