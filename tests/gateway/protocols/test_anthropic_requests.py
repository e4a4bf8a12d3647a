"""What a Messages request becomes, and what is refused."""

from typing import Any

import pytest

from forebay.gateway.dialects.anthropic.to_chat import to_tokenize
from forebay.gateway.dialects.dialect import CrossCallState, MessagesDialect
from forebay.gateway.dialects.errors import ProtocolRefused
from forebay.gateway.dialects.history import ReplyMemo
from forebay.gateway.dialects.unknown import UnknownFieldLog

Json = dict[str, Any]
HELLO = {"role": "user", "content": "hello"}
TOOL = {"name": "tool", "input_schema": {"properties": {}}}
CHAT_TOOL = {
    "type": "function",
    "function": {
        "name": "tool",
        "description": "",
        "parameters": {"properties": {}, "type": "object"},
        "strict": False,
    },
}


def chat(*messages: Json, **fields: Any) -> Json:
    return asked({"model": "m", "max_tokens": 9, "messages": list(messages) or [HELLO], **fields})


def asked(body: Json, memory: CrossCallState | None = None) -> Json:
    return MessagesDialect(memory or CrossCallState()).to_chat(body)


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 3}, {"temperature": 0.5, "top_p": 0.9, "top_k": 3}),
        ({"stop_sequences": ["END"]}, {"stop": ["END"]}),
        ({"metadata": {"user_id": "7"}, "service_tier": "auto", "betas": ["x"]}, {}),
        ({"min_p": 0.1, "seed": 7}, {"min_p": 0.1, "seed": 7}),
        ({"thinking": {"type": "adaptive"}}, {"chat_template_kwargs": {"thinking": True, "enable_thinking": True}}),
        (
            {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"thinking": True, "x": 1}},
            {"chat_template_kwargs": {"thinking": True, "enable_thinking": False, "x": 1}},
        ),
        ({"output_config": {"effort": "xhigh"}}, {"reasoning_effort": "max"}),
        ({"output_config": {"format": {"type": "regex"}}}, {}),
        ({"thinking": {"type": "enabled"}}, {"chat_template_kwargs": {"thinking": True, "enable_thinking": True}}),
        ({"thinking": {"type": "of old"}, "colour": "red", "container": "c"}, {}),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "any"}}, {}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "response", "schema": {"type": "object"}, "strict": True},
                }
            },
        ),
        ({"tools": [TOOL]}, {"tools": [CHAT_TOOL], "tool_choice": "auto"}),
        ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    ],
)
def test_fields(asked: Json, sent: Json) -> None:
    assert chat(**asked) == {"model": "m", "max_tokens": 9, "messages": [HELLO], **sent}


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "tool"}, {"type": "function", "function": {"name": "tool"}}),
    ],
)
def test_tool_choice(choice: Json, sent: Any) -> None:
    asked = chat(tools=[TOOL], tool_choice={**choice, "disable_parallel_tool_use": True})
    assert (asked["tool_choice"], asked["parallel_tool_calls"]) == (sent, False)


def test_a_user_message_is_split_at_its_results() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    content = [
        {"type": "text", "text": "before"},
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "seen"}, image]},
        {"type": "tool_result", "tool_use_id": "b", "is_error": True},
        {"type": "text", "text": "after", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "all"},
    ]
    seen = [
        {"type": "text", "text": "seen"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
    ]
    assert chat({"role": "user", "content": content})["messages"] == [
        {"role": "user", "content": "before"},
        {"role": "tool", "tool_call_id": "a", "content": seen},
        {"role": "tool", "tool_call_id": "b", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "after"}, {"type": "text", "text": "all"}]},
    ]


def test_references_to_tools_and_passages() -> None:
    found = {"type": "search_result", "title": "T", "source": "S", "content": [{"type": "text", "text": "words"}]}
    content = [{"type": "tool_reference", "tool_name": "tool"}, found]
    result = {"type": "tool_result", "tool_use_id": "a", "content": content}
    assert [message["content"] for message in chat({"role": "user", "content": [result]})["messages"]] == [
        [{"type": "tool_reference", "name": "tool"}],
        "Title: T\nSource: S\nContent: words",
    ]


def test_system_messages_stand_at_the_head() -> None:
    inline = {"role": "system", "content": [{"type": "text", "text": "and kind"}]}
    assert chat(HELLO, inline, system="be brief")["messages"] == [
        {"role": "system", "content": "be brief\nand kind"},
        HELLO,
    ]


def test_an_answer_that_is_begun_is_continued() -> None:
    asked = chat(HELLO, {"role": "assistant", "content": "The answer is"})
    assert asked["continue_final_message"] is True


def test_a_count_asks_for_the_same_prompt() -> None:
    prompt = {"model": "m", "messages": [HELLO], "system": "be brief", "tools": [TOOL]}
    told = asked({**prompt, "max_tokens": 9})
    del told["max_tokens"]
    assert to_tokenize(prompt, ReplyMemo(), UnknownFieldLog("messages")) == told


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": None}, "max_tokens: Input should be a valid integer"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than 0"),
        ({"model": ""}, "model: String should have at least 1 character"),
        ({"temperature": "warm"}, "temperature: Input should be a valid number"),
        ({"thread": "t"}, "thread: send the whole conversation"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages.0.role: Input should be 'user'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text.text: Field"),
        ({"messages": [{"role": "user", "content": [{"title": "t"}]}]}, "messages.0.content.0.type: Field required"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "n", "input": {}}]}]},
            "a message with role user cannot contain a block of type tool_use",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "image", "source": {}}]}]}, "cannot contain a block"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "source: an image needs"),
        ({"tools": [{"name": "tool"}]}, "input_schema: Field required"),
        ({"tool_choice": {"type": "any"}}, "needs at least one tool"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "'other' is not among the tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "name: Field required"),
        ({"thinking": "much"}, "thinking: Input should be a valid dictionary"),
    ],
)
def test_refused(changes: Json, message: str) -> None:
    with pytest.raises(ProtocolRefused) as caught:
        chat(**{"messages": [HELLO], **changes})
    status, body = MessagesDialect.refusal(caught.value)
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert message in body["error"]["message"]


@pytest.mark.parametrize("body", [{"object": "error", "message": "why"}, {"error": {"message": "why"}}, "why"])
def test_an_error_in_any_shape(body: Any) -> None:
    assert MessagesDialect.error(529, body) == (
        529,
        {"type": "error", "error": {"type": "overloaded_error", "message": "why"}},
    )


def test_a_cleared_context_is_answered_with_no_edits() -> None:
    reply = {"model": "m", "choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}
    body = {"model": "m", "max_tokens": 9, "messages": [HELLO]}
    dialect = MessagesDialect(CrossCallState())
    assert "context_management" not in dialect.to_chat({**body, "context_management": {"edits": [1]}})
    assert dialect.reply(reply)["context_management"] == {"applied_edits": []}


def test_a_history_that_the_agent_changed_stays_as_it_is() -> None:
    memory = CrossCallState()
    call = {"id": "a", "function": {"name": "tool", "arguments": '{"n":1}'}}
    memory.memo.remember({"role": "assistant", "content": "one", "tool_calls": [call]})
    changed = [
        {"type": "text", "text": "two"},
        {"type": "tool_use", "id": "a", "name": "tool", "input": {"n": True}},
    ]
    body = {"model": "m", "max_tokens": 9, "messages": [HELLO, {"role": "assistant", "content": changed}]}
    reply = asked(body, memory)["messages"][-1]
    assert (reply["content"], reply["tool_calls"][0]["function"]["arguments"]) == ("two", '{"n": true}')


def test_an_id_that_several_calls_had() -> None:
    memory = CrossCallState()
    spellings = ['{"n":1}', '{"n":2}']
    for arguments in spellings:
        call = {"id": "functions.tool:0", "function": {"name": "tool", "arguments": arguments}}
        memory.memo.remember({"role": "assistant", "content": None, "tool_calls": [call]})
    uses = [{"type": "tool_use", "id": "functions.tool:0", "name": "tool", "input": {"n": n}} for n in (1, 2)]
    history = [{"role": "assistant", "content": [use]} for use in uses]
    replies = asked({"model": "m", "max_tokens": 9, "messages": history}, memory)["messages"]
    assert [reply["tool_calls"][0]["function"]["arguments"] for reply in replies] == spellings


@pytest.mark.parametrize("depth", [400, 900, 5000])
def test_arguments_that_are_nested_for_ever(depth: int) -> None:
    dialect = MessagesDialect(CrossCallState())
    dialect.to_chat({"model": "m", "max_tokens": 9, "messages": [HELLO]})
    function = {"name": "tool", "arguments": '{"a":' * depth + "1" + "}" * depth}
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": function}]}
    choice = {"message": message, "finish_reason": "tool_calls"}
    told = dialect.reply({"model": "m", "choices": [choice]})
    assert dialect.memory.memo.restored(message)["tool_calls"][0]["function"] == function
    assert bool(told["content"][0]["input"]) == (depth < 5000)
