"""What an engine says on the wire: the same calls, asked of the scripted, the tiny and the real SGLang engine.

The shapes are those of SGLang 0.5.23. An engine may tell more fields; it may not lack one, or give it another type.
"""

import asyncio
import json
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx
import pytest

LIMIT_S = 30.0
CLOSE = 1e-4
MESSAGES = [{"role": "user", "content": "what is 1 + 2?"}]
TOLD: dict[str, Any] = {"return_token_ids": True, "logprobs": True, "return_meta_info": True}
SCORED = TOLD | {"temperature": 0}
"""Without chance: SGLang names the last id of a vocabulary 0 when it scores a prompt, so it must not be sampled."""
NUMBER = (int, float)
NOTHING = type(None)

USAGE = {"prompt_tokens": int, "total_tokens": int, "completion_tokens": int, "reasoning_tokens": int}
SPANS = [{"version": str, "start": int, "end": int}]
META_INFO = {
    "id": str,
    "finish_reason": {"type": str},
    "prompt_tokens": int,
    "completion_tokens": int,
    "cached_tokens": int,
    "num_retractions": int,
    "weight_version": str,
    "weight_versions": SPANS,
}
TIMES = dict.fromkeys(
    [
        *("e2e_latency", "queue_time", "forward_entry_time", "prefill_finished_time", "first_token_latency"),
        *("request_received_ts", "request_finished_ts", "decode_throughput"),
    ],
    float,
)
"""In ``meta_info`` too, of an engine that tells metrics."""
CLOCKS_S = 0.05
"""So far apart may the clocks of an engine's processes be."""
LOGPROBS = {"content": [{"token": str, "bytes": list, "logprob": float, "top_logprobs": list}]}
CHAT = {
    "id": str,
    "object": "chat.completion",
    "created": int,
    "model": "tiny",
    "choices": [
        {
            "index": int,
            "message": {"role": "assistant", "content": str, "reasoning_content": NOTHING},
            "logprobs": LOGPROBS,
            "finish_reason": str,
            "matched_stop": (NOTHING, int, str),
            "prompt_token_ids": [int],
            "response_token_ids": [int],
            "meta_info": META_INFO,
        }
    ],
    "usage": USAGE,
    "metadata": {"weight_version": str, "weight_versions": SPANS},
}
CHUNK_HEAD = {"id": str, "object": "chat.completion.chunk", "created": int, "model": "tiny"}
DELTA = {"index": int, "delta": dict, "logprobs": (NOTHING, dict), "matched_stop": (NOTHING, int, str)}
CHUNK = {**CHUNK_HEAD, "choices": [{**DELTA, "finish_reason": NOTHING}]}
END_CHUNK = {**CHUNK_HEAD, "choices": [{**DELTA, "finish_reason": str}]}
IDS_CHUNK = {**CHUNK_HEAD, "usage": NOTHING, "sglext": {"input_ids": [int], "output_ids": [[int]]}}
USAGE_CHUNK = {**CHUNK_HEAD, "usage": USAGE}
GENERATED = {"text": str, "output_ids": [int], "meta_info": META_INFO}
GENERATED_LOGPROBS = {"input_token_logprobs": list, "output_token_logprobs": list, "output_token_logprobs_length": int}
CHAT_ERROR = {"object": "error", "message": str, "type": str, "code": 400}
GENERATE_ERROR = {"error": {"message": str}}


def check(told: Any, shape: Any, where: str = "reply") -> None:
    """Fail unless ``told`` has the shape: a type, several, a value, a list of one shape, or named shapes."""
    if isinstance(shape, dict):
        assert isinstance(told, dict), f"{where} is {told!r}"
        assert shape.keys() <= told.keys(), f"{where} lacks {sorted(shape.keys() - told.keys())}"
        for name, inner in shape.items():
            check(told[name], inner, f"{where}.{name}")
    elif isinstance(shape, list):
        assert isinstance(told, list), f"{where} is {told!r}"
        assert told, f"{where} is empty"
        for at, inner in enumerate(told):
            check(inner, shape[0], f"{where}[{at}]")
    elif isinstance(shape, type | tuple):
        assert isinstance(told, shape), f"{where} is {told!r}"
    else:
        assert told == shape, where


@dataclass(frozen=True)
class Wire:
    """An engine, and a folder from which it can read its weights again. Its model is called ``tiny``."""

    http: httpx.AsyncClient
    weights: str

    async def post(self, path: str, **body: Any) -> Any:
        """The body of a 200."""
        reply = await self.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json() if path not in {"/abort_request", "/flush_cache"} else None

    async def chat(self, max_tokens: int = 6, **fields: Any) -> dict[str, Any]:
        """A whole chat that goes on to its last token."""
        fixed = {"model": "tiny", "messages": MESSAGES, "max_tokens": max_tokens, "ignore_eos": True}
        told: dict[str, Any] = await self.post("/v1/chat/completions", **fixed | fields)
        return told

    async def generate(self, max_new_tokens: int = 4, **fields: Any) -> Any:
        """``/generate``, to the last token."""
        params = {"max_new_tokens": max_new_tokens, "temperature": 1.0, "ignore_eos": True}
        return await self.post("/generate", **{"sampling_params": params} | fields)

    async def events(self, path: str, **body: Any) -> list[Any]:
        """Every event of a stream but the last, which says that it is done."""
        reply = await self.http.post(path, json=body | {"stream": True})
        assert (reply.status_code, reply.headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
        *lines, end = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
        assert end == "[DONE]"
        return [json.loads(line) for line in lines]

    async def refused(self, path: str, **body: Any) -> Any:
        """The body of a 400."""
        reply = await self.http.post(path, json=body)
        assert reply.status_code == 400, reply.text
        return reply.json()

    async def load(self) -> int:
        """The calls that it works on."""
        (load,) = (await self.http.get("/v1/loads")).json()["loads"]
        check(load, {"num_running_reqs": int, "num_waiting_reqs": int})
        return int(load["num_running_reqs"]) + int(load["num_waiting_reqs"])

    async def wait_load(self, count: int) -> None:
        """Return once it works on so many calls."""
        async with asyncio.timeout(LIMIT_S):
            while await self.load() != count:  # noqa: ASYNC110 -- another process
                await asyncio.sleep(0.01)

    async def scores(self, tokens: list[int]) -> list[float]:
        """Its logprobs of tokens, but the first."""
        told = await self.generate(0, input_ids=tokens, return_logprob=True, logprob_start_len=0)
        first, *rest = told["meta_info"]["input_token_logprobs"]
        assert (first[0], [first[1], *(token for _, token, _ in rest)]) == (None, tokens)
        return [logprob for logprob, _, _ in rest]


def check_times(info: dict[str, Any], within_s: float) -> None:
    """Fail unless the times follow each other, and account for the call, which its client saw take ``within_s``."""
    check(info, TIMES, "meta_info")
    moments = [info[name] for name in ("request_received_ts", "forward_entry_time", "prefill_finished_time")]
    moments.append(info["request_finished_ts"])
    for earlier, later in pairwise(moments):
        assert earlier <= later + CLOCKS_S, moments
    # Between what the engine counts as waiting and as reading lies what its processes take to talk to each other.
    parts_s = info["queue_time"] + moments[3] - moments[1]
    assert 0 < parts_s <= info["e2e_latency"] + CLOCKS_S
    assert info["e2e_latency"] == pytest.approx(moments[3] - moments[0], abs=CLOCKS_S)
    assert info["first_token_latency"] == pytest.approx(moments[2] - moments[0], abs=CLOCKS_S)
    assert info["e2e_latency"] <= within_s
    assert info["decode_throughput"] > 0


class EngineWire:
    """The calls. A subclass gives the fixture ``wire``."""

    async def test_replies_tell_the_times_of_their_call(self, wire: Wire) -> None:
        began_s = time.monotonic()
        chat = await wire.chat(20, **TOLD)
        (choice,) = chat["choices"]
        check_times(choice["meta_info"], time.monotonic() - began_s)
        began_s = time.monotonic()
        generated = await wire.generate(20, input_ids=choice["prompt_token_ids"])
        check_times(generated["meta_info"], time.monotonic() - began_s)
        events = await wire.events("/generate", text="what is 1 + 2?", sampling_params={"max_new_tokens": 4})
        assert "e2e_latency" in events[-1]["meta_info"]
        info = (await wire.http.get("/server_info")).json()
        assert info["enable_metrics"] is True

    async def test_a_traceparent_changes_no_reply(self, wire: Wire) -> None:
        wire.http.headers["traceparent"] = f"00-{'a' * 32}-{'b' * 16}-01"
        check(await wire.chat(**TOLD), CHAT)

    async def test_a_whole_chat(self, wire: Wire) -> None:
        told = await wire.chat(rid="whole-1", **SCORED)
        check(told, CHAT)
        (choice,) = told["choices"]
        sampled = choice["response_token_ids"]
        assert (told["id"], choice["finish_reason"], len(sampled)) == ("whole-1", "length", 6)
        assert len(choice["logprobs"]["content"]) == 6
        assert told["usage"]["prompt_tokens"] == len(choice["prompt_token_ids"])
        assert told["metadata"]["weight_versions"][-1]["end"] == 6
        recorded = [token["logprob"] for token in choice["logprobs"]["content"]]
        assert (await wire.scores(choice["prompt_token_ids"] + sampled))[-6:] == pytest.approx(recorded, abs=CLOSE)

    async def test_several_choices_share_a_prompt(self, wire: Wire) -> None:
        told = await wire.chat(2, n=2, **TOLD)
        check(told, CHAT)
        assert [choice["index"] for choice in told["choices"]] == [0, 1]
        assert told["usage"]["completion_tokens"] == 4
        first, second = told["choices"]
        assert first["prompt_token_ids"] == second["prompt_token_ids"]

    async def test_a_chat_by_token_ids_goes_on_from_them(self, wire: Wire) -> None:
        (first,) = (await wire.chat(4, **SCORED))["choices"]
        held = first["prompt_token_ids"] + first["response_token_ids"]
        (rest,) = (await wire.chat(3, input_ids=held, **SCORED))["choices"]
        assert rest["prompt_token_ids"] == held
        recorded = [token["logprob"] for choice in (first, rest) for token in choice["logprobs"]["content"]]
        assert (await wire.scores(held + rest["response_token_ids"]))[-7:] == pytest.approx(recorded, abs=CLOSE)

    async def test_a_streamed_chat_tells_its_token_ids_at_the_end(self, wire: Wire) -> None:
        asked = {"return_output_ids_in_sglext": True, "return_input_ids_in_sglext": True}
        body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "ignore_eos": True, "logprobs": True}
        events = await wire.events("/v1/chat/completions", **body, **asked, stream_options={"include_usage": True})
        opening, *grown, end, ids, usage = events
        check(opening, CHUNK)
        assert opening["choices"][0]["delta"]["role"] == "assistant"
        check(grown, [CHUNK])
        check(end, END_CHUNK)
        check(ids, IDS_CHUNK)
        check(usage, USAGE_CHUNK)
        assert ids["choices"] == usage["choices"] == []
        assert (
            [len(sampled) for sampled in ids["sglext"]["output_ids"]] == [12] == [usage["usage"]["completion_tokens"]]
        )
        assert ids["sglext"]["input_ids"] == (await wire.chat(1, **TOLD))["choices"][0]["prompt_token_ids"]

    async def test_a_stream_tells_neither_ids_nor_usage_unasked(self, wire: Wire) -> None:
        body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, "ignore_eos": True}
        *_, end = await wire.events("/v1/chat/completions", **body)
        check(end, END_CHUNK)

    async def test_how_it_was_started(self, wire: Wire) -> None:
        told = (await wire.http.get("/server_info")).json()
        parser = (NOTHING, str)
        started = {"version": str, "sampling_defaults": str, "preferred_sampling_params": (NOTHING, dict)}
        check(told, {**started, "model_path": str, "tool_call_parser": parser, "reasoning_parser": parser})

    async def test_generate_from_token_ids(self, wire: Wire) -> None:
        told = await wire.generate(input_ids=[65, 66, 67], rid="native-1", return_logprob=True, logprob_start_len=0)
        check(told, {"text": str, "output_ids": list, "meta_info": {**META_INFO, **GENERATED_LOGPROBS}})
        meta = told["meta_info"]
        assert (meta["id"], meta["prompt_tokens"]) == ("native-1", 3)
        assert [token for _, token, _ in meta["input_token_logprobs"]] == [65, 66, 67]
        assert meta["output_token_logprobs_length"] == len(told["output_ids"])

    async def test_generate_for_a_list_of_prompts(self, wire: Wire) -> None:
        listed = await wire.generate(input_ids=[[65, 66, 67], [68]], rid="listed")
        check(listed, [{"text": str, "output_ids": list, "meta_info": META_INFO}])
        assert [told["meta_info"]["id"] for told in listed] == ["listed_0", "listed_1"]
        assert [told["meta_info"]["prompt_tokens"] for told in listed] == [3, 1]

    async def test_generate_from_a_chats_prompt_streamed(self, wire: Wire) -> None:
        prompt = (await wire.post("/tokenize", model="tiny", messages=MESSAGES))["tokens"]
        params = {"max_new_tokens": 8, "ignore_eos": True}
        events = await wire.events("/generate", input_ids=prompt, sampling_params=params, return_logprob=True)
        check(events[-1], GENERATED)
        assert [event["meta_info"]["finish_reason"] is None for event in events[:-1]] == [True] * (len(events) - 1)
        sampled = events[-1]["output_ids"]
        assert len(sampled) == 8
        assert all(event["output_ids"] == sampled[: len(event["output_ids"])] for event in events)

    async def test_tokens_of_a_chat_are_those_of_its_prompt(self, wire: Wire) -> None:
        told = await wire.post("/tokenize", model="tiny", messages=MESSAGES)
        check(told, {"tokens": [int], "count": int, "max_model_len": int})
        (choice,) = (await wire.chat(1, return_token_ids=True))["choices"]
        assert choice["prompt_token_ids"] == told["tokens"]
        text = (await wire.post("/detokenize", tokens=told["tokens"], skip_special_tokens=False))["text"]
        assert (await wire.post("/tokenize", model="tiny", prompt=text))["tokens"] == told["tokens"]
        assert (await wire.post("/detokenize", tokens=[[65, 66], [67]]))["text"] == [
            (await wire.post("/detokenize", tokens=tokens))["text"] for tokens in ([65, 66], [67])
        ]
        assert (await wire.post("/detokenize", tokens=[]))["text"] == ""

    async def test_weights_can_be_named_alone(self, wire: Wire) -> None:
        told = await wire.post("/update_weight_version", new_version="9", abort_all_requests=False)
        check(told, {"success": True, "message": str, "new_version": "9"})
        assert (await wire.chat(1))["metadata"]["weight_version"] == "9"

    async def test_errors(self, wire: Wire) -> None:
        chat = {"model": "tiny", "messages": MESSAGES}
        check(await wire.refused("/v1/chat/completions", model="tiny", messages=[]), CHAT_ERROR)
        streamed = await wire.refused("/v1/chat/completions", **chat, stream=True, return_token_ids=True)
        check(streamed, CHAT_ERROR)
        assert "return_token_ids is not supported with stream" in streamed["message"]
        check(await wire.refused("/generate", sampling_params={"max_new_tokens": 1}), GENERATE_ERROR)
        check(await wire.refused("/generate", input_ids=[]), GENERATE_ERROR)
        check(await wire.refused("/pause_generation", mode="now"), CHAT_ERROR)

    async def test_an_aborted_chat_keeps_its_tokens(self, wire: Wire) -> None:
        call = asyncio.create_task(wire.chat(1500, rid="abort-1", **TOLD))
        await wire.wait_load(1)
        again = await wire.refused("/v1/chat/completions", model="tiny", messages=MESSAGES, rid="abort-1")
        assert "Duplicate request ID" in again["message"]
        await wire.post("/abort_request", rid="abort-1")
        told = await call
        (choice,) = told["choices"]
        assert (choice["finish_reason"], choice["matched_stop"]) == ("abort", None)
        num_sampled = len(choice["response_token_ids"])
        assert num_sampled < 1500
        assert num_sampled == told["usage"]["completion_tokens"] == len(choice["logprobs"]["content"])
        await wire.wait_load(0)

    @pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
    async def test_a_pause_holds_what_runs_and_what_comes(self, wire: Wire, mode: str) -> None:
        call = asyncio.create_task(wire.chat(800, **TOLD))
        await wire.wait_load(1)
        check(await wire.post("/pause_generation", mode=mode), {"message": str, "status": "ok"})
        assert await wire.load() == (0 if mode == "abort" else 1)
        late = asyncio.create_task(wire.chat(2, **TOLD))
        updated = await wire.post(
            "/update_weights_from_disk", model_path=wire.weights, weight_version=f"v-{mode}", flush_cache=False
        )
        check(updated, {"success": True, "message": str, "num_paused_requests": int})
        assert not late.done()
        check(await wire.post("/continue_generation"), {"message": str, "status": "ok"})
        assert (await late)["metadata"]["weight_version"] == f"v-{mode}"
        told = await call
        spans = told["metadata"]["weight_versions"]
        (choice,) = told["choices"]
        assert choice["finish_reason"] == ("abort" if mode == "abort" else "length")
        assert len(spans) == (1 if mode == "abort" else 2)
        assert choice["meta_info"]["num_retractions"] == (1 if mode == "retract" else 0)
        assert spans[-1]["end"] == len(choice["response_token_ids"])
        info = (await wire.http.get("/model_info")).json()
        assert info["weight_version"] == f"v-{mode}"
