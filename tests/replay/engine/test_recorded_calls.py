"""Which recorded answer a request gets: the k-th of equal ones the k-th, in its own lane first, none twice."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from forebay.core.errors import InvalidInput
from forebay.engines.detect import DetectedEngine
from forebay.engines.scripted import ScriptedCall, ScriptedEngine
from forebay.replay import EngineRecorder, RecordedEngine
from forebay.replay.engine import recorded_engine, replay_answers
from forebay.replay.errors import NotRecorded
from forebay.web.serving import serve_app
from tests.kit import TIME_LIMIT_S, first_line
from tests.replay.engine.calls_kit import LIMIT_S, OTHER_RUN, SAYS, all_of, chat, numbered, post, recorded, rid

SLOTS = range(8)


async def test_a_call_is_recorded_before_its_client_can_make_the_next(tmp_path: Path) -> None:
    async with recorded(numbered(), tmp_path / "calls.fbr") as (recorder, _):
        await chat(recorder.url, 0)
        first = recorder.num_recorded
        for number in range(1, 11):
            await chat(recorder.url, 0)
            assert recorder.num_recorded == first + number


async def test_eight_equal_prompts_get_eight_answers_each_in_its_slot(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(numbered(), file) as (recorder, _):
        answers = await all_of(*(chat(recorder.url, slot) for slot in SLOTS))
        seconds = await all_of(*(chat(recorder.url, slot) for slot in SLOTS))
    assert len({*answers, *seconds}) == 16
    # Another run, in another order, as a second attempt: group and slot are what counts.
    order = [5, 3, 1, 0, 2, 4, 6, 7]
    async with RecordedEngine(file) as engine:
        names = {slot: {"rid": rid(slot, run=OTHER_RUN, attempt=1), "extra_key": "k", "user": "u"} for slot in order}
        asked = [chat(engine.url, slot, **names[slot]) for slot in order]
        assert await all_of(*asked) == [answers[slot] for slot in order]
        assert await all_of(*(chat(engine.url, slot) for slot in order)) == [seconds[slot] for slot in order]
        assert len(engine.calls) == 16


async def test_calls_without_a_lane_get_theirs_in_order_and_others_then(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(numbered(), file) as (recorder, _):
        answers = [await chat(recorder.url) for _ in range(3)]
        of_a_slot = await chat(recorder.url, 4)
    async with RecordedEngine(file) as engine:
        assert [await chat(engine.url) for _ in range(4)] == [*answers, of_a_slot]
    async with RecordedEngine(file) as engine:
        # A slot that was not recorded takes no other slot's answer while there is one of nobody.
        assert [await chat(engine.url, slot) for slot in (7, 4, 7)] == [answers[0], of_a_slot, answers[1]]


async def test_none_is_given_twice_unless_again(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(numbered(), file) as (recorder, _):
        answers = {slot: [await chat(recorder.url, slot), await chat(recorder.url, slot)] for slot in (0, 1)}

    async def once_too_often() -> None:
        async with RecordedEngine(file) as engine:
            for slot in (0, 1):
                assert [await chat(engine.url, slot) for _ in range(2)] == answers[slot]
            for _ in range(2):
                refused = await post(engine.url, "/v1/chat/completions", {**SAYS, "rid": rid(1)})
                assert refused.status_code == 422

    with pytest.raises(NotRecorded, match=r"2 calls were not recorded.*-0001: all 4 answers recorded for it"):
        await once_too_often()
    async with RecordedEngine(file, again=True) as engine:
        for _ in range(3):
            for slot in (1, 0):
                assert [await chat(engine.url, slot) for _ in range(2)] == answers[slot]
        # A slot without answers of its own goes round over everybody's.
        assert {await chat(engine.url, 7) for _ in range(9)} == {*answers[0], *answers[1]}


async def _says(request: Request) -> Response:
    """An engine whose words come one by one, however long its machine stands still between them."""
    if not (await request.json()).get("stream"):
        return JSONResponse({"said": NUM_WORDS})

    async def words() -> AsyncIterator[str]:
        for number in range(NUM_WORDS):
            yield f"data: {number}\n\n"
            await asyncio.sleep(0.1)

    return StreamingResponse(words(), media_type="text/event-stream")


NUM_WORDS = 5
WORD_BY_WORD = Starlette(routes=[Route("/v1/chat/completions", _says, methods=["POST"])])


async def test_streams_come_in_their_parts_and_are_requests_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"

    async def parts(url: str) -> list[bytes]:
        body = {**SAYS, "stream": True}
        async with (
            httpx.AsyncClient(timeout=TIME_LIMIT_S) as http,
            http.stream("POST", f"{url}/v1/chat/completions", json=body) as reply,
        ):
            assert reply.headers["content-type"].startswith("text/event-stream")
            return [part async for part in reply.aiter_raw()]

    async with serve_app(WORD_BY_WORD) as port, EngineRecorder(file, f"http://127.0.0.1:{port}") as recorder:
        streamed = await parts(recorder.url)
        whole = await chat(recorder.url)
    assert len(streamed) >= NUM_WORDS
    for speed in (0.0, 1.0):
        async with RecordedEngine(file, speed) as engine:
            began_s = asyncio.get_running_loop().time()
            again = await parts(engine.url)
            took_s = asyncio.get_running_loop().time() - began_s
            assert b"".join(again) == b"".join(streamed)
            assert await chat(engine.url) == whole
            if speed:
                assert took_s > 0.3
                assert len(again) >= NUM_WORDS


async def test_generate_and_its_neighbours_are_replayed(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    drawn = {"input_ids": [72, 105], "sampling_params": {"max_new_tokens": 4}, "return_logprob": True}
    scored = {**drawn, "sampling_params": {"max_new_tokens": 0}, "logprob_start_len": 0}
    asked = [("/generate", drawn), ("/generate", scored), ("/tokenize", {"prompt": "sum"}), ("/none", {"a": 1})]
    async with recorded(numbered(), file) as (recorder, _):
        replies = [await post(recorder.url, path, body) for path, body in asked]
    async with RecordedEngine(file) as engine:
        for (path, body), before in zip(asked, replies, strict=True):
            now = await post(engine.url, path, body)
            assert (now.status_code, now.content) == (before.status_code, before.content)
        # What draws nothing has one answer, which stays it.
        assert (await post(engine.url, "/generate", scored)).content == replies[1].content
        assert (await post(engine.url, "/generate", drawn)).status_code == 422
        engine.misses.clear()
    assert [reply.status_code for reply in replies] == [200, 200, 200, 404]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"temperature": 0.25}, "temperature: recorded nothing, now 0.25"),
        ({"messages": [{"role": "user", "content": "What is 3 + 6?"}]}, 'now "What is 3 + 6?"'),
        ({"stream": True}, "stream: recorded nothing, now true"),
    ],
)
async def test_a_miss_tells_the_nearest_request_and_the_first_difference(
    tmp_path: Path, changed: dict[str, object], said: str
) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(numbered(), file) as (recorder, _):
        await chat(recorder.url, 1)
        await chat(recorder.url, 2, messages=[{"role": "user", "content": "Something else altogether"}])
    async with RecordedEngine(file) as engine:
        reply = await post(engine.url, "/v1/chat/completions", {**SAYS, **changed})
        message = reply.json()["error"]["message"]
        assert reply.status_code == 422
        assert "group and slot 000000000000000a-0001" in message
        assert said in message
        assert engine.misses == [message]
        elsewhere = (await post(engine.url, "/v1/completions", {"prompt": "x"})).json()["error"]["message"]
        assert "nothing was recorded for this path, only for /v1/chat/completions" in elsewhere
        engine.misses.clear()


async def test_what_is_raised_in_the_block_bears_the_miss(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(numbered(), file) as (recorder, _):
        await chat(recorder.url)

    async def fails() -> None:
        async with RecordedEngine(file) as engine:
            await post(engine.url, "/v1/chat/completions", {**SAYS, "max_tokens": 1})
            raise KeyError("agent")

    with pytest.raises(KeyError) as raised:
        await fails()
    assert "max_tokens: recorded 64, now 1" in raised.value.__notes__[0]


def test_in_a_thread_it_raises_the_miss_where_it_is_left(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    with ScriptedEngine(lambda _: "4").in_thread() as engine, EngineRecorder(file, engine.url).in_thread() as recorder:
        before = httpx.post(f"{recorder.url}/v1/chat/completions", json=SAYS, timeout=TIME_LIMIT_S).text

    def misses() -> None:
        with RecordedEngine(file).in_thread() as replayed:
            assert httpx.post(f"{replayed.url}/v1/chat/completions", json=SAYS, timeout=TIME_LIMIT_S).text == before
            assert (
                httpx.post(f"{replayed.url}/v1/embeddings", json={"input": "x"}, timeout=TIME_LIMIT_S).status_code
                == 422
            )

    with pytest.raises(NotRecorded, match="/v1/embeddings"):
        misses()


async def test_what_is_missing_is_asked_upstream_only_where_that_is_given(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(numbered(), file) as (recorder, _):
        first = await chat(recorder.url, 0)
    async with ScriptedEngine(numbered()) as engine, RecordedEngine(file, upstream=engine.url) as replayed:
        assert await chat(replayed.url, 0) == first
        new = [await chat(replayed.url, 0), await chat(replayed.url, 0)]
        assert len(engine.calls) == 2
        assert len({*new}) == 2
    # What it answered was added, in its lane.
    async with RecordedEngine(file) as replayed:
        assert [await chat(replayed.url, 0) for _ in range(3)] == [first, *new]


async def test_a_second_recording_is_added_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    answers = []
    for text in ("one", "two"):
        async with recorded(lambda _, text=text: text, file) as (recorder, _):
            answers.append(await chat(recorder.url, 3))
            with pytest.raises(InvalidInput, match="is being recorded by another process"):
                async with EngineRecorder(file, "http://127.0.0.1:9"):
                    pass
    async with RecordedEngine(file) as engine:
        assert [await chat(engine.url, 3) for _ in range(2)] == answers


async def test_it_is_taken_for_the_engine_that_was_recorded(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(lambda _: "4", file) as (recorder, engine):
        engine.started_with["random_seed"] = 7
        async with DetectedEngine(recorder.url) as detected:
            before = await detected.model_info()
    async with RecordedEngine(file) as replayed, DetectedEngine(replayed.url) as detected:
        assert await detected.model_info() == before
        assert await detected.is_available()
        load = await detected.load()
        assert load is not None
        assert load.idle
        async with httpx.AsyncClient(timeout=TIME_LIMIT_S) as http:
            # Never asked while it was recorded, but by the recorder itself.
            assert (await http.get(f"{replayed.url}/server_info")).json()["sampling_defaults"] == "openai"
            assert (await http.get(f"{replayed.url}/v1/models")).json()["data"][0]["id"] == "scripted"
            assert (await http.get(f"{replayed.url}/workers")).status_code == 404


def test_the_command_tells_a_miss_and_ends_with_it(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    with ScriptedEngine(lambda _: "4").in_thread() as engine, EngineRecorder(file, engine.url).in_thread() as recorder:
        before = httpx.post(f"{recorder.url}/v1/chat/completions", json=SAYS, timeout=TIME_LIMIT_S).text
    command = ["-m", "forebay.server.cli", "engine", "replay", str(file), "--port", "0", "--again"]
    for changed, code in (({}, 0), ({"seed": 7}, 1)):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-P", *command], text=True, **pipes) as process:
            assert process.stdout is not None
            try:
                url = first_line(process.stdout, LIMIT_S).rpartition(" ")[2].strip()
                for _ in range(3):
                    assert httpx.post(f"{url}/v1/chat/completions", json=SAYS, timeout=TIME_LIMIT_S).text == before
                reply = httpx.post(f"{url}/v1/chat/completions", json={**SAYS, **changed}, timeout=TIME_LIMIT_S)
                assert reply.status_code == (422 if code else 200)
            finally:
                process.terminate()
            _, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == code
        assert ("seed: recorded nothing, now 7" in errors) is bool(code)


async def test_the_calls_that_are_remembered_take_no_more_memory_than_they_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(numbered(), file) as (recorder, _):
        for slot in range(3):
            await chat(recorder.url, slot)
    monkeypatch.setattr(replay_answers, "MAX_REMEMBERED_BYTES", 600)
    async with RecordedEngine(file) as engine:
        for slot in range(3):
            await chat(engine.url, slot)
        assert [call.rid for call in engine.calls] == [rid(1), rid(2)]


def test_the_first_misses_are_kept_and_all_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "calls.fbr"
    monkeypatch.setattr(recorded_engine, "MAX_MISSES", 2)
    with ScriptedEngine(lambda _: "4").in_thread() as engine, EngineRecorder(file, engine.url).in_thread() as recorder:
        httpx.post(f"{recorder.url}/v1/chat/completions", json=SAYS, timeout=TIME_LIMIT_S)

    def ask(url: str, seeds: range) -> None:
        for seed in seeds:
            assert (
                httpx.post(f"{url}/v1/chat/completions", json={**SAYS, "seed": seed}, timeout=TIME_LIMIT_S).status_code
                == 422
            )

    def misses() -> None:
        with RecordedEngine(file).in_thread() as replayed:
            ask(replayed.url, range(3))
            assert [words.rpartition(" ")[2] for words in replayed.misses] == ["0", "1"]
            assert replayed.num_misses == 3
            replayed.misses.clear()
            assert replayed.num_misses == 0
            ask(replayed.url, range(10, 15))

    with pytest.raises(NotRecorded, match=r"^5 calls were not recorded; the first: .* now 10$"):
        misses()


async def test_no_call_goes_past_a_recorder_to_the_workers_of_a_router(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def workers(_: Request) -> JSONResponse:
        return JSONResponse({"workers": [{"url": "http://127.0.0.1:9"}]})

    router = Starlette(routes=[Route("/workers", workers)])
    async with serve_app(router) as port:
        recorder = EngineRecorder(tmp_path / "calls.fbr", f"http://127.0.0.1:{port}")
        async with recorder, httpx.AsyncClient(verify=False, timeout=TIME_LIMIT_S) as http:
            assert (await http.get(f"{recorder.url}/workers")).status_code == 404
    assert [line for line in caplog.messages if "is a router: its workers are hidden" in line]


def said_to(call: ScriptedCall) -> str:
    return f"{call.prompt}!"


async def test_pages_in_a_browser_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(said_to, file) as (recorder, _), httpx.AsyncClient(timeout=TIME_LIMIT_S) as http:
        await chat(recorder.url)
        foreign = await http.post(
            f"{recorder.url}/v1/chat/completions", json=SAYS, headers={"origin": "http://x.example"}
        )
        assert foreign.status_code == 403
    async with (
        RecordedEngine(file, allowed_hosts=["a.example"]) as engine,
        httpx.AsyncClient(timeout=TIME_LIMIT_S) as http,
    ):
        url = f"{engine.url}/v1/models"
        replies = [await http.get(url, headers={"host": name}) for name in ("evil.example", "a.example")]
        assert [reply.status_code for reply in replies] == [421, 200]
