"""``forebay engine record`` and ``replay`` as processes: their options, and how they end in the middle of calls."""

import asyncio
import json
import signal
from asyncio.subprocess import Process
from pathlib import Path

import httpx
import pytest

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from forebay.replay import RecordedEngine, Recording
from tests.kit import TIME_LIMIT_S, poll_until
from tests.replay.engine.calls_kit import LIMIT_S, SAYS, chat, engine_command, numbered, post, recorded, rid

SLOW = Reply(text="a long answer that takes its time", delay_s=0.2)
FOR_EVER = "1e-4"
"""At this speed a recorded 0.2 s are half an hour."""


async def end(process: Process, number: signal.Signals) -> tuple[int | None, str, str]:
    """Its exit status, and what it writes once it has been told to end."""
    process.send_signal(number)
    written, errors = await asyncio.wait_for(process.communicate(), LIMIT_S)
    return process.returncode, written.decode(), errors.decode()


def num_running(url: str) -> int:
    return int(httpx.get(f"{url}/v1/loads", timeout=TIME_LIMIT_S).json()["loads"][0]["num_running_reqs"])


def hangs(call: ScriptedCall) -> Reply:
    return Reply(text="one two three", hang=call.number > 0)


async def read_stream(url: str, has_begun: asyncio.Event) -> None:
    asked = {**SAYS, "stream": True, "rid": rid(2)}
    async with (
        httpx.AsyncClient(timeout=LIMIT_S, verify=False) as http,
        http.stream("POST", f"{url}/v1/chat/completions", json=asked) as reply,
    ):
        async for _ in reply.aiter_raw():
            has_begun.set()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_recorder_that_ends_in_the_middle_of_calls_tells_what_it_kept(
    tmp_path: Path, number: signal.Signals
) -> None:
    file = tmp_path / "calls.fbr"
    as_json = ["--json"] if number is signal.SIGTERM else []
    async with ScriptedEngine(hangs) as engine:
        async with engine_command("record", file, "--upstream", engine.url, *as_json) as (url, process):
            answer = await chat(url, 0)
            whole = asyncio.create_task(post(url, "/v1/chat/completions", {**SAYS, "rid": rid(1)}))
            has_begun = asyncio.Event()
            stream = asyncio.create_task(read_stream(url, has_begun))
            await engine.wait_in_flight(2, timeout_s=LIMIT_S)
            await asyncio.wait_for(has_begun.wait(), LIMIT_S)
            code, written, errors = await end(process, number)
        refused = await whole
        with pytest.raises(httpx.RemoteProtocolError):
            await stream
        await engine.wait_in_flight(0, timeout_s=LIMIT_S)
    assert (code, errors) == (0, "")
    assert (refused.status_code, "shutting down" in refused.json()["error"]["message"]) == (503, True)
    with Recording.open(file) as recording:
        kept = recording.num_calls
        assert [call.reply.body.decode() for call in recording.calls() if call.request.method == "POST"] == [answer]
        assert recording.verify() == []
    if as_json:
        assert json.loads(written) == {"event": "ended", "recorded": kept, "broken_off": 2, "lost": 0}
    else:
        told = f"{kept} answers added to {file}; 2 calls in flight were cut off and not recorded\n"
        assert written == told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_recorded_engine_that_ends_gives_what_it_has_and_breaks_off_the_rest(
    tmp_path: Path, number: signal.Signals
) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(lambda _: SLOW, file) as (recorder, _):
        answers = [await chat(recorder.url, 0), await chat(recorder.url, 1, is_stream=True)]
    async with ScriptedEngine(lambda _: Reply(text="one", hang=True)) as engine:
        async with engine_command("replay", file, "--speed", FOR_EVER, "--upstream", engine.url) as (url, process):
            asked = [asyncio.create_task(chat(url, slot, is_stream=bool(slot))) for slot in (0, 1)]
            missing = asyncio.create_task(post(url, "/v1/chat/completions", {**SAYS, "seed": 7}))
            await engine.wait_in_flight(1, timeout_s=LIMIT_S)
            await asyncio.to_thread(poll_until, lambda: num_running(url) == 2, LIMIT_S)
            assert await end(process, number) == (0, "", "")
        assert await asyncio.gather(*asked) == answers
        assert (await missing).status_code == 503


async def test_the_options_of_a_replay_do_what_they_say(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(lambda call: Reply(text=f"answer {call.number}", delay_s=0.2), file) as (recorder, _):
        answers = [await chat(recorder.url, 0) for _ in range(2)]
    async with ScriptedEngine(numbered()) as engine:
        options = ["--speed", 1_000, "--upstream", engine.url, "--again"]
        async with engine_command("replay", file, *options) as (url, process):
            assert [await chat(url, 0) for _ in range(5)] == [*answers, *answers, answers[0]]
            assert not engine.calls
            new = await chat(url, 0, seed=7)
            # It is known from now on, whether it is in the file yet or not.
            assert [await chat(url, slot, seed=7) for slot in (0, 3, 0)] == [new] * 3
            tokens = [(await post(url, "/tokenize", {"prompt": "x"})).json() for _ in range(2)]
            assert tokens[0] == tokens[1]
            assert len(engine.calls) == 1
            assert await end(process, signal.SIGTERM) == (0, "", "")
    async with engine_command("replay", file, "--speed", FOR_EVER, "--json") as (url, process):
        asked = asyncio.create_task(chat(url, 0))
        await asyncio.to_thread(poll_until, lambda: num_running(url) == 1, LIMIT_S)
        # It would take half an hour; an abort finds it at its end.
        await post(url, "/abort_request", {"rid": rid(0)})
        assert await asked == answers[0]
        assert await end(process, signal.SIGINT) == (0, "", "")
    async with RecordedEngine(file) as replayed:
        assert await chat(replayed.url, 0, seed=7) == new
        assert (await post(replayed.url, "/tokenize", {"prompt": "x"})).json() == tokens[0]
    with Recording.open(file) as recording:
        assert [call.request.route for call in recording.calls()].count("/tokenize") == 1
