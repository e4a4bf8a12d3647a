"""What is asked of engines, what their replies become, and what clients get to see."""

import math
from typing import Any

import pytest

from forebay.engines.capture.read_reply import turns_of_chat
from forebay.engines.capture.read_stream import StreamReader
from forebay.engines.capture.request_fields import strip, texts_only
from forebay.engines.capture.turn import VersionSpan
from forebay.engines.dialect import SGLANG

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "go"}], "temperature": 1.0}
HEAD = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def logprobs(*values: float) -> dict[str, Any]:
    return {"content": [{"token": "t", "bytes": [116], "logprob": value, "top_logprobs": []} for value in values]}


def choice(index: int = 0, **changes: Any) -> dict[str, Any]:
    """A choice of SGLang's whole reply."""
    told: dict[str, Any] = {
        "index": index,
        "message": {"role": "assistant", "content": "ab", "reasoning_content": None},
        "logprobs": logprobs(-0.5, -0.25),
        "finish_reason": "stop",
        "matched_stop": 2,
        "prompt_token_ids": [1, 2],
        "response_token_ids": [3, 4],
    }
    return told | changes


def whole(*choices: dict[str, Any], **changes: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    told: dict[str, Any] = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "usage": usage}
    metadata = {"weight_version": "7", "weight_versions": [{"version": "7", "start": 0, "end": 2}]}
    return told | {"choices": list(choices), "metadata": metadata} | changes


def meta_info(*spans: tuple[str, int, int], retractions: int = 0) -> dict[str, Any]:
    told = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    return {
        "weight_version": spans[-1][0],
        "weight_versions": told,
        "num_retractions": retractions,
        "output_token_logprobs": [[-0.125, 3, None], [-0.0625, 4, None]],
    }


def chunk(*choices: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**HEAD, "choices": list(choices), **fields}


def delta(content: str | None = None, num: int | None = None, told: Any = None, **fields: Any) -> dict[str, Any]:
    """A chunk with text; ``num`` tokens were sampled by now."""
    made = {"index": 0, "delta": {"content": content, **fields}, "logprobs": told, "finish_reason": None}
    return chunk(made, **({} if num is None else {"usage": {"prompt_tokens": 2, "completion_tokens": num}}))


STREAM = [
    delta("", role="assistant"),
    delta("a", 1, logprobs(-0.5)),
    delta("bc", 4, logprobs(-0.25, -0.125)),
    chunk({"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "matched_stop": 2}),
    chunk(usage=None, sglext={"input_ids": [1, 2], "output_ids": [[3, 4, 5, 6, 7]]}),
    chunk(usage={"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}),
]
"""As SGLang streams five tokens of which the second and the last have no text of their own."""


def read(*chunks: dict[str, Any]) -> StreamReader:
    reader = StreamReader(BODY, rid="r", engine_url="http://e")
    for each in chunks:
        reader.feed(each)
    return reader


def test_a_whole_chat_is_a_turn() -> None:
    body = BODY | {"tools": [{"type": "function"}], "rid": "r-1"}
    (turn,) = turns_of_chat(body, whole(choice()), engine_url="http://e", began_s=1.0, ended_s=2.0)
    assert (turn.prompt_ids, turn.sampled_ids, turn.logprobs) == ([1, 2], [3, 4], [-0.5, -0.25])
    assert (turn.rid, turn.engine_url, turn.began_s, turn.ended_s) == ("r-1", "http://e", 1.0, 2.0)
    assert (turn.finish_reason, turn.versions) == ("stop", [VersionSpan("7", 0, 2)])
    assert (turn.messages, turn.tools, turn.usage["completion_tokens"]) == (BODY["messages"], body["tools"], 2)
    assert not turn.is_kv_mixed


def test_each_choice_is_a_turn_with_versions_of_its_own() -> None:
    first, second = choice(meta_info=meta_info(("7", 0, 2))), choice(1, meta_info=meta_info(("7", 0, 1), ("8", 1, 2)))
    one, two = turns_of_chat(BODY, whole(first, second))
    assert (one.choice, two.choice) == (0, 1)
    assert one.versions == [VersionSpan("7", 0, 2)]
    assert two.versions == [VersionSpan("7", 0, 1), VersionSpan("8", 1, 2)]
    assert one.logprobs == [-0.125, -0.0625]


@pytest.mark.parametrize(("retractions", "is_mixed"), [(0, True), (1, False)])
def test_a_cache_is_mixed_unless_the_call_was_retracted(retractions: int, is_mixed: bool) -> None:
    told = meta_info(("7", 0, 1), ("8", 1, 2), retractions=retractions)
    (turn,) = turns_of_chat(BODY, whole(choice(meta_info=told)))
    assert turn.is_kv_mixed is is_mixed


def test_vllm_tells_ids_elsewhere() -> None:
    told = choice(token_ids=[3, 4])
    del told["prompt_token_ids"], told["response_token_ids"]
    (turn,) = turns_of_chat(BODY, whole(told, prompt_token_ids=[1, 2]))
    assert (turn.prompt_ids, turn.sampled_ids) == ([1, 2], [3, 4])


@pytest.mark.parametrize("ids", [None, "34", [3, -1], [3, 1 << 31], [3, 0.5], [3, None]])
def test_what_are_no_ids_are_none(ids: object) -> None:
    (turn,) = turns_of_chat(BODY, whole(choice(response_token_ids=ids)))
    assert (turn.prompt_ids, turn.sampled_ids, turn.logprobs) == (None, None, None)


def test_logprobs_that_are_not_one_for_each_token_are_none() -> None:
    (turn,) = turns_of_chat(BODY, whole(choice(logprobs=logprobs(-0.5))))
    assert (turn.sampled_ids, turn.logprobs) == ([3, 4], None)
    (turn,) = turns_of_chat(BODY, whole(choice(logprobs=None)))
    assert turn.logprobs is None


def test_a_stream_is_a_turn_and_its_logprobs_stand_where_they_belong() -> None:
    reader = read(*STREAM)
    (turn,) = reader.turns(ended_s=3.0)
    assert reader.is_complete
    assert (turn.prompt_ids, turn.sampled_ids) == ([1, 2], [3, 4, 5, 6, 7])
    assert turn.logprobs is not None
    told = [None if math.isnan(value) else value for value in turn.logprobs]
    assert told == [-0.5, None, -0.25, -0.125, None]
    assert (turn.reply, turn.finish_reason) == ({"role": "assistant", "content": "abc"}, "stop")
    assert (turn.usage["completion_tokens"], turn.versions, turn.ended_s) == (5, [], 3.0)
    assert turn.first_token_s is not None


def test_a_stream_that_was_left_has_the_tokens_that_were_read() -> None:
    reader = read(*STREAM[:2])
    assert not reader.is_finished
    reader.stop()
    for each in STREAM[2:]:
        reader.feed(each)
    (turn,) = reader.turns()
    assert (turn.sampled_ids, turn.logprobs, turn.reply["content"]) == ([3], [-0.5], "a")
    assert turn.finish_reason == "stop"


def test_a_stream_that_breaks_off_has_no_ids() -> None:
    (turn,) = read(*STREAM[:3]).turns()
    assert (turn.prompt_ids, turn.sampled_ids, turn.reply["content"]) == (None, None, "abc")


def test_without_usage_in_each_chunk_logprobs_are_known_only_if_all_are_there() -> None:
    bare = [{**each, "usage": None} for each in STREAM]
    logprobs = read(*bare).turns()[0].logprobs
    assert logprobs is not None
    assert len(logprobs) == 5
    assert all(map(math.isnan, logprobs))
    ids = chunk(sglext={"input_ids": [1, 2], "output_ids": [[3, 4, 5]]})
    assert read(*bare[:4], ids).turns()[0].logprobs == [-0.5, -0.25, -0.125]


def test_calls_of_tools_and_reasoning_are_put_together() -> None:
    def call(index: int, **told: Any) -> dict[str, Any]:
        return delta(None, tool_calls=[{"index": index, **told}])

    (turn,) = read(
        delta(None, reasoning_content="let me "),
        delta(None, reasoning_content="see"),
        call(0, id="c0", function={"name": "f", "arguments": ""}),
        call(0, function={"arguments": '{"a":'}),
        call(0, function={"arguments": " 1}"}),
        call(1, id="c1", function={"name": "g", "arguments": "{}"}),
    ).turns()
    assert turn.reply["reasoning_content"] == "let me see"
    assert [told["function"] for told in turn.reply["tool_calls"]] == [
        {"name": "f", "arguments": '{"a": 1}'},
        {"name": "g", "arguments": "{}"},
    ]
    assert [told["id"] for told in turn.reply["tool_calls"]] == ["c0", "c1"]


def test_asking_changes_nothing_else() -> None:
    asked = SGLANG.ask(BODY, is_stream=False)
    assert asked == BODY | {"logprobs": True, "return_token_ids": True, "return_meta_info": True}
    asked = SGLANG.ask(BODY | {"stream": True, "stream_options": {"include_usage": False}}, is_stream=True)
    assert asked["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert asked["return_input_ids_in_sglext"] is asked["return_output_ids_in_sglext"] is True
    assert "return_token_ids" not in asked


def test_a_whole_reply_is_stripped_of_what_was_not_asked_for() -> None:
    reply = whole(choice(meta_info=meta_info(("7", 0, 2))))
    stripped = strip(reply, BODY)
    assert stripped is not None
    assert stripped["choices"] == [
        {name: reply["choices"][0][name] for name in ("index", "message", "finish_reason", "matched_stop")}
        | {"logprobs": None}
    ]
    assert stripped["metadata"] == {"weight_version": "7"} != reply["metadata"]
    assert strip(reply, SGLANG.ask(BODY, is_stream=False)) == texts_only(reply)


def test_a_stream_is_stripped_of_what_was_not_asked_for() -> None:
    seen = [told for each in STREAM if (told := strip(each, BODY | {"stream": True})) is not None]
    assert len(seen) == 4
    assert not any("usage" in told or "sglext" in told for told in seen)
    assert all(told["choices"][0]["logprobs"] is None for told in seen)


def test_usage_at_the_end_is_kept_where_it_was_asked_for() -> None:
    client_body = BODY | {"stream": True, "stream_options": {"include_usage": True}}
    seen = [told for each in STREAM if (told := strip(each, client_body)) is not None]
    assert [told["usage"] for told in seen if "usage" in told] == [STREAM[-1]["usage"]]
    everything = SGLANG.ask(BODY, is_stream=True)
    assert [strip(each, everything) for each in STREAM] == STREAM


def test_what_a_client_sends_wrongly_is_left_to_the_engine() -> None:
    wrong = {"messages": 3, "tools": "x", "stream_options": "y", "n": None}
    assert SGLANG.ask(wrong, is_stream=True)["messages"] == 3
    assert SGLANG.ask(wrong, is_stream=False)["tools"] == "x"
    assert StreamReader(wrong).turns() == []
    assert strip({"object": "error", "message": "no", "code": 400}, wrong) == {
        "object": "error",
        "message": "no",
        "code": 400,
    }


def test_meta_info_without_logprobs_has_none_in_it() -> None:
    reply = whole(choice(meta_info=meta_info(("7", 0, 2))))
    stripped = strip(reply, BODY | {"return_meta_info": True})
    assert stripped is not None
    assert stripped["choices"][0]["meta_info"].keys() == {"weight_version", "weight_versions", "num_retractions"}
