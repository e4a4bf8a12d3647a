"""A recorded engine that is paused, told to stop calls, and given other weights."""

import asyncio
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from forebay.engines.aborts import abort_prefix
from forebay.engines.fake_sglang.request_bodies import WeightsBody
from forebay.engines.scripted import Reply
from forebay.replay import RecordedEngine
from forebay.replay.engine.replayed_state import ReplayedState
from tests.kit import TIME_LIMIT_S, poll_until
from tests.replay.engine.calls_kit import LIMIT_S, SAYS, chat, numbered, post, recorded, rid

SLOW = Reply(text="a long answer that takes its time", delay_s=0.2)
FOR_EVER = 1e-4
"""At this speed a recorded 0.2 s are half an hour."""


def num_running(url: str) -> int:
    return int(httpx.get(f"{url}/v1/loads", timeout=TIME_LIMIT_S).json()["loads"][0]["num_running_reqs"])


async def test_calls_wait_for_the_end_of_a_pause(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(numbered(), file) as (recorder, _):
        answer = await chat(recorder.url, 0)
    async with RecordedEngine(file) as engine:
        for mode in ("abort", "retract", "in_place"):
            assert (await post(engine.url, "/pause_generation", {"mode": mode})).json()["status"] == "ok"
        waiting = asyncio.create_task(chat(engine.url, 0))
        assert (await post(engine.url, "/tokenize", {"prompt": "x"})).status_code == 422  # the others are answered
        engine.misses.clear()
        assert not engine.calls
        assert not waiting.done()
        await post(engine.url, "/continue_generation", {})
        assert await waiting == answer


async def test_who_leaves_in_a_pause_takes_no_answer_with_him(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(numbered(), file) as (recorder, _):
        answer = await chat(recorder.url, 0)
    async with RecordedEngine(file) as engine:
        await post(engine.url, "/pause_generation", {"mode": "retract"})
        async with httpx.AsyncClient(timeout=httpx.Timeout(LIMIT_S, read=0.5), verify=False) as http:
            with pytest.raises(httpx.ReadTimeout):
                await http.post(f"{engine.url}/v1/chat/completions", json={**SAYS, "rid": rid(0)})
        await asyncio.to_thread(num_running, engine.url)
        await post(engine.url, "/continue_generation", {})
        assert await chat(engine.url, 0) == answer


async def test_an_abort_finds_a_call_at_its_end(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(lambda _: SLOW, file) as (recorder, _):
        answers = [await chat(recorder.url, 0), await chat(recorder.url, 1, is_stream=True)]
    async with asyncio.timeout(LIMIT_S), RecordedEngine(file, FOR_EVER) as engine:
        asked = [asyncio.create_task(chat(engine.url, slot, is_stream=bool(slot))) for slot in (0, 1)]
        await asyncio.to_thread(poll_until, lambda: num_running(engine.url) == 2, LIMIT_S)
        assert await abort_prefix(engine.url, rid(1)[:-4]) == 1
        assert await asked[1] == answers[1]
        assert not asked[0].done()
        await post(engine.url, "/abort_request", {"abort_all": True})
        assert await asked[0] == answers[0]


async def test_leaving_ends_what_is_being_answered(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(lambda _: SLOW, file) as (recorder, _):
        await chat(recorder.url, 0)
    async with asyncio.timeout(LIMIT_S):
        async with RecordedEngine(file, FOR_EVER) as engine:
            asked = asyncio.create_task(chat(engine.url, 0))
            await asyncio.to_thread(poll_until, lambda: engine.calls, LIMIT_S)
        assert "takes its time" in await asked


async def test_new_weights_have_their_name_and_answers_keep_theirs(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(numbered(), file) as (recorder, engine):
        before = await chat(recorder.url, 0)
        update = {"model_path": "/weights", "weight_version": "7"}
        assert (await post(recorder.url, "/update_weights_from_disk", update)).json()["success"] is True
        assert engine.weight_version == "7"
        after = await chat(recorder.url, 0)
    assert before != after
    async with RecordedEngine(file) as replayed, httpx.AsyncClient(verify=False, timeout=TIME_LIMIT_S) as http:
        info = f"{replayed.url}/model_info"
        assert (await http.get(info)).json()["weight_version"] == "default"
        assert await chat(replayed.url, 0) == before
        await post(replayed.url, "/update_weights_from_disk", update)
        assert (await http.get(info)).json()["weight_version"] == "7"
        assert await chat(replayed.url, 0) == after
        assert (await post(replayed.url, "/flush_cache", {})).status_code == 200
        assert (await post(replayed.url, "/init_weights_update_group", {"a": 1})).json()["success"] is True
        assert (await http.get(f"{replayed.url}/health")).status_code == 200


async def test_new_weights_wait_for_no_call_that_came_after_them(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(numbered(), file) as (recorder, _):
        await post(recorder.url, "/tokenize", {"prompt": "x"})
    async with asyncio.timeout(LIMIT_S), RecordedEngine(file, 1e-9) as engine:

        async def begin(number: int, num_then: int) -> asyncio.Task[httpx.Response]:
            """A call that is being answered, as so many are then."""
            body = {"prompt": "x", "rid": f"call-{number:03}"}
            asked = asyncio.create_task(post(engine.url, "/tokenize", body))
            await asyncio.to_thread(poll_until, lambda: num_running(engine.url) == num_then, LIMIT_S)
            return asked

        number, asked = 0, await begin(0, 1)
        update = {"model_path": "/weights", "weight_version": "7"}
        updating = asyncio.create_task(post(engine.url, "/update_weights_from_disk", update))
        while not updating.done():  # at every moment one is being answered
            following = await begin(number + 1, 2)
            await post(engine.url, "/abort_request", {"rid": f"call-{number:03}"})
            assert (await asked).status_code == 200
            number, asked = number + 1, following
        assert (await updating).json()["success"] is True
        assert await asyncio.to_thread(num_running, engine.url) == 1
        await post(engine.url, "/abort_request", {"abort_all": True})
        assert (await asked).status_code == 200


async def test_calls_wait_behind_new_weights(tmp_path: Path) -> None:
    state = ReplayedState()
    with state.answering("before"):
        update = asyncio.create_task(
            state.update_weights(WeightsBody.read(b'{"model_path": "/", "weight_version": "7"}'))
        )
        await asyncio.sleep(0)
        behind = asyncio.create_task(state.opened())
        with state.answering("one that draws nothing, and waits for no pause"):
            await asyncio.sleep(0)
            assert (update.done(), behind.done(), state.weight_version) == (False, False, None)
    async with asyncio.timeout(LIMIT_S):
        with state.answering("another"):
            await asyncio.gather(update, behind)
    assert state.weight_version == "7"


def test_the_buffer_reads_recordings_without_a_web_framework() -> None:
    code = (
        "import sys, forebay.buffer.journal_source, forebay.replay.recording_file, forebay.replay; "
        "found = {'starlette', 'uvicorn', 'httpx'} & set(sys.modules); assert not found, found; "
        "from forebay.replay import EngineRecorder, RecordedEngine; assert 'starlette' in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=LIMIT_S)
