"""The file of recorded calls: kills, full disks, damage, and calls that never came to their end."""

import asyncio
import json
import random
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from forebay.engines.scripted import Reply, ScriptedEngine
from forebay.replay import EngineRecorder, RecordedEngine, Recording
from tests.kit import TIME_LIMIT_S, first_line, poll_until
from tests.replay.engine.calls_kit import LIMIT_S, SAYS, all_of, chat, numbered, post, recorded

STREAM = {**SAYS, "stream": True}


def count_calls(file: Path) -> int:
    with Recording.open(file) as recording:
        return sum(call.request.method == "POST" for call in recording.calls())


async def test_a_recording_is_one_private_file_without_headers_of_requests(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    async with (
        recorded(numbered(), file) as (recorder, _),
        httpx.AsyncClient(verify=False, timeout=TIME_LIMIT_S) as http,
    ):
        headers = {"authorization": "Bearer sk-secret", "x-api-key": "sk-secret", "traceparent": "sk-secret"}
        await http.post(f"{recorder.url}/v1/chat/completions", json=SAYS, headers=headers)
    assert [path.name for path in tmp_path.iterdir()] == ["calls.fbr"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with Recording.open(file) as recording:
        calls = list(recording.calls())
    (asked,) = [call for call in calls if call.request.method == "POST"]
    assert (asked.request.path, asked.reply.status) == ("/v1/chat/completions", 200)
    assert asked.reply.content_type == "application/json"
    assert b"sk-secret" not in repr(calls).encode()


def test_killed_while_it_records_the_file_has_what_was_answered(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    with ScriptedEngine(numbered()).in_thread() as engine:
        command = ["engine", "record", str(file), "--upstream", engine.url, "--port", "0", "--json"]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "forebay.server.cli", *command], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        try:
            url = json.loads(first_line(process.stdout, LIMIT_S))["url"]
            answers = asyncio.run(all_of(*(chat(url, slot) for slot in range(12))))
            poll_until(lambda: count_calls(file) == 12, LIMIT_S)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
    with RecordedEngine(file).in_thread() as replayed:
        assert asyncio.run(all_of(*(chat(replayed.url, slot) for slot in range(12)))) == answers
    # It can be added to as well.
    with ScriptedEngine(numbered()).in_thread() as engine, EngineRecorder(file, engine.url).in_thread() as recorder:
        answers.append(asyncio.run(chat(recorder.url, 0)))
    with RecordedEngine(file).in_thread() as replayed:
        assert asyncio.run(all_of(chat(replayed.url, 0)))[0] == answers[0]
        assert asyncio.run(chat(replayed.url, 0)) == answers[-1]


async def test_where_the_disk_is_full_calls_go_on_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "calls.fbr"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with recorded(lambda call: f"{call.number}" + random.Random(call.number).randbytes(400).hex(), file) as (
        recorder,
        engine,
    ):
        first = await chat(recorder.url, 0)
        await asyncio.to_thread(poll_until, lambda: count_calls(file) == 1, LIMIT_S)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 10, limits[1]))
        try:
            for slot in range(1, 4):
                await chat(recorder.url, slot)
                await asyncio.to_thread(poll_until, lambda slot=slot: recorder.num_lost == slot, LIMIT_S)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        last = await chat(recorder.url, 4)
        assert len(engine.calls) == 5
    assert len([line for line in caplog.messages if "no longer recorded" in line]) == 1
    assert [line for line in caplog.messages if "3 calls were not recorded" in line]
    async with RecordedEngine(file) as engine:
        assert [await chat(engine.url, 0), await chat(engine.url, 4)] == [first, last]


# --- calls that did not come to their end


async def test_a_stream_that_its_client_left_breaks_off_where_it_was_left(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"

    async def read_to(url: str, end: bytes) -> bytes:
        read = b""
        path = f"{url}/v1/chat/completions"
        async with httpx.AsyncClient(timeout=LIMIT_S) as http, http.stream("POST", path, json=STREAM) as reply:
            async for part in reply.aiter_raw():
                read += part
                if end in read:
                    break
        return read

    async with recorded(lambda _: Reply(text="one two three", hang=True), file) as (recorder, engine):
        left = await read_to(recorder.url, b"two")
        await engine.wait_in_flight(0, timeout_s=LIMIT_S)  # the engine was told that nobody waits any more
    async with RecordedEngine(file) as replayed:
        assert b"two" in await read_to(replayed.url, b"two")
    async with RecordedEngine(file) as replayed:
        with pytest.raises(httpx.RemoteProtocolError):
            await read_to(replayed.url, b"never said")
    assert b"[DONE]" not in left


@asynccontextmanager
async def breaking_engine() -> AsyncIterator[str]:
    """The address of an engine that dies in the middle of every answer to a POST; it knows nothing else."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        else:
            kind = b"text/event-stream" if b'"stream"' in await reader.readuntil(b"}") else b"application/json"
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: %s\r\n\r\n" % kind)
            writer.write(b"9\r\ndata: 1\n\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1")
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_what_its_engine_broke_off_is_never_a_whole_answer(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    stream, whole = {"stream": True}, {"prompt": "x"}
    async with breaking_engine() as url, EngineRecorder(file, url) as recorder:
        with pytest.raises(httpx.RemoteProtocolError):
            await post(recorder.url, "/v1/completions", stream)
        assert (await post(recorder.url, "/v1/completions", whole)).status_code == 503
    assert count_calls(file) == 1
    async with RecordedEngine(file) as replayed:
        with pytest.raises(httpx.RemoteProtocolError):
            await post(replayed.url, "/v1/completions", stream)
        assert (await post(replayed.url, "/v1/completions", whole)).status_code == 422
        assert len(replayed.misses) == 1
        replayed.misses.clear()


async def test_a_whole_call_that_its_client_left_is_not_recorded(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(lambda _: Reply(text="one", hang=True), file) as (recorder, engine):
        asked = asyncio.create_task(chat(recorder.url))
        await engine.wait_in_flight(1, timeout_s=LIMIT_S)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await engine.wait_in_flight(0, timeout_s=LIMIT_S)
    assert count_calls(file) == 0
    shutil.copy(file, tmp_path / "copy.fbr")
    async with RecordedEngine(tmp_path / "copy.fbr") as replayed:
        assert (await post(replayed.url, "/v1/chat/completions", SAYS)).status_code == 422
        replayed.misses.clear()


async def test_what_was_aborted_is_replayed_as_aborted(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(lambda _: Reply(text="one", hang=True), file) as (recorder, engine):
        asked = asyncio.create_task(chat(recorder.url, 0))
        await engine.wait_in_flight(1, timeout_s=LIMIT_S)
        await post(recorder.url, "/abort_request", {"abort_all": True})
        aborted = await asked
    assert json.loads(aborted)["choices"][0]["finish_reason"] == "abort"
    async with RecordedEngine(file) as replayed:
        assert await chat(replayed.url, 0) == aborted


async def test_an_engine_that_is_not_there_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    engine = ScriptedEngine(numbered())
    async with engine:
        pass
    async with EngineRecorder(file, engine.url) as recorder:
        assert (await post(recorder.url, "/v1/chat/completions", SAYS)).status_code == 503
        async with engine:
            answer = await chat(recorder.url)
    assert count_calls(file) == 1
    async with RecordedEngine(file) as replayed, httpx.AsyncClient(verify=False, timeout=TIME_LIMIT_S) as http:
        assert await chat(replayed.url) == answer
        assert (await http.get(f"{replayed.url}/model_info")).json()["served_model_name"] == "scripted"
