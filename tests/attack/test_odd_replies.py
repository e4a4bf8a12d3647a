"""Odd fields of an engine's answer, in every protocol of agents: never an error of the gateway's own."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.attack.hostile_engine import healthy_chat, hostile_engine
from tests.attack.real_gateway import real_gateway
from tests.gateway.gateway_kit import OpenedAt

Json = dict[str, Any]

ODD: dict[str, object] = {
    "null": None,
    "true": True,
    "zero": 0,
    "huge": 10**30,
    "huge_float": 1e300,
    "negative": -3,
    "fraction": 0.5,
    "text": "odd",
    "digits": "7",
    "list": [1],
    "lists": [[1], None],
    "empty_list": [],
    "object": {"odd": [1]},
    "empty_object": {},
    "objects": [{"odd": {}}],
}
PLACES = [
    *(("usage",), ("usage", "prompt_tokens"), ("usage", "completion_tokens"), ("usage", "total_tokens")),
    *(("usage", "prompt_tokens_details"), ("usage", "prompt_tokens_details", "cached_tokens")),
    *(("usage", "completion_tokens_details"), ("usage", "completion_tokens_details", "reasoning_tokens")),
    *(("usage", "reasoning_tokens"), ("model",), ("created",), ("id",), ("object",), ("metadata",)),
    *(("metadata", "weight_version"), ("metadata", "e2e_latency"), ("metrics",)),
    *(("choices", 0, name) for name in ("finish_reason", "matched_stop", "logprobs", "meta_info", "index", "delta")),
    ("choices", 0, "logprobs", "content"),
    *(("choices", 0, "logprobs", "content", 0, name) for name in ("token", "logprob", "bytes", "top_logprobs")),
    *(("choices", 0, "meta_info", name) for name in ("e2e_latency", "queue_time", "cached_tokens", "weight_version")),
    *(("choices", 0, "meta_info", name) for name in ("weight_versions", "finish_reason", "num_retractions")),
    *(("choices", 0, "message", name) for name in ("role", "content", "reasoning_content", "tool_calls", "refusal")),
    *(("choices", 0, "message", "tool_calls", 0, name) for name in ("id", "index", "type", "function")),
    *(("choices", 0, "message", "tool_calls", 0, "function", name) for name in ("name", "arguments")),
    *(("choices", 0, "prompt_token_ids"), ("choices", 0, "response_token_ids"), ("sglext",), ("error",)),
    *(("error", "message"), ("error", "code")),
]
CALL = {"id": "call_1", "index": 0, "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
"""In every answer: its fields are among those that get odd."""
MISSING = object()


def answer() -> Json:
    chat = healthy_chat()
    chat["choices"][0]["message"]["tool_calls"] = [CALL]
    chat["usage"] |= {"prompt_tokens_details": {"cached_tokens": 1}, "completion_tokens_details": {}}
    return chat


def odd(place: tuple[str | int, ...], value: object) -> Json:
    """An answer with ``value`` in this place, or without it."""
    chat: Json = json.loads(json.dumps(answer()))
    at: Any = chat
    for name in place[:-1]:
        at = at.setdefault(name, {}) if isinstance(at, dict) else at[name]
    if value is MISSING:
        at.pop(place[-1], None)
    else:
        at[place[-1]] = value
    return chat


def chunks(chat: Json) -> bytes:
    """The answer as a stream."""
    choices = [
        {("delta" if name == "message" else name): value for name, value in choice.items()}
        for choice in chat["choices"]
    ]
    told = [{**chat, "object": "chat.completion.chunk", "choices": choices}, {**chat, "choices": []}]
    return b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in told) + b"data: [DONE]\n\n"


def modes() -> Iterator[tuple[str, Json]]:
    for number, place in enumerate(PLACES):
        for name, value in {**ODD, "missing": MISSING}.items():
            yield f"odd_{number}_{name}", odd(place, value)


async def ask(rollout: OpenedAt, http: httpx.AsyncClient, protocol: str, **fields: object) -> httpx.Response:
    """One call of an agent, whose prompt says what the engine answers."""
    prompt = fields.pop("prompt")
    messages = [{"role": "user", "content": prompt}]
    url, body = {
        "chat": (f"{rollout.base_url}/chat/completions", {"messages": messages}),
        "messages": (f"{rollout.anthropic_url}/v1/messages", {"messages": messages, "max_tokens": 9}),
        "responses": (
            f"{rollout.base_url}/responses",
            {"input": prompt, "include": ["message.output_text.logprobs"]},
        ),
    }[protocol]
    headers = {"Authorization": f"Bearer {rollout.key}"}
    return await http.post(url, json={"model": "scripted", **body, **fields}, headers=headers)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("protocol", ["chat", "messages", "responses"])
async def test_an_odd_field_is_ignored_or_fails_the_call_as_the_engines(protocol: str, is_stream: bool) -> None:
    answers = dict(modes())
    bodies = {name: chunks(each) if is_stream else json.dumps(each).encode() for name, each in answers.items()}
    wrong = {}
    with hostile_engine(bodies=bodies) as engine:
        async with real_gateway(engine.url) as gateway, httpx.AsyncClient(timeout=60) as http:
            rollout = await gateway.open(deadline_s=600)
            for name in bodies:
                try:
                    reply = await ask(rollout, http, protocol, prompt=f"do: {name}", stream=is_stream)
                except httpx.HTTPError as error:
                    wrong[name] = repr(error)
                else:
                    if reply.status_code not in (200, 502):
                        wrong[name] = f"{reply.status_code} {reply.text[:200]}"
    assert not wrong, "\n".join(f"{PLACES[int(k.split('_')[1])]} {k}: {v}" for k, v in wrong.items())


async def test_so_it_is_with_what_is_passed_on() -> None:
    """Models and counts of tokens, which are read for Anthropic's protocol."""
    cards = {f"model_{name}": {"id": "m", "created": value} for name, value in ODD.items()}
    counts = {f"count_{name}": {"count": value} for name, value in ODD.items()}
    errors = {f"error_{name}": {"error": value} for name, value in ODD.items()}
    answers = {**cards, **counts, **errors, "cards": {"data": [1]}, "no_cards": {"data": {}}, "nothing": {}}
    bodies = {name: json.dumps(each).encode() for name, each in answers.items()}
    wrong = {}
    with hostile_engine(bodies=bodies) as engine:
        async with real_gateway(engine.url) as gateway, httpx.AsyncClient(timeout=60) as http:
            rollout = await gateway.open(deadline_s=600)
            headers = {"Authorization": f"Bearer {rollout.key}"}
            for engine.admin_mode in bodies:
                for url, body in ((f"{rollout.anthropic_url}/v1/models", None), *count_calls(rollout)):
                    reply = await http.request("POST" if body else "GET", url, json=body, headers=headers)
                    if reply.status_code not in (200, 502):
                        wrong[engine.admin_mode, url] = reply.text
    assert not wrong


def count_calls(rollout: OpenedAt) -> list[tuple[str, Json]]:
    messages = [{"role": "user", "content": "hello"}]
    return [(f"{rollout.anthropic_url}/v1/messages/count_tokens", {"model": "m", "messages": messages})]
