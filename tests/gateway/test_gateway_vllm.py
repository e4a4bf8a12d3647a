"""What vLLM names otherwise than SGLang does, on its way to agents."""

import json
from typing import Any

import httpx
import pytest

from tests.attack.hostile_engine import healthy_chat, hostile_engine
from tests.attack.real_gateway import real_gateway

THOUGHT = "two and two make four"


def answers() -> dict[str, bytes]:
    """An answer that is all reasoning, which vLLM calls ``reasoning``: whole, and as a stream."""
    chat = healthy_chat()
    message = {"role": "assistant", "content": None, "reasoning": THOUGHT}
    whole = {**chat, "choices": [{**chat["choices"][0], "message": message}]}
    delta = {"index": 0, "delta": message, "finish_reason": "stop"}
    chunks = [{**chat, "object": "chat.completion.chunk", "choices": [delta]}, {**chat, "choices": []}]
    stream = b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks) + b"data: [DONE]\n\n"
    return {"whole": json.dumps(whole).encode(), "stream": stream}


@pytest.mark.parametrize("mode", ["whole", "stream"])
@pytest.mark.parametrize("protocol", ["messages", "responses", "chat/completions"])
async def test_reasoning_of_vllm_reaches_agents(protocol: str, mode: str) -> None:
    prompt = [{"role": "user", "content": f"do: {mode}"}]
    fields: dict[str, Any] = {"input": prompt} if protocol == "responses" else {"messages": prompt}
    with hostile_engine(bodies=answers()) as engine:
        async with real_gateway(engine.url) as gateway, httpx.AsyncClient(timeout=60) as http:
            rollout = await gateway.open(deadline_s=600)
            base = f"{rollout.anthropic_url}/v1" if protocol == "messages" else rollout.base_url
            body = {"model": "vllm", "max_tokens": 9, "stream": mode == "stream", **fields}
            if protocol == "responses":
                body["max_output_tokens"] = body.pop("max_tokens")
            headers = {"Authorization": f"Bearer {rollout.key}"}
            reply = await http.post(f"{base}/{protocol}", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    assert THOUGHT in reply.text
    if protocol == "chat/completions":
        assert f'"reasoning_content":"{THOUGHT}"' in reply.text.replace('": "', '":"')
