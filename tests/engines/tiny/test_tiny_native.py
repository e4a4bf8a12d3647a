"""The native routes: generation by token ids, alone, in lists and streamed; tokens; tools in the prompt."""

from typing import Any

import httpx
import pytest

from forebay.engines.tiny.recipe import question

ASK: dict[str, Any] = {"sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


async def generate(http: httpx.AsyncClient, **fields: Any) -> Any:
    reply = await http.post("/generate", json=ASK | fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def tokens_of(http: httpx.AsyncClient, **body: Any) -> list[int]:
    told = (await http.post("/tokenize", json=body)).json()
    assert told["count"] == len(told["tokens"])
    tokens: list[int] = told["tokens"]
    return tokens


async def test_a_text_and_its_tokens_are_the_same_prompt(http: httpx.AsyncClient) -> None:
    tokens = await tokens_of(http, prompt="go on")
    by_text, by_ids = await generate(http, text="go on"), await generate(http, input_ids=tokens)
    assert by_text["output_ids"] == by_ids["output_ids"]
    assert by_ids["meta_info"]["prompt_tokens"] == len(tokens)
    assert by_ids["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    assert (await http.post("/detokenize", json={"tokens": tokens})).json() == {"text": "go on"}


async def test_a_list_of_prompts_is_answered_in_order(http: httpx.AsyncClient) -> None:
    prompts = [[70, 71, 72], [80, 81]]
    alone = [await generate(http, input_ids=prompt) for prompt in prompts]
    params = [ASK["sampling_params"], ASK["sampling_params"] | {"max_new_tokens": 1}]
    listed = await generate(http, input_ids=prompts, rid="both", sampling_params=params)
    assert [one["output_ids"] for one in listed] == [alone[0]["output_ids"], alone[1]["output_ids"][:1]]
    assert [one["meta_info"]["id"] for one in listed] == ["both_0", "both_1"]


async def test_logprobs_of_the_prompt_begin_where_asked(http: httpx.AsyncClient) -> None:
    prompt = [70, 71, 72, 73]
    whole = await generate(http, input_ids=prompt, return_logprob=True, logprob_start_len=0)
    first, *rest = whole["meta_info"]["input_token_logprobs"]
    assert first == [None, 70, None]
    assert all(logprob < 0 for logprob, _, _ in rest)
    late = await generate(http, input_ids=prompt, return_logprob=True, logprob_start_len=2)
    unknown, last = late["meta_info"]["input_token_logprobs"]
    assert unknown == [None, 72, None]
    # Another number of rows is another way through the matrices: on some processors the sixth digit differs.
    assert last == [pytest.approx(rest[-1][0], abs=1e-4), 73, None]
    assert (await generate(http, input_ids=prompt, return_logprob=True))["meta_info"]["input_token_logprobs"] == []
    spelled = await generate(http, input_ids=prompt, return_logprob=True, return_text_in_logprobs=True)
    tokens = [text for _, _, text in spelled["meta_info"]["output_token_logprobs"]]
    assert "".join(tokens).replace("<|im_end|>", "") == spelled["text"]


async def test_stop_tokens_end_a_choice_and_are_told(http: httpx.AsyncClient) -> None:
    first, second, *_ = (await generate(http, input_ids=[70, 71, 72]))["output_ids"]
    params = {"max_new_tokens": 4, "temperature": 0, "stop_token_ids": [second]}
    stopped = await generate(http, input_ids=[70, 71, 72], sampling_params=params)
    expected = [first] if first == second else [first, second]
    assert stopped["output_ids"] == expected
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": second}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, "text, input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [99_999]}, "tokens"),
        ({"input_ids": [1], "sampling_params": {"max_newtokens": 2}}, "max_newtokens"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 9000}}, "9000 to generate"),
        ({"input_ids": [1], "sampling_params": {"min_p": 0.5}}, "min_p"),
        ({"input_ids": [[1], [2]], "rid": ["one"]}, "rid has 1 entries for 2 prompts"),
        ({"input_ids": [[1], [2]], "stream": True}, "one prompt at a time"),
    ],
)
async def test_what_cannot_be_generated_is_refused(http: httpx.AsyncClient, body: dict[str, Any], told: str) -> None:
    reply = await http.post("/generate", json=body)
    assert reply.status_code == 400
    assert told in reply.json()["error"]["message"]


async def test_tools_and_their_results_stand_in_the_prompt(http: httpx.AsyncClient) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":3}'}}
    messages = [
        {"role": "user", "content": question(3, 5)},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "8"},
    ]
    tokens = await tokens_of(http, messages=messages, tools=[TOOL])
    spelled = (await http.post("/detokenize", json={"tokens": tokens, "skip_special_tokens": False})).json()["text"]
    assert spelled.startswith('<|im_start|>system\n# Tools\n{"type": "function"')
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call><|im_end|>\n<|im_start|>tool\n8' in spelled
    body = {"messages": messages, "tools": [TOOL], "return_token_ids": True, "max_tokens": 2}
    reply = (await http.post("/v1/chat/completions", json=body)).json()
    assert reply["choices"][0]["prompt_token_ids"] == tokens
    none = (await http.post("/v1/chat/completions", json=body | {"tool_choice": "none"})).json()
    assert none["choices"][0]["prompt_token_ids"] == await tokens_of(http, messages=messages)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/detokenize", {"tokens": [99_999_999_999]}),
        ("/tokenize", {}),
        ("/tokenize", {"messages": [{"role": "assistant", "content": "", "tool_calls": ["add"]}]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "tools": [{"function": "add"}], "n": 99},
        ),
        ("/pause_generation", {"mode": "now"}),
    ],
)
async def test_wrong_bodies_are_refused(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    reply = await http.post(path, json=body)
    assert (reply.status_code, reply.json()["object"]) == (400, "error")
