"""The same calls to SGLang's own Messages and Responses routes and to our translation, compared field by field."""

import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from forebay.web.serving import serve_app
from tests.gateway.protocols.app import ProtocolApp
from tests.sglang.conftest import ENGINE_FLAGS, ENGINE_OPTIONS, HERE, free_port, running, wait_until_ok

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module")]
Json = dict[str, Any]

# It shows everything that it is given, so that the count of its tokens tells a difference.
TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{%- for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PARSERS = ["--reasoning-parser", "qwen3", "--tool-call-parser", "qwen25", "--constrained-json-disable-any-whitespace"]

OURS_ALONE = {
    *("signature", "stop_sequence", "cache_creation_input_tokens", "cache_read_input_tokens"),
    *("background", "completed_at", "max_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier"),
    *("top_logprobs", "text"),
}
"""Fields of the official protocols that SGLang leaves out."""
DIFFERENT = {"id", "item_id", "call_id", "created_at", "max_output_tokens", "cached_tokens"}
"""Random, of another time, or told by SGLang's own routes alone; its `max_output_tokens` are two fewer."""

SCHEMA: Json = {
    "type": "object",
    "properties": {"town": {"type": "string", "enum": ["Bonn", "Rome"]}},
    "required": ["town"],
    "additionalProperties": False,
}
# One value and no other: a random model would write blanks for ever wherever JSON lets it.
ARGUMENTS: Json = {"type": "object", "enum": [{"town": "Bonn"}]}
HELLO = {"role": "user", "content": "what is 1 + 2?"}
CALL = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"town": "Bonn"}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "rain"}]}
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}, {"type": "input_text", "text": "there"}]},
    {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"town":"Bonn"}'},
    {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "rain"}]},
]
MESSAGES: dict[str, Json] = {
    "text": {},
    "system": {"system": [{"type": "text", "text": "be brief"}, {"type": "text", "text": "and kind"}]},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "sampling": {"temperature": 0.0, "top_p": 0.9, "top_k": 5, "metadata": {"user_id": "7"}},
    "parallel": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "tools": "weather"},
    "forced": {"tool_choice": {"type": "tool", "name": "weather"}, "tools": "weather", "max_tokens": 96},
    "history": {"messages": [HELLO, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [RESULT]}]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in ("a", "b")]}]},
    "schema": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "max_tokens": 32},
}
RESPONSES: dict[str, Json] = {
    "text": {},
    "instructions": {"instructions": "be brief", "metadata": {"task": "7"}, "user": "me"},
    "thinking": {"chat_template_kwargs": {"enable_thinking": True}},
    "sampling": {"top_p": 0.9, "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1},
    "forced": {
        "tool_choice": {"type": "function", "name": "weather"},
        "tools": "weather",
        "max_output_tokens": 96,
    },
    "history": {"input": ITEMS, "tools": "weather"},
    "schema": {"text": {"format": {"type": "json_schema", "name": "t", "schema": SCHEMA}}, "max_output_tokens": 32},
}
REFUSED: dict[str, tuple[str, Json]] = {
    "no max_tokens": ("messages", {"max_tokens": ...}),
    "no messages": ("messages", {"messages": []}),
    "an image": (
        "messages",
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}]}
            ]
        },
    ),
    "no such answer": ("responses", {"previous_response_id": "resp_none"}),
    "too long": ("responses", {"max_output_tokens": 100_000}),
    "a bad temperature": ("responses", {"temperature": -1}),
}


@pytest.fixture(scope="module")
def engine_url(sglang_python: str, sglang_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An engine with parsers and a template that shows tools."""
    folder = tmp_path_factory.mktemp("protocols")
    model = Path(shutil.copytree(sglang_model, folder / "model"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    port = free_port()
    options = {**ENGINE_OPTIONS, "--model-path": model, "--port": port}
    words = [word for option in options.items() for word in option]
    command = [sglang_python, HERE / "launch_engine.py", *words, *ENGINE_FLAGS, *PARSERS, "--enable-response-store"]
    with running(command, folder / "engine.log"):
        wait_until_ok(f"http://127.0.0.1:{port}/model_info")
        yield f"http://127.0.0.1:{port}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def our_url(engine_url: str) -> AsyncIterator[str]:
    """The translation before that engine."""
    app = ProtocolApp(engine_url)
    async with serve_app(app.routes) as port:
        yield f"http://127.0.0.1:{port}"
    await app.close()


def body_of(path: str, changes: Json) -> Json:
    if path == "messages":
        tool = {"name": "weather", "description": "The weather.", "input_schema": ARGUMENTS, "strict": True}
        base: Json = {"messages": [HELLO], "max_tokens": 8, "thinking": {"type": "disabled"}}
    else:
        tool = {"type": "function", "name": "weather", "description": "The weather.", "parameters": ARGUMENTS}
        tool["strict"] = True
        base = {"input": "what is 1 + 2?", "max_output_tokens": 8, "chat_template_kwargs": {"enable_thinking": False}}
    body = {"model": "tiny", "temperature": 0, **base, **changes}
    tools = {"tools": [tool]} if "tools" in changes else {}
    return {name: value for name, value in {**body, **tools}.items() if value is not ...}


def told(value: Any) -> Any:
    """What must be the same on both sides."""
    if isinstance(value, list):
        return [told(item) for item in value]
    if not isinstance(value, dict):
        return value
    left_out = OURS_ALONE | DIFFERENT
    if value.get("type") in {"message", "reasoning", "function_call"} and "stop_reason" not in value:
        left_out = left_out | {"status"}  # of an item; SGLang calls the last one of a cut answer completed
    if value.get("type") == "message_delta":
        value = {**value, "usage": {"output_tokens": value["usage"]["output_tokens"]}}
    kept = {name: told(item) for name, item in value.items() if name not in left_out and item is not None}
    return {name: item for name, item in kept.items() if (name, item) != ("summary", [])}


async def ask(url: str, path: str, body: Json, *, is_native: bool) -> httpx.Response:
    if is_native and "max_output_tokens" in body:
        body = {**body, "max_output_tokens": body["max_output_tokens"] + 2}
    async with httpx.AsyncClient(timeout=120) as http:
        return await http.post(f"{url}/v1/{path}", json=body)


def events(reply: httpx.Response) -> list[Json]:
    """The events of a stream, with the deltas that follow each other joined: how many there are is a matter of load."""
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    joined: list[Json] = []
    for event in map(json.loads, lines):
        event.pop("sequence_number", None)
        if event["type"] == "response.output_item.added":
            event["item"].pop("phase", None)  # SGLang holds a message back until it knows whether a call follows
        if event["type"] == "content_block_delta" and event["delta"]["type"] == "signature_delta":
            continue  # SGLang signs no thought, and many clients drop it then
        if joined and event["type"] == joined[-1]["type"] and "delta" in event:
            joined[-1]["delta"] = added(joined[-1]["delta"], event["delta"])
        else:
            joined.append(event)
    return joined


def added(delta: Any, more: Any) -> Any:
    if isinstance(delta, str):
        return delta + more
    return {name: value if name == "type" else value + more[name] for name, value in delta.items()}


CASES = [("messages", name) for name in MESSAGES] + [("responses", name) for name in RESPONSES]


@pytest.mark.parametrize(("path", "name"), CASES)
async def test_a_whole_answer_is_the_engines_own(engine_url: str, our_url: str, path: str, name: str) -> None:
    body = body_of(path, (MESSAGES if path == "messages" else RESPONSES)[name])
    native, ours = await ask(engine_url, path, body, is_native=True), await ask(our_url, path, body, is_native=False)
    assert (native.status_code, ours.status_code) == (200, 200), (native.text, ours.text)
    assert told(ours.json()) == told(native.json())


@pytest.mark.parametrize(("path", "name"), CASES)
async def test_a_streamed_answer_is_the_engines_own(engine_url: str, our_url: str, path: str, name: str) -> None:
    body = {**body_of(path, (MESSAGES if path == "messages" else RESPONSES)[name]), "stream": True}
    native, ours = await ask(engine_url, path, body, is_native=True), await ask(our_url, path, body, is_native=False)
    assert told(events(ours)) == told(events(native))


@pytest.mark.parametrize("name", REFUSED)
async def test_an_error_is_the_engines_own(engine_url: str, our_url: str, name: str) -> None:
    path, changes = REFUSED[name]
    body = body_of(path, changes)
    native, ours = await ask(engine_url, path, body, is_native=True), await ask(our_url, path, body, is_native=False)
    assert (ours.status_code, ours.json()) == (native.status_code, native.json())


async def test_tokens_are_counted_as_the_engine_counts_them(engine_url: str, our_url: str) -> None:
    body = body_of("messages", {**MESSAGES["history"], "tools": "weather", "max_tokens": ..., "temperature": ...})
    asked = [await ask(url, "messages/count_tokens", body, is_native=False) for url in (engine_url, our_url)]
    assert asked[0].json() == asked[1].json()
    assert asked[0].json()["input_tokens"] > 100


async def test_the_official_clients_get_the_same_whole_and_streaming(our_url: str) -> None:
    messages, answers = body_of("messages", MESSAGES["schema"]), body_of("responses", RESPONSES["text"])
    async with (
        AsyncAnthropic(base_url=our_url, api_key="key") as anthropic,
        AsyncOpenAI(base_url=f"{our_url}/v1", api_key="key") as openai,
    ):
        # This client does not know the parameter any more.
        extra = {"extra_body": {"temperature": messages.pop("temperature")}}
        whole = await anthropic.messages.create(**messages, **extra)
        async with anthropic.messages.stream(**messages, **extra) as stream:
            assert (await stream.get_final_message()).content[0].text == whole.content[0].text
        assert json.loads(whole.content[0].text)["town"] in {"Bonn", "Rome"}
        kwargs = {"extra_body": {"chat_template_kwargs": answers.pop("chat_template_kwargs")}}
        answer = await openai.responses.create(**answers, **kwargs)
        told = [event async for event in await openai.responses.create(**answers, **kwargs, stream=True)]
        assert told[-1].response.output_text == answer.output_text
