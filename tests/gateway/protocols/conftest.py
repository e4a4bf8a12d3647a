"""The official clients before the translation before a scripted engine; one of each for a test file."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest_asyncio
from openai import AsyncOpenAI

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from forebay.web.serving import serve_app
from tests.gateway.protocols.app import ProtocolApp

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic  # seconds of loading, in workers that may run no test of it


class Front:
    """What the agent of one rollout sees, and what its engine saw. Call it to begin a new rollout."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine(self._say)
        self._replies: tuple[Reply | str, ...] = ()
        self._first = 0

    def serve(self, app: ProtocolApp, anthropic: "AsyncAnthropic", openai: AsyncOpenAI) -> None:
        self.app, self.anthropic, self.openai = app, anthropic, openai

    def __call__(self, *replies: Reply | str, remembers: bool = True) -> None:
        """From here on the engine says ``replies``, in order."""
        self._replies = replies
        self._first = len(self.engine.calls)
        self.app.begin(remembers=remembers)

    @property
    def calls(self) -> list[ScriptedCall]:
        """The calls of this rollout."""
        return self.engine.calls[self._first :]

    @property
    def chats(self) -> list[dict[str, Any]]:
        """What was sent to the engine."""
        return self.app.chats

    def _say(self, call: ScriptedCall) -> Reply | str:
        return self._replies[call.number - self._first]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front() -> AsyncIterator[Front]:
    """``front(*replies)`` begins a rollout."""
    from anthropic import AsyncAnthropic

    front = Front()
    async with front.engine:
        app = ProtocolApp(front.engine.url)
        async with serve_app(app.routes) as port:
            url = f"http://127.0.0.1:{port}"
            async with (
                AsyncAnthropic(base_url=url, api_key="key", max_retries=0) as anthropic,
                AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as openai,
            ):
                front.serve(app, anthropic, openai)
                yield front
        await app.close()


def tool_call(name: str, arguments: str, call_id: str = "call_1", index: int = 0) -> dict[str, Any]:
    """A call as an engine tells it."""
    return {"id": call_id, "index": index, "type": "function", "function": {"name": name, "arguments": arguments}}
