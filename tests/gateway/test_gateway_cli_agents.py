"""Requests in the shape that the command-line agents send: what the gateway does not know of them it leaves out."""

import json
import logging
from typing import Any

import httpx
import pytest

from forebay.engines.scripted import Reply
from tests.gateway.conftest import Stage
from tests.gateway.gateway_kit import Json, OpenedAt, assert_whole, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

PARAMETERS: Json = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
EXEC: Json = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
}
PATCH: Json = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}
NAMESPACE: Json = {
    "type": "namespace",
    "name": "mcp__weather",
    "description": "Tools of the weather server.",
    "tools": [
        {"type": "function", "name": "today", "description": "Now.", "strict": False, "parameters": PARAMETERS},
        {"type": "custom", "name": "note", "description": "Notes a text."},
    ],
}
TOOLS: list[Json] = [
    EXEC,
    PATCH,
    NAMESPACE,
    {"type": "web_search", "external_web_access": False, "search_content_types": ["text"]},
    {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {}},
    {"type": "image_generation", "output_format": "png"},
]
CONTEXT: Json = {"type": "input_text", "text": "<environment_context>\n  <cwd>/tmp</cwd>\n</environment_context>"}
ASKED: Json = {"type": "input_text", "text": "what is the weather in Bonn?"}
CODEX: Json = {
    "model": "m",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: read-only."}]},
        {"type": "message", "role": "user", "content": [CONTEXT]},
        {"type": "message", "role": "user", "content": [ASKED], "internal_chat_message_metadata_passthrough": {"t": 1}},
    ],
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto", "context": "current_turn"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "service_tier": "priority",
    "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "7", "x-codex-window-id": "7:0"},
    "temperature": 1.0,
}
CODEX_LEFT_OUT: Json = {
    "left_out_responses_client_metadata": 1,
    "left_out_responses_input_internal_chat_message_metadata_passthro": 1,
    "left_out_responses_reasoning_context": 1,
    "left_out_responses_tool_image_generation": 1,
    "left_out_responses_tool_tool_search": 1,
    "left_out_responses_tool_web_search": 1,
}


def call(name: str, arguments: str, call_id: str = "call_1") -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


async def events(rollout: OpenedAt, body: Json) -> list[Json]:
    """The events of a streamed answer."""
    reply = await rollout.post("responses", body)
    assert reply.status_code == 200, reply.text
    return [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]


async def items(rollout: OpenedAt, body: Json) -> list[Json]:
    """The items that Codex reads: it goes by the events that end them."""
    if not body["stream"]:
        reply = await rollout.post("responses", body)
        assert reply.status_code == 200, reply.text
        output: list[Json] = reply.json()["output"]
        return output
    told = await events(rollout, body)
    assert told[-1]["type"] == "response.completed"
    return [event["item"] for event in told if event["type"] == "response.output_item.done"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_as_codex_sends_it_is_answered_and_recorded(stage: Stage, stream: bool) -> None:
    stage("it rains")
    rollout = await stage.open()
    (message,) = await items(rollout, {**CODEX, "stream": stream})
    assert message["content"][0]["text"] == "it rains"
    told = await rollout.close()
    assert told["notes"] == CODEX_LEFT_OUT
    assert told["failures"] == []
    (sample,) = told["samples"]
    assert_whole(sample)
    names = [tool["function"]["name"] for tool in stage.calls[0].body["tools"]]
    assert names == ["exec_command", "apply_patch", "mcp__weather__today", "mcp__weather__note"]
    assert "client_metadata" not in stage.calls[0].body


@pytest.mark.parametrize("stream", [True, False])
async def test_functions_of_a_namespace_are_called_and_come_back_as_they_were_sampled(
    stage: Stage, stream: bool
) -> None:
    calls = [
        call("mcp__weather__today", '{"town": "Bonn"}', "call_a"),
        call("mcp__weather__note", '{"input": "rain"}', "call_b"),
        call("exec_command", '{"cmd": "ls"}', "call_c"),
    ]
    stage(lambda asked: "done" if any(m["role"] == "tool" for m in asked.messages) else Reply(tool_calls=calls))
    rollout = await stage.open()
    body = {**CODEX, "stream": stream}
    made = await items(rollout, body)
    assert [(item["type"], item.get("namespace"), item["name"]) for item in made] == [
        ("function_call", "mcp__weather", "today"),
        ("custom_tool_call", "mcp__weather", "note"),
        ("function_call", None, "exec_command"),
    ]
    assert "namespace" not in made[2]
    outputs = [
        {"type": "function_call_output", "call_id": "call_a", "output": "rain"},
        {"type": "custom_tool_call_output", "call_id": "call_b", "output": "noted"},
        {"type": "function_call_output", "call_id": "call_c", "output": [{"type": "input_text", "text": "a.txt"}]},
    ]
    await items(rollout, {**body, "input": [*body["input"], *made, *outputs]})
    (sample,) = (await rollout.close())["samples"]
    assert_whole(sample)
    # One sample of both turns: the calls went back to the model in the words that it had sampled.
    assert [message["role"] for message in sample["messages"]].count("assistant") == 2
    names = [each["function"]["name"] for each in stage.calls[1].messages[3]["tool_calls"]]
    assert names == ["mcp__weather__today", "mcp__weather__note", "exec_command"]


async def test_a_namespaces_function_can_be_forced(stage: Stage) -> None:
    stage(Reply(tool_calls=[call("mcp__weather__today", "{}")]))
    rollout = await stage.open()
    choice = {"type": "function", "namespace": "mcp__weather", "name": "today"}
    (item,) = await items(rollout, {**CODEX, "stream": False, "tool_choice": choice})
    assert (item["namespace"], item["name"]) == ("mcp__weather", "today")
    forced = {"type": "function", "function": {"name": "mcp__weather__today"}}
    assert stage.calls[0].body["tool_choice"] == forced
    description = stage.calls[0].body["tools"][2]["function"]["description"]
    assert description == "Namespace mcp__weather: Tools of the weather server.\n\nNow."


async def test_a_name_that_two_tools_would_have_is_given_to_the_plain_one(stage: Stage) -> None:
    stage(Reply(tool_calls=[call("a__b", "{}")]))
    rollout = await stage.open()
    inner = {"type": "function", "name": "b", "parameters": PARAMETERS}
    tools = [{"type": "namespace", "name": "a", "tools": [inner]}, {**EXEC, "name": "a__b"}]
    (item,) = await items(rollout, {**CODEX, "stream": False, "tools": tools})
    assert (item["name"], "namespace" in item) == ("a__b", False)
    assert [tool["function"]["name"] for tool in stage.calls[0].body["tools"]] == ["a__b"]
    assert (await rollout.close())["notes"]["left_out_responses_tool_of_the_same_name"] == 1


UNKNOWN: list[tuple[Json, dict[str, int]]] = [
    ({"input": [{"type": "compaction", "encrypted_content": "x"}, {"role": "user", "content": "hi"}]},
     {"left_out_responses_input_compaction": 1}),
    ({"input": [{"role": "user", "content": "hi"}, {"type": "web_search_call", "id": "ws_1", "status": "completed"}]},
     {"left_out_responses_input_web_search_call": 1}),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}, {"role": "user", "content": "hi"}]},
     {}),
    ({"background": True}, {"left_out_responses_background": 1}),
    ({"include": ["web_search_call.action.sources"]}, {"left_out_responses_include_web_search_call_action_sources": 1}),
    ({"stream": True, "include": ["message.output_text.logprobs"]},
     {"left_out_responses_include_message_output_text_logprobs": 1}),
    ({"tools": [{"type": "local_shell"}, {"type": "mcp", "server_label": "m"}], "tool_choice": "required"},
     {"left_out_responses_tool_choice": 1, "left_out_responses_tool_local_shell": 1, "left_out_responses_tool_mcp": 1}),
    ({"tools": [EXEC], "tool_choice": {"type": "web_search"}}, {"left_out_responses_tool_choice": 1}),
    ({"tools": None, "service_tier": "fast", "text": {"verbosity": "none"}, "truncation": "some"}, {}),
    ({"text": {"format": {"type": "grammar"}}}, {"left_out_responses_text_format_grammar": 1}),
    ({"metadata": {"turn": 3, "task": "7"}}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "notes"), UNKNOWN)
async def test_what_responses_has_beyond_a_chat_is_left_out_and_counted(
    stage: Stage, asked: Json, notes: dict[str, int]
) -> None:
    stage("hi")
    rollout = await stage.open()
    reply = await rollout.post("responses", {"model": "m", "input": "hello", "temperature": 1.0, **asked})
    assert reply.status_code == 200, reply.text
    told = await rollout.close()
    assert told["notes"] == notes
    assert_whole(told["samples"][0])


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("v1/responses", {"input": "hi", "tools": 5, "tool_choice": {"type": "function"}}),
        ("v1/responses", {"input": "hi", "tools": [5]}),
        ("v1/responses", {"input": "hi", "tools": [{"type": "namespace", "name": "n", "tools": 5}]}),
        ("v1/responses", {"input": [{"role": "user", "content": [5]}]}),
        ("anthropic/v1/messages", {"messages": [], "tools": 5, "tool_choice": {"type": "any"}}),
        ("anthropic/v1/messages", {"messages": [{"role": "user", "content": [5]}]}),
    ],
)
async def test_what_cannot_be_understood_is_refused(stage: Stage, path: str, asked: Json) -> None:
    stage("hi")
    rollout = await stage.open()
    url = f"{rollout.base_url.removesuffix('/v1')}/{path}"
    body = {"model": "m", "max_tokens": 9, **asked}
    reply = await stage.gateway.http.post(url, json=body, headers={"x-api-key": rollout.key})
    assert reply.status_code == 400, reply.text
    assert stage.calls == []


async def test_odd_kinds_are_left_out_as_well(stage: Stage) -> None:
    stage("hi")
    rollout = await stage.open()
    odd: list[Any] = [{"type": ["a"]}, {"role": "user", "content": "hi"}]
    asked = {"model": "m", "input": odd, "include": [{}], "tools": [{"type": {"a": 1}}]}
    assert (await rollout.post("responses", asked)).status_code == 200
    assert sum((await rollout.close())["notes"].values()) == 3


async def test_what_an_allowed_tool_may_be_is_not_enforced_but_that_one_is_called_is(stage: Stage) -> None:
    stage(Reply(tool_calls=[call("exec_command", "{}")]))
    rollout = await stage.open()
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "exec_command"}]}
    body = {"model": "m", "input": "hi", "tools": [EXEC], "tool_choice": choice}
    assert (await rollout.post("responses", body)).status_code == 200
    assert stage.calls[0].body["tool_choice"] == "required"
    assert (await rollout.close())["notes"] == {"left_out_responses_tool_choice": 1}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"conversation": "conv_1"}, "send the whole conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "send its text"),
        ({"previous_response_id": "resp_none"}, "resp_none"),
        ({"input": [{"type": "item_reference", "id": "msg_none"}]}, "msg_none"),
    ],
)
async def test_a_prompt_that_the_gateway_has_not_is_refused(stage: Stage, asked: Json, words: str) -> None:
    stage("hi")
    rollout = await stage.open()
    reply = await rollout.post("responses", {"model": "m", "input": "hello", **asked})
    assert reply.status_code in (400, 404)
    assert words in reply.json()["error"]["message"]
    assert stage.calls == []


# --- Messages


CLAUDE_CODE: Json = {
    "model": "m",
    "max_tokens": 32000,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>", "cache_control": {"type": "e"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "EmwKAhgB"},
                {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
                {"type": "text", "text": "one moment", "citations": None},
            ],
        },
        {"role": "user", "content": "go on"},
    ],
    "system": [{"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}}],
    "tools": [
        {"name": "Bash", "description": "Runs a command.", "input_schema": PARAMETERS, "eager_input_streaming": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "mcp_toolset", "mcp_server_name": "docs"},
    ],
    "metadata": {"user_id": "user_7"},
    "thinking": {"type": "adaptive", "display": "summarised"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium", "task_budget": {"type": "tokens", "total": 9}},
    "mcp_servers": [{"type": "url", "url": "http://a", "name": "docs"}],
    "container": "c",
    "speed": "fast",
    "temperature": 1,
}
CLAUDE_LEFT_OUT = {
    "left_out_messages_container": 1,
    "left_out_messages_mcp_servers": 1,
    "left_out_messages_speed": 1,
    "left_out_messages_content_redacted_thinking": 1,
    "left_out_messages_content_server_tool_use": 1,
    "left_out_messages_tool_bash_20250124": 1,
    "left_out_messages_tool_mcp_toolset": 1,
    "left_out_messages_tool_web_search_20250305": 1,
}


async def anthropic_post(rollout: OpenedAt, path: str, body: Json) -> httpx.Response:
    url = f"{rollout.anthropic_url}/{path}"
    return await rollout.gateway.http.post(url, json=body, headers={"x-api-key": rollout.key})


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_as_claude_code_sends_it_is_answered_and_recorded(stage: Stage, stream: bool) -> None:
    stage("done")
    rollout = await stage.open()
    reply = await anthropic_post(rollout, "v1/messages?beta=true", {**CLAUDE_CODE, "stream": stream})
    assert reply.status_code == 200, reply.text
    assert "done" in reply.text
    told = await rollout.close()
    assert told["notes"] == CLAUDE_LEFT_OUT
    assert_whole(told["samples"][0])
    assert [tool["function"]["name"] for tool in stage.calls[0].body["tools"]] == ["Bash"]
    assert stage.calls[0].messages[2]["content"] == "one moment"


async def test_a_choice_of_a_tool_that_was_left_out_is_left_out(stage: Stage) -> None:
    stage("hi")
    rollout = await stage.open()
    asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    choices: list[Json] = [{"type": "tool", "name": "web_search"}, {"type": "any"}]
    for choice in choices:
        reply = await anthropic_post(rollout, "v1/messages", {**asked, "tools": tools, "tool_choice": choice})
        assert reply.status_code == 200, reply.text
    assert (await rollout.close())["notes"]["left_out_messages_tool_choice"] == 2


async def test_a_document_is_passed_on_for_the_engine_to_judge(stage: Stage) -> None:
    stage("read")
    rollout = await stage.open()
    document = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}}
    words = {"type": "text", "text": "what does it say?"}
    asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [document, words]}]}
    await anthropic_post(rollout, "v1/messages", asked)
    file = {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBE"}
    given = [{"role": "user", "content": [file, {"type": "input_text", "text": "what does it say?"}]}]
    await rollout.post("responses", {"model": "m", "input": given})
    told = await rollout.close()
    assert told["notes"] == {"passed_on_messages_content_document": 1, "passed_on_responses_content_input_file": 1}


# --- telling of it


async def test_it_is_told_in_the_status_of_the_run_and_once_in_the_log(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage("hi")
    rollout = await stage.open()
    name = "left_out_responses_colour"
    with caplog.at_level(logging.INFO, logger="forebay.gateway"):
        for _ in range(3):
            await rollout.post("responses", {"model": "m", "input": "hello", "colour": "red"})
    assert (await rollout.record())["notes"] == {name: 3}
    await eventually(lambda: (stage.gateway.buffer.reports[-1].get("counts") or {}).get(name) == 3)
    assert [line for line in caplog.messages if name in line] == [
        line for line in caplog.messages if name in line and "run-0123456789ab" in line
    ]
    assert len([line for line in caplog.messages if name in line]) == 1


async def test_names_that_an_agent_invents_are_bounded(stage: Stage) -> None:
    stage("hi")
    rollout = await stage.open()
    for first in range(0, 300, 100):
        odd: dict[str, Any] = {f"Feld-{number} {'x' * 90}": 1 for number in range(first, first + 100)}
        assert (await rollout.post("responses", {"model": "m", "input": "hello", **odd})).status_code == 200
    notes = (await rollout.close())["notes"]
    assert sum(notes.values()) == 300
    assert len(notes) <= 101
    assert notes["left_out_others"] >= 200
    assert all(len(name) <= 64 and name.replace("_", "").isalnum() and name.islower() for name in notes)
