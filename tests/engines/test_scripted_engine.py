"""The scripted engine on its own wire, seen through the official client and plain HTTP."""

import asyncio
import itertools
import json
import socket
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from starlette.responses import PlainTextResponse

from forebay.core.errors import InvalidInput
from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from forebay.engines.scripted.tokens import encode_chat
from forebay.web.serving import serve_app
from tests.kit import TIME_LIMIT_S

ASK: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}


async def post(engine: ScriptedEngine, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(timeout=TIME_LIMIT_S) as http:
        return await http.post(f"{engine.url}/v1/chat/completions", json=body)


def official(engine: ScriptedEngine) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none")


async def test_official_client_reads_the_scripts_text() -> None:
    async with ScriptedEngine(lambda call: f"you said {call.prompt}") as engine, official(engine) as client:
        reply = await client.chat.completions.create(**ASK)
    assert reply.choices[0].message.content == "you said What is 2 + 2?"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    prompt = encode_chat([{"role": "user", "content": "What is 2 + 2?"}])
    said = len("you said What is 2 + 2?") + 1
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), said)


async def test_official_client_reads_a_stream() -> None:
    async with ScriptedEngine(lambda _: "one two  three") as engine, official(engine) as client:
        stream = await client.chat.completions.create(**ASK, stream=True)
        chunks = [chunk async for chunk in stream]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == "one two  three"
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    assert len(choices) == 6


async def test_script_is_asked_once_for_each_choice() -> None:
    async with ScriptedEngine(lambda call: f"choice {call.choice}") as engine:
        reply = (await post(engine, {**ASK, "n": 3})).json()
        assert [choice["message"]["content"] for choice in reply["choices"]] == ["choice 0", "choice 1", "choice 2"]
        assert [call.number for call in engine.calls] == [0, 1, 2]
        assert [call.finished for call in engine.calls] == ["stop"] * 3


PLANTED = Reply(text="one two three", queue_s=0.2, prefill_s=0.3, delay_s=0.4, cached_tokens=7)


async def test_queue_prefill_and_decode_take_and_tell_what_the_reply_plants() -> None:
    async with ScriptedEngine(lambda _: PLANTED) as engine:
        began_s = time.monotonic()
        info = (await post(engine, {**ASK, "return_meta_info": True})).json()["choices"][0]["meta_info"]
        took_s = time.monotonic() - began_s
    decode_s = info["request_finished_ts"] - info["prefill_finished_time"]
    prefill_s = info["prefill_finished_time"] - info["forward_entry_time"]
    for told_s, planted_s in ((info["queue_time"], 0.2), (prefill_s, 0.3), (decode_s, 0.4)):
        # As measured: on a busy machine more than was planted, never less.
        assert planted_s - 0.02 <= told_s <= took_s - (0.9 - planted_s) + 0.02
    assert 0.9 <= info["e2e_latency"] <= took_s
    assert info["cached_tokens"] == 7


async def load_of(http: httpx.AsyncClient) -> tuple[int, int]:
    """The choices that run, and those that wait."""
    (load,) = (await http.get("/v1/loads")).json()["loads"]
    return load["num_running_reqs"], load["num_waiting_reqs"]


async def test_a_call_that_is_aborted_in_the_queue_tells_no_stage_that_it_never_reached() -> None:
    async with (
        ScriptedEngine(lambda _: Reply(text="late", queue_s=30)) as engine,
        httpx.AsyncClient(base_url=engine.url, timeout=TIME_LIMIT_S) as http,
    ):
        body = {**ASK, "rid": "waits", "return_meta_info": True}
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        await engine.wait_in_flight(1)
        async with asyncio.timeout(TIME_LIMIT_S):
            while await load_of(http) != (0, 1):  # noqa: ASYNC110 -- it turns to the call a moment later
                await asyncio.sleep(0.01)
        await http.post("/abort_request", json={"rid": "waits"})
        (choice,) = (await asking).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("abort", "")
    assert 0 < choice["meta_info"]["e2e_latency"] < 20
    assert not {"forward_entry_time", "prefill_finished_time", "first_token_latency"} & choice["meta_info"].keys()


async def test_an_engine_without_metrics_tells_how_long_a_call_took_and_nothing_of_its_stages() -> None:
    async with ScriptedEngine(lambda _: PLANTED, has_metrics=False) as engine:
        info = (await post(engine, {**ASK, "return_meta_info": True})).json()["choices"][0]["meta_info"]
    assert info["e2e_latency"] >= 0.9
    assert not {"queue_time", "forward_entry_time", "prefill_finished_time", "request_finished_ts"} & info.keys()


async def test_the_traceparent_of_a_request_is_known_of_each_of_its_choices() -> None:
    traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
    async with (
        ScriptedEngine(lambda _: "4") as engine,
        httpx.AsyncClient(base_url=engine.url, headers={"traceparent": traceparent}, timeout=TIME_LIMIT_S) as http,
    ):
        await http.post("/v1/chat/completions", json={**ASK, "n": 2})
        await http.post("/generate", json={"input_ids": encode_chat(ASK["messages"])})
        await post(engine, ASK)
        assert [call.traceparent for call in engine.calls] == [traceparent] * 3 + [None]


async def test_calls_that_arrive_together_have_numbers_of_their_own() -> None:
    async with ScriptedEngine(lambda call: str(call.number)) as engine, httpx.AsyncClient(timeout=TIME_LIMIT_S) as http:
        replies = await asyncio.gather(*(http.post(f"{engine.url}/v1/chat/completions", json=ASK) for _ in range(32)))
    told = [int(reply.json()["choices"][0]["message"]["content"]) for reply in replies]
    assert sorted(told) == list(range(32))


async def test_coroutine_script_tool_calls_and_finish_reason() -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]

    async def script(call: ScriptedCall) -> Reply:
        return Reply(tool_calls=calls) if call.number == 0 else Reply(text="cut", finish_reason="length")

    async with ScriptedEngine(script) as engine:
        first, second = (await post(engine, ASK)).json(), (await post(engine, ASK)).json()
    assert first["choices"][0]["message"]["tool_calls"] == calls
    assert first["choices"][0]["finish_reason"] == "tool_calls"
    assert second["choices"][0]["finish_reason"] == "length"


async def test_error_status_and_a_script_that_raises() -> None:
    def script(call: ScriptedCall) -> Reply:
        if call.number:
            raise KeyError("lost")
        return Reply(error_status=400, text="too long")

    async with ScriptedEngine(script) as engine:
        told, raised = await post(engine, ASK), await post(engine, ASK)
        assert [call.finished for call in engine.calls] == ["error", "error"]
    assert (told.status_code, told.json()["message"]) == (400, "too long")
    assert raised.status_code == 500
    assert "KeyError('lost')" in raised.json()["message"]


async def test_delay_passes_and_an_abort_in_it_leaves_some_of_the_words() -> None:
    words = " ".join(str(number) for number in range(1000))
    async with ScriptedEngine(lambda call: Reply(text=words, delay_s=0.05 if call.number else 300.0)) as engine:
        asked = asyncio.create_task(post(engine, {**ASK, "rid": "slow"}))
        await engine.wait_in_flight(1)
        assert (await post(engine, ASK)).json()["choices"][0]["message"]["content"] == words
        while not engine.calls[0].sampled_ids:  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.005)
        async with httpx.AsyncClient(timeout=TIME_LIMIT_S) as http:
            await http.post(f"{engine.url}/abort_request", json={"rid": "slow"})
        text = (await asked).json()["choices"][0]["message"]["content"]
    assert words.startswith(text)
    assert 0 < len(text) < len(words)


async def test_a_long_reply_takes_its_time_and_no_more_on_a_busy_machine() -> None:
    """Each of its sleeps lasts longer than it should: that does not add up."""
    turns = itertools.count()

    async def keep_busy() -> None:
        for _ in turns:
            time.sleep(0.01)  # noqa: ASYNC251 - other work of the machine
            await asyncio.sleep(0)

    async with ScriptedEngine(lambda _: Reply(text="a " * 300, delay_s=1.0)) as engine:
        busy = asyncio.create_task(keep_busy())
        info = (await post(engine, {**ASK, "return_meta_info": True})).json()["choices"][0]["meta_info"]
        busy.cancel()
    assert info["request_finished_ts"] - info["prefill_finished_time"] >= 1.0
    # Two hundred sleeps, each of at least one turn of the loop, were there no clock; with one, a hundred and some for
    # HTTP, or fewer where a turn takes longer.
    assert next(turns) < 170


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_cancels_the_call(stream: bool) -> None:
    ended = asyncio.Event()

    async def script(call: ScriptedCall) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return "never"

    async with ScriptedEngine(script) as engine:
        asked = asyncio.create_task(post(engine, {**ASK, "stream": stream}))
        await engine.wait_in_flight(1)
        asked.cancel()
        await engine.wait_in_flight(0)
        assert ended.is_set()
        assert engine.calls[0].finished == "disconnected"


async def test_leaving_stops_what_still_runs() -> None:
    async with ScriptedEngine(lambda _: Reply(hang=True)) as engine:
        asked = asyncio.create_task(post(engine, ASK))
        await engine.wait_in_flight(1)
    assert (await asked).json()["choices"][0]["finish_reason"] == "abort"


def stand_still() -> None:
    time.sleep(0.2)  # a loop that has other work: its server looks ten times a second whether it is to end


async def test_leaving_ends_a_connection_that_comes_this_very_moment() -> None:
    async with ScriptedEngine(lambda _: "never") as engine:
        client = socket.create_connection(("127.0.0.1", urlsplit(engine.url).port), TIME_LIMIT_S)
        stand_still()
    with client:
        assert client.recv(1) == b""


async def test_leaving_ends_a_connection_whose_client_takes_nothing() -> None:
    async with serve_app(PlainTextResponse("long" * 5_000_000)) as port:
        client = socket.create_connection(("127.0.0.1", port), TIME_LIMIT_S)
        client.sendall(f"GET / HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n".encode())
        await asyncio.to_thread(client.recv, 1)
    with client, suppress(ConnectionResetError):
        while client.recv(1 << 20):
            pass


async def test_entered_again_on_the_same_port() -> None:
    engine = ScriptedEngine(lambda _: "again")
    async with engine:
        first = engine.url
    async with engine:
        assert engine.url == first
        assert (await post(engine, ASK)).status_code == 200


async def test_it_says_why_it_cannot_listen() -> None:
    async with ScriptedEngine(lambda _: "first") as first:
        taken = urlsplit(first.url).port or 0
        second = ScriptedEngine(lambda _: "second", port=taken)
        in_use = f"port {taken} of 127.0.0.1 cannot be used: Address already in use"
        with pytest.raises(InvalidInput, match=in_use) as told:
            await second.__aenter__()
        assert (told.value.field, "0 for a free one" in told.value.hint) == ("port", True)
        with pytest.raises(InvalidInput, match=in_use):
            await asyncio.to_thread(second.in_thread().__enter__)
    async with second:
        assert second.url == first.url, "it may be entered once the port is free"


def test_what_is_no_port_is_told_from_its_thread_as_well() -> None:
    engine = ScriptedEngine(lambda _: "never", port=70_000)
    with pytest.raises(InvalidInput, match=r"port 70000 .* from 0 to 65535"), engine.in_thread():
        pass


def test_url_before_it_serves_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="async with engine"):
        _ = ScriptedEngine(lambda _: "").url


async def test_unavailable_answers_503_and_bad_body_400() -> None:
    async with ScriptedEngine(lambda _: "") as engine:
        wrong: list[dict[str, Any]] = [
            {"messages": None},
            {"messages": ["hi"]},
            {"input_ids": []},
            {"input_ids": [9000]},
            {"n": "x"},
            {"max_tokens": "x"},
            {"stream": True, "return_token_ids": True},
        ]
        for fields in wrong:
            assert (await post(engine, ASK | fields)).status_code == 400, fields
        engine.available = False
        assert (await post(engine, ASK)).status_code == 503


def test_from_a_thread_for_code_without_an_event_loop() -> None:
    with ScriptedEngine(lambda _: Reply(hang=True)).in_thread() as engine:
        with httpx.Client(timeout=30) as http:
            assert http.get(f"{engine.url}/v1/models").json()["data"][0]["id"] == "scripted"
            with pytest.raises(httpx.ReadTimeout):
                http.post(f"{engine.url}/v1/chat/completions", json=ASK, timeout=0.2)
            engine.wait_calls(1)
            engine.wait_in_flight(0)
            assert json.loads(http.get(f"{engine.url}/v1/loads").content)["loads"][0]["num_running_reqs"] == 0
        assert [call.finished for call in engine.calls] == ["disconnected"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{engine.url}/health", timeout=TIME_LIMIT_S)
