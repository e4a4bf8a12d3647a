"""What vLLM says on the wire: the same calls, asked of the fake and of the real one, which is 0.32."""

import json
from typing import Any

import httpx

from forebay.engines.abc import EngineLoad
from forebay.engines.capture.read_reply import turns_of_chat
from forebay.engines.capture.turn import Turn
from forebay.engines.continuation.message import Whole
from forebay.engines.continuation.vllm import as_chat
from forebay.engines.dialect import CHATS, VLLM
from forebay.engines.router_workers import admin_client
from tests.engines.engine_wire import LIMIT_S, NOTHING, check

__all__ = ["LIMIT_S", "VLLMWire"]

MESSAGES = [{"role": "user", "content": "what is 1 + 2?"}]
CHAT = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "ignore_eos": True}
TOKENS = {"token_ids": [int], "logprobs": {"content": [{"token": str, "logprob": float}]}}
WHOLE = {
    "id": "chatcmpl-fb-1",
    "object": "chat.completion",
    "prompt_token_ids": [int],
    "choices": [{"index": 0, "message": {"content": str, "reasoning": NOTHING}, "finish_reason": "length", **TOKENS}],
    "usage": {"prompt_tokens": int, "completion_tokens": 6},
}
HEAD = {"object": "chat.completion.chunk", "id": "chatcmpl-fb-1"}
OPENING = {**HEAD, "prompt_token_ids": [int], "choices": [{"delta": {"role": "assistant"}, "finish_reason": NOTHING}]}
CHUNK = {
    **HEAD,
    "choices": [{"delta": dict, "token_ids": list, "logprobs": {"content": list}}],
    "usage": {"completion_tokens": int},
}


class VLLMWire:
    """The calls. A subclass gives the fixture ``wire``."""

    async def test_a_whole_chat(self, wire: httpx.AsyncClient) -> None:
        body = VLLM.ask({**CHAT, "request_id": "fb-1", "cache_salt": "0123456789abcdef.own"}, is_stream=False)
        told = (await wire.post(CHATS, json=body)).raise_for_status().json()
        check(told, WHOLE)
        assert len(told["choices"][0]["token_ids"]) == len(told["choices"][0]["logprobs"]["content"]) == 6

    async def test_a_stream(self, wire: httpx.AsyncClient) -> None:
        body = VLLM.ask({**CHAT, "request_id": "fb-1", "stream": True}, is_stream=True)
        reply = (await wire.post(CHATS, json=body)).raise_for_status()
        *lines, end = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
        assert end == "[DONE]"
        opening, *grown, usage = map(json.loads, lines)
        check(opening, OPENING)
        check(grown, [CHUNK])
        assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in grown) == 6 == usage["usage"]["completion_tokens"]
        assert grown[-1]["choices"][0]["finish_reason"] == "length"
        assert usage["choices"] == []

    async def test_a_chat_goes_on_from_its_token_ids(self, wire: httpx.AsyncClient) -> None:
        first = await self._turn(wire, {**CHAT, "request_id": "fb-1"})
        held = [*(first.prompt_ids or ()), *(first.sampled_ids or ())]
        # The limit is the default of vLLM's sampling parameters.
        rest = await self._turn(wire, {**CHAT, "request_id": "fb-2", "input_ids": held, "max_tokens": 16})
        assert rest.prompt_ids == held
        assert len(rest.sampled_ids or ()) == len(rest.logprobs or ()) == 16
        assert [span.end for span in rest.versions] == [16]
        assert rest.finish_reason == "length"

    async def test_a_message_is_read_from_its_tokens(self, wire: httpx.AsyncClient) -> None:
        first = await self._turn(wire, {**CHAT, "request_id": "fb-1", "logprobs": True})
        async with admin_client(None) as http:
            read = await VLLM.whole_message(http, str(wire.base_url).rstrip("/"), first, CHAT)
        assert isinstance(read, Whole)
        assert (read.message["content"], read.num_tokens, read.finish_reason) == (first.reply["content"], 6, "length")

    async def test_what_it_tells_of_itself(self, wire: httpx.AsyncClient) -> None:
        async with admin_client(None) as http:
            admin = VLLM.admin(http, str(wire.base_url).rstrip("/"))
            assert await admin.load() == EngineLoad()
            info = await admin.model_info()
            assert info is not None
            assert info.model == "tiny"
            assert info.weight_version
            await admin.check_pauses()
            defaults = await VLLM.defaults(http, admin.url)
            assert defaults is not None
            assert (defaults.logprobs, dict(defaults.chat)) == ("raw", {})

    async def _turn(self, wire: httpx.AsyncClient, body: dict[str, Any]) -> Turn:
        async with admin_client(None) as http:
            path, sent = await VLLM.addressed(http, str(wire.base_url).rstrip("/"), VLLM.ask(body, is_stream=False))
        reply = (await wire.post(path, json=sent)).raise_for_status()
        content = reply.content if path == CHATS else as_chat(reply.content)
        (turn,) = turns_of_chat(body, json.loads(content))
        return turn
