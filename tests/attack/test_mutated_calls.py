"""Agents' calls with changed bytes and values, at the gateway and at an embedded engine: never a 5xx, never a crash."""

import json
import os
import random
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from forebay.engines.scripted import ScriptedEngine
from tests.attack.asking import Asker
from tests.attack.mutations import mutated_json
from tests.conftest import MakeServer
from tests.kit import Json, ServerProcess
from tests.lent import lend_runs, lent_url

COUNT = int(float(os.environ.get("ROUNDS", "1")) * 600)
"""Of each kind of call."""

MESSAGES: list[Json] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "2+2?"}]},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "4"},
]
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
CHAT: Json = {
    "model": "scripted",
    "messages": MESSAGES,
    "tools": [{"type": "function", "function": {"name": "look", "description": "d", "parameters": PARAMETERS}}],
    "tool_choice": "auto",
    "temperature": 0.7,
    "max_tokens": 8,
    "n": 1,
    "stop": ["x"],
    "logprobs": True,
    "top_logprobs": 1,
    "stream": False,
    "response_format": {"type": "text"},
}
RESPONSES: Json = {
    "model": "scripted",
    "instructions": "Be brief.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "2+2?"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
    ],
    "tools": [{"type": "function", "name": "look", "parameters": PARAMETERS, "strict": False}],
    "max_output_tokens": 8,
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "text"}},
    "stream": False,
}
ANTHROPIC: Json = {
    "model": "scripted",
    "max_tokens": 8,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {"x": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "4"}]},
    ],
    "tools": [{"name": "look", "description": "d", "input_schema": PARAMETERS}],
    "tool_choice": {"type": "auto"},
    "stream": False,
}
OPENING: Json = {"rollout_id": "r-2", "deadline_s": 60, "sampling_params": {"top_p": 0.9}, "max_tokens": 8}
GENERATE: Json = {
    "input_ids": [1, 2, 3],
    "sampling_params": {"max_new_tokens": 4, "temperature": 1.0, "stop": ["x"]},
    "return_logprob": True,
    "stream": False,
    "rid": "a",
}
CALLS = {
    "chat": ("{base}/v1/chat/completions", CHAT),
    "streamed chat": ("{base}/v1/chat/completions", CHAT | {"stream": True}),
    "responses": ("{base}/v1/responses", RESPONSES),
    "streamed responses": ("{base}/v1/responses", RESPONSES | {"stream": True}),
    "messages": ("{base}/anthropic/v1/messages", ANTHROPIC),
    "streamed messages": ("{base}/anthropic/v1/messages", ANTHROPIC | {"stream": True}),
    "count_tokens": ("{base}/anthropic/v1/messages/count_tokens", ANTHROPIC),
    "open": ("/gateway/rollouts", OPENING),
}
ENGINE_CALLS = {
    "chat": ("/v1/chat/completions", CHAT),
    "generate": ("/generate", GENERATE),
    "streamed generate": ("/generate", GENERATE | {"stream": True}),
    "abort": ("/abort_request", {"rid": "a", "abort_all": False}),
    "tokenize": ("/tokenize", {"model": "scripted", "prompt": "2+2?"}),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine(lambda _: "4")
    with engine.in_thread():
        yield engine


@pytest.fixture(scope="module")
def attacked(module_servers: MakeServer) -> Iterator[ServerProcess]:
    """A server; nothing of what it or its gateway logs is an unhandled exception."""
    server = module_servers()
    lend_runs(server)
    (server.directory / "rows.jsonl").write_text('{"prompt": "2+2?"}\n')
    yield server
    assert server.client.get("/readyz").status_code == 200
    assert "Traceback" not in server.log(1 << 24)


@pytest.fixture(scope="module")
def gateway(attacked: ServerProcess, engine: ScriptedEngine) -> tuple[str, str]:
    """The gateway's address, and the key that opens rollouts of a run."""
    run = attacked.start_run("lent", group_size=1, input_file="rows.jsonl", remote_engine_url=engine.url)
    key_path = urlsplit(lent_url(attacked, run.run_id)).path
    told = attacked.client.post(f"{key_path}/gateway").json()
    return told["url"], told["key"]


@pytest.mark.parametrize("kind", CALLS)
def test_no_call_of_an_agent_is_a_server_error(attacked: ServerProcess, gateway: tuple[str, str], kind: str) -> None:
    url, run_key = gateway
    rollout_id = f"r-{kind.replace(' ', '-')}"
    opened = attacked.client.post(
        f"{url}/gateway/rollouts",
        json={"rollout_id": rollout_id, "deadline_s": 600},
        headers={"Authorization": f"Bearer {run_key}"},
    ).json()
    path, body = CALLS[kind]
    key = run_key if kind == "open" else opened["key"]
    ask_mutated(url, path.format(base=f"/gateway/{rollout_id}"), body, {"Authorization": f"Bearer {key}"})
    record = attacked.client.post(
        f"{url}/gateway/rollouts/{rollout_id}/close", headers={"Authorization": f"Bearer {run_key}"}
    )
    assert record.status_code == 200


@pytest.mark.parametrize("kind", ENGINE_CALLS)
def test_no_call_of_an_engine_is_a_server_error(engine: ScriptedEngine, kind: str) -> None:
    path, body = ENGINE_CALLS[kind]
    ask_mutated(engine.url, path, body, {})


def ask_mutated(url: str, path: str, body: Json, headers: dict[str, str]) -> None:
    rng = random.Random(path)
    where = urlsplit(url)
    assert where.hostname
    assert where.port
    asker = Asker(where.hostname, where.port, headers)
    status, reply = asker.ask("POST", path, json.dumps(body).encode())
    assert status < 300, reply
    for _ in range(COUNT):
        asker.ask("POST", path, mutated_json(rng, body))
    asker.close()
    assert not asker.bad, asker.bad[0]
