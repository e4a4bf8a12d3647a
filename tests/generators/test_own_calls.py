"""Calls that a rollout function makes itself are gone on with when the engine aborts them: it sees one reply."""

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

from forebay.engines.scripted import Reply, ScriptedCall
from forebay.engines.scripted.tokens import TURN_END, encode
from tests.generators.partial_kit import PROMPT, PROMPT_IDS, Json, check_tokens, sample_of, samples_of, saying

ASKING = {"model": "m", "max_tokens": 64, "messages": PROMPT}
TEXT = "one two three"


class Number(BaseModel):
    a: int


def told(reply: Any, seen: list[Json]) -> Any:
    """Notes the reply; what a rollout function returns of it."""
    body = reply.model_dump(warnings=False)
    seen.append(body)
    choice = body["choices"][0]
    return [*PROMPT, {"role": "assistant", "content": choice["message"]["content"]}], choice["finish_reason"]


def calling(kind: str, seen: list[Json], **asked: Any) -> Any:
    """A rollout function that makes one call of its own."""

    async def plain(client: Any, messages: Any, params: Any) -> Any:
        return told(await client.chat.completions.create(**ASKING, **asked), seen)

    def in_a_thread(client: Any, messages: Any, params: Any) -> Any:
        return told(client.chat.completions.create(**ASKING, **asked), seen)

    async def raw(client: Any, messages: Any, params: Any) -> Any:
        reply = await client.chat.completions.with_raw_response.create(**ASKING, **asked)
        assert reply.http_response.headers["content-length"] == str(len(reply.http_response.content))
        return told(reply.parse(), seen)

    return {"plain": plain, "in a thread": in_a_thread, "raw": raw}[kind]


@pytest.mark.parametrize("kind", ["plain", "in a thread", "raw"])
async def test_an_aborted_call_brings_one_reply(buffer, write_rows, kind: str) -> None:
    seen: list[Json] = []
    rollout = calling(kind, seen, logprobs=True)
    sample, bodies = await sample_of(saying(TEXT, [4, 8]), buffer, write_rows, rollout)
    sampled = [*encode(TEXT), TURN_END]
    check_tokens(sample, sampled)
    assert [body.get("input_ids") for body in bodies[1:]] == [PROMPT_IDS + encode(t) for t in ("one ", "one two ")]
    assert [body["max_tokens"] for body in bodies] == [64, 60, 56]
    (reply,) = seen
    (choice,) = reply["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (TEXT, "stop")
    assert choice["response_token_ids"] == sampled
    assert [each["logprob"] for each in choice["logprobs"]["content"]] == sample["logprobs"][len(PROMPT_IDS) :]
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT_IDS), len(sampled))
    assert usage["total_tokens"] == len(PROMPT_IDS) + len(sampled)
    assert sample["extra_info"]["capture"] == {"clean": 1, "merged": 2}
    (segments,) = sample["extra_info"]["segments"]
    assert (segments["message_index"], segments["texts"]) == (1, ["one ", "two ", "three"])


@pytest.mark.parametrize("kind", ["plain", "in a thread"])
async def test_without_token_ids_it_goes_on_from_the_text(buffer, write_rows, kind: str) -> None:
    seen: list[Json] = []
    sample, bodies = await sample_of(saying(TEXT, [4]), buffer, write_rows, calling(kind, seen), capture=False)
    assert bodies[1]["messages"] == [*PROMPT, {"role": "assistant", "content": "one "}]
    assert (seen[0]["choices"][0]["message"]["content"], seen[0]["usage"]["completion_tokens"]) == (TEXT, 14)
    assert "tokens" not in sample


async def test_text_that_the_call_itself_goes_on_from_is_no_part_of_the_reply(buffer, write_rows) -> None:
    seen: list[Json] = []

    async def prefixed(client: Any, messages: Any, params: Any) -> Any:
        asked = {**ASKING, "messages": [*PROMPT, {"role": "assistant", "content": "one "}]}
        goes_on = {"continue_final_message": True, "add_generation_prompt": False}
        return told(await client.chat.completions.create(**asked, extra_body=goes_on), seen)

    _, bodies = await sample_of(saying(TEXT, [8]), buffer, write_rows, prefixed, capture=False)
    assert bodies[1]["messages"] == [*PROMPT, {"role": "assistant", "content": "one two "}]
    assert seen[0]["choices"][0]["message"]["content"] == "two three"


# The package itself warns of what SGLang adds to `metadata`, when it parses.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")
@pytest.mark.parametrize("is_parsed", [True, False])
async def test_what_was_cut_off_in_a_grammar_is_asked_afresh_and_never_parsed(
    buffer, write_rows, is_parsed: bool
) -> None:
    async def parsed(client: Any, messages: Any, params: Any) -> Any:
        if is_parsed:
            reply = await client.chat.completions.parse(**ASKING, response_format=Number)
            assert reply.choices[0].message.parsed == Number(a=1)
        else:
            reply = await client.chat.completions.create(**ASKING, response_format={"type": "json_object"})
        return told(reply, [])

    def answer(call: ScriptedCall) -> Reply:
        return Reply(text='{"a": ', finish_reason="abort") if call.number == 0 else Reply(text='{"a": 1}')

    sample, bodies = await sample_of(answer, buffer, write_rows, parsed)
    check_tokens(sample, [*encode('{"a": 1}'), TURN_END])
    assert [body["max_tokens"] for body in bodies] == [64, 64]
    assert sample["extra_info"]["capture"]["aborted_tokens"] == 6


async def test_calls_at_the_same_time_are_each_gone_on_with(buffer, write_rows) -> None:
    """A stop string lies across the cut of each: neither record has a token behind it."""
    prompts = ["left", "right"]

    async def both(client: Any, messages: Any, params: Any) -> Any:
        asked = [{**ASKING, "messages": [{"role": "user", "content": prompt}], "stop": ["END"]} for prompt in prompts]
        replies = await asyncio.gather(*(client.chat.completions.create(**each) for each in asked))
        assert [reply.choices[0].message.content for reply in replies] == ["so left ", "so right "]
        return told(replies[-1], [])

    def answer(call: ScriptedCall) -> Reply:
        text = f"so {call.prompt} END of it"
        if not call.said:
            return Reply(text=text[: text.index("ND")], finish_reason="abort")
        return Reply(text=text[len(call.said) :])

    _, samples = await samples_of(answer, buffer, write_rows, both)
    trained = [[t for t, kept in zip(s["tokens"], s["loss_mask"], strict=True) if kept] for s in samples]
    assert sorted(trained) == sorted(encode(f"so {prompt} END") for prompt in prompts)


async def test_an_engine_that_aborts_everything_is_a_failure_of_the_engine(
    buffer, write_rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.engines.continuation.continued_call.MAX_EMPTY_PARTS", 2)
    script = lambda _: Reply(finish_reason="abort")  # noqa: E731 - short
    sample, bodies = await sample_of(script, buffer, write_rows, calling("plain", []), max_attempts=1)
    assert sample["outcome"] == "engine_failure"
    assert len(bodies) == 2


async def test_a_stream_ends_with_what_it_has(buffer, write_rows) -> None:
    async def streamed(client: Any, messages: Any, params: Any) -> Any:
        chunks = [chunk async for chunk in await client.chat.completions.create(**ASKING, stream=True)]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        text = "".join(choice.delta.content or "" for choice in choices)
        return [*PROMPT, {"role": "assistant", "content": text}], choices[-1].finish_reason

    sample, bodies = await sample_of(saying(TEXT, [4]), buffer, write_rows, streamed)
    assert (sample["messages"][-1]["content"], sample["extra_info"]["finish_reason"]) == ("one ", "abort")
    assert len(bodies) == 1
