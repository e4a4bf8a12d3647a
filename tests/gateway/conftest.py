"""One engine and one gateway for all tests of a file; each test scripts the engine and opens rollouts of its own."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from forebay.engines.scripted import Reply, Script, ScriptedCall, ScriptedEngine
from tests.engines.fake_vllm import FakeVLLM
from tests.gateway.gateway_kit import LIMIT_S, GatewayAt, OpenedAt, gateway_before


class Stage:
    """``stage(script)`` begins a test: from here on the engine says what ``script`` does."""

    def __init__(self, kind: type[ScriptedEngine] = ScriptedEngine) -> None:
        self.engine = kind(self._say)
        self.gateway: GatewayAt
        self._script: Script = lambda _: "4"
        self._first = 0
        self._num_opened = 0

    def __call__(self, script: Script | Reply | str) -> None:
        self._script = script if callable(script) else lambda _: script
        self._first = len(self.engine.calls)

    def _say(self, call: ScriptedCall) -> Any:
        return self._script(call)

    @property
    def calls(self) -> list[ScriptedCall]:
        """What the engine was asked since the test began."""
        return self.engine.calls[self._first :]

    async def open(self, **fields: Any) -> OpenedAt:
        """A rollout with an id of its own."""
        self._num_opened += 1
        return await self.gateway.open(f"r-{self._num_opened}", **fields)

    async def busy(self, num: int = 1) -> None:
        """Return once the engine works on so many choices."""
        await self.engine.wait_in_flight(num, timeout_s=LIMIT_S)

    async def abort(self, call: ScriptedCall | None) -> None:
        """As a trainer does it before it updates the weights: one call, or every call."""
        is_vllm = isinstance(self.engine, FakeVLLM)
        if call is None:
            path, body = ("abort_requests", {}) if is_vllm else ("abort_request", {"abort_all": True})
        elif is_vllm:
            path, body = "abort_requests", {"request_ids": [call.body["own_id"]]}
        else:
            path, body = "abort_request", {"rid": call.rid}
        (await self.gateway.http.post(f"{self.engine.url}/{path}", json=body)).raise_for_status()

    def key_of(self, call: ScriptedCall) -> str:
        """The key of the cache that a call was sent with."""
        return str(call.body["cache_salt" if isinstance(self.engine, FakeVLLM) else "extra_key"])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of a module on each of its ``ENGINES``."""
    kinds = getattr(metafunc.module, "ENGINES", None)
    if kinds and "stage" in metafunc.fixturenames:
        metafunc.parametrize("stage", list(kinds.values()), indirect=True, ids=list(kinds), scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    """The engine, of the kind that a module asks for, and the gateway before it with one run."""
    stage = Stage(getattr(request, "param", ScriptedEngine))
    async with stage.engine, gateway_before(stage.engine.url) as stage.gateway:
        yield stage


def codes_of(replies: list[httpx.Response]) -> list[tuple[int, str]]:
    """Status and code of errors in OpenAI's words."""
    return [(reply.status_code, reply.json()["error"]["code"]) for reply in replies]
