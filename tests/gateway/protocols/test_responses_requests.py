"""What a Responses request becomes, and what is refused."""

from typing import Any

import pytest

from forebay.gateway.dialects.dialect import CrossCallState, ResponsesDialect
from forebay.gateway.dialects.errors import ProtocolRefused
from forebay.gateway.dialects.responses.to_chat import PREFIX, opened, packed

Json = dict[str, Any]
HELLO = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "name": "tool", "parameters": {"type": "object"}, "strict": True}
SCHEMA = {"type": "object"}


def chat(*items: Json, **fields: Any) -> Json:
    return ResponsesDialect(CrossCallState()).to_chat({"model": "m", "input": list(items) or "hello", **fields})


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ({"max_output_tokens": 9, "temperature": 0.5}, {"max_tokens": 9, "temperature": 0.5}),
        ({"top_k": 3, "stop": ["END"], "min_p": 0.1}, {"top_k": 3, "stop": ["END"], "min_p": 0.1}),
        ({"metadata": {"a": "b"}, "truncation": "auto", "service_tier": "flex", "prompt_cache_key": "k"}, {}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"summary": "auto"}}, {"reasoning_effort": "medium"}),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
        ),
        (
            {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
            {"logprobs": True, "top_logprobs": 2},
        ),
        ({"tools": [], "tool_choice": "auto", "parallel_tool_calls": False}, {}),
        ({"tools": [{"type": "web_search"}], "background": True, "colour": "red"}, {}),
    ],
)
def test_fields(asked: Json, sent: Json) -> None:
    assert chat(**asked) == {"model": "m", "messages": [HELLO], **sent}


def test_tools() -> None:
    custom = {
        "type": "custom",
        "name": "patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
    }
    asked = chat(tools=[TOOL, custom], tool_choice={"type": "custom", "name": "patch"}, parallel_tool_calls=False)
    function, shim = (tool["function"] for tool in asked["tools"])
    assert function == {"name": "tool", "description": None, "parameters": {"type": "object"}, "strict": True}
    assert shim["parameters"]["required"] == ["input"]
    assert shim["description"] == "The payload must conform to this lark grammar:\nstart: /x/"
    assert asked["tool_choice"] == {"type": "function", "function": {"name": "patch"}}
    assert asked["parallel_tool_calls"] is False


def test_items() -> None:
    image = {"type": "input_image", "image_url": "http://a/b.png"}
    items = [
        {"role": "developer", "content": "be kind"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "look"}, image]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "a", "name": "tool", "arguments": "cut shor", "status": "incomplete"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "seen"}, image]},
    ]
    part = {"type": "image_url", "image_url": {"url": "http://a/b.png", "detail": "auto"}}
    call = {"id": "a", "type": "function", "function": {"name": "tool", "arguments": "{}"}}
    assert chat(*items, instructions="be brief")["messages"] == [
        {"role": "system", "content": "be brief\n\nDeveloper instructions:\nbe kind"},
        {"role": "user", "content": [{"type": "text", "text": "look"}, part]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "seen"}, part]},
    ]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": None}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "n"}]}, "input[0].arguments"),
        ({"input": [{"type": "item_reference", "id": "msg_none"}]}, "input"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"temperature": "warm"}, "temperature"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "namespace": "n", "name": "tool"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"previous_response_id": "resp_none"}, "response_id"),
    ],
)
def test_refused(changes: Json, param: str) -> None:
    with pytest.raises(ProtocolRefused) as caught:
        chat(**changes)
    status, body = ResponsesDialect.refusal(caught.value)
    told = body["error"]
    assert (told["param"], told["type"], told["code"]) == (param, "invalid_request_error", status)
    assert status in (400, 404)


@pytest.mark.parametrize("body", [{"object": "error", "message": "why"}, {"error": {"message": "why"}}, "why"])
def test_an_error_in_any_shape(body: Any) -> None:
    told = {"message": "why", "type": "rate_limit_error", "param": None, "code": 429}
    assert ResponsesDialect.error(429, body) == (429, {"error": told})


def test_a_conversation_forgets_nothing_but_what_is_deleted() -> None:
    memory = CrossCallState()
    store = memory.store
    for number in (1, 2):
        previous = f"resp_{number - 1}" if number > 1 else None
        output = [{"type": "message", "id": f"msg_{number}", "role": "assistant", "content": str(number)}]
        store.add({"id": f"resp_{number}", "previous_response_id": previous, "output": output}, [HELLO])
    asked = ResponsesDialect(memory).to_chat({"model": "m", "input": "more", "previous_response_id": "resp_2"})
    assert [message["content"] for message in asked["messages"]] == ["hello", "1", "hello", "2", "more"]
    assert store.input_items("resp_1") == [HELLO]
    assert store.delete("resp_1")["deleted"] is True
    with pytest.raises(ProtocolRefused, match="resp_1"):
        store.history("resp_2")


@pytest.mark.parametrize("blob", [None, "", "other-service.AAAA", PREFIX + "no base64!", PREFIX + "AAAA"])
def test_a_blob_that_was_not_packed_here_opens_to_nothing(blob: str | None) -> None:
    assert opened(blob) == ""
    assert opened(packed("thöught")) == "thöught"
