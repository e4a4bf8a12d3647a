"""The file of recorded calls: kills, full disks, damage, and calls that never came to their end."""

import asyncio
import json
import logging
import random
import resource
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from forebay.core.errors import InvalidInput
from forebay.engines.scripted import Reply, ScriptedEngine
from forebay.replay import EngineRecorder, RecordedEngine, Recording
from forebay.replay.engine.answers import AllGiven
from forebay.replay.engine.call_frames import DamagedRow
from forebay.replay.engine.call_request import CallRequest
from forebay.replay.engine.known_calls import KnownCalls
from forebay.replay.errors import NotRecorded, RecordingDamaged
from forebay.replay.recording_schema import create, open_recording
from tests.kit import first_line, poll_until
from tests.replay.engine.calls_kit import LIMIT_S, SAYS, all_of, chat, numbered, post, recorded, rid

FLIPS = 300
STREAM = {**SAYS, "stream": True}


def count_calls(file: Path) -> int:
    connection = open_recording(file)
    try:
        (count,) = connection.execute("SELECT count(*) FROM calls WHERE method = 'POST'").fetchone()
        return int(count)
    finally:
        connection.close()


async def test_a_recording_is_one_private_file_without_headers_of_requests(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(numbered(), file) as (recorder, _), httpx.AsyncClient(verify=False) as http:
        headers = {"authorization": "Bearer sk-secret", "x-api-key": "sk-secret", "traceparent": "sk-secret"}
        await http.post(f"{recorder.url}/v1/chat/completions", json=SAYS, headers=headers)
    assert [path.name for path in tmp_path.iterdir()] == ["calls.fbr"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    connection = sqlite3.connect(file)
    rows = connection.execute("SELECT method, path, status, headers FROM calls WHERE method = 'POST'").fetchall()
    connection.close()
    assert rows == [("POST", "/v1/chat/completions", 200, '{"content-type":"application/json"}')]
    known = KnownCalls(file)
    for (request,) in known._connection.execute("SELECT seq FROM calls").fetchall():
        assert b"sk-secret" not in repr(known._read(request)).encode()
    known.close()


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
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.with_name("calls.fbr-wal").stat().st_size, limits[1]))
        try:
            for slot in range(1, 4):
                await chat(recorder.url, slot)
                await asyncio.to_thread(poll_until, lambda slot=slot: recorder.num_lost == slot, LIMIT_S)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        last = await chat(recorder.url, 4)
        assert len(engine.calls) == 5
    assert len([line for line in caplog.messages if "not recorded any more" in line]) == 1
    assert [line for line in caplog.messages if "lacks 3 calls" in line]
    async with RecordedEngine(file) as engine:
        assert [await chat(engine.url, 0), await chat(engine.url, 4)] == [first, last]


# --- damage


def known_replies(file: Path, requests: list[CallRequest]) -> list[object]:
    known = KnownCalls(file)
    try:
        replies: list[object] = []
        for request in requests:
            try:
                replies.append(known.take(request))
            except (DamagedRow, AllGiven) as error:
                replies.append(str(error))
        return [*replies, known.damaged]
    finally:
        known.close()


async def test_any_flipped_bit_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, flipped = tmp_path / "calls.fbr", tmp_path / "flipped.fbr"
    caplog.set_level(logging.CRITICAL)
    async with recorded(numbered(), file) as (recorder, _):
        for slot in range(3):
            await chat(recorder.url, slot)
            await chat(recorder.url, slot, is_stream=True)
        bodies = [json.dumps({**SAYS, "stream": is_stream}).encode() for is_stream in (False, True)] * 3
    requests = [CallRequest.read("POST", "/v1/chat/completions", body) for body in bodies]
    before, whole = known_replies(file, requests), file.read_bytes()
    assert before[-1] == {}
    chance, outcomes = random.Random(7), {"refused": 0, "told": 0, "harmless": 0}
    places = [*range(100), *(chance.randrange(len(whole)) for _ in range(FLIPS))]
    for place in places:
        changed = bytearray(whole)
        changed[place] ^= 1 << chance.randrange(8)
        flipped.write_bytes(changed)
        try:
            now = known_replies(flipped, requests)
        except RecordingDamaged:
            outcomes["refused"] += 1
            continue
        if now[-1]:
            outcomes["told"] += 1
        else:  # of what SQLite keeps for itself: nothing that was recorded has changed
            assert now == before, place
            outcomes["harmless"] += 1
    assert outcomes["told"] > FLIPS / 10  # most of a small file is room that its pages have left
    assert outcomes["refused"]


async def test_a_damaged_call_is_named_and_the_others_are_replayed(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(numbered(), file) as (recorder, _):
        answers = [await chat(recorder.url, slot) for slot in range(3)]
    connection = sqlite3.connect(file)
    ((seq, parts),) = connection.execute("SELECT seq, parts FROM calls WHERE lane LIKE '%-0001'").fetchall()
    half = len(parts) // 2
    connection.execute("UPDATE calls SET parts = ? WHERE seq = ?", (parts[:half] + b"?" + parts[half + 1 :], seq))
    connection.commit()
    connection.close()
    with Recording.open(file) as recording:
        calls = [call for call in recording.calls() if call.request.method == "POST"]
        assert [call.reply.body.decode() for call in calls] == [answers[0], answers[2]]
        assert {call.request.path for call in calls} == {"/v1/chat/completions"}
        assert [json.loads(call.request.body)["messages"] for call in calls] == [SAYS["messages"]] * 2
        assert [call.began_s for call in calls] == sorted(call.began_s for call in calls)
        assert [damage.place for damage in recording.damage] == [f"calls {seq}"]
        assert [damage.place for damage in recording.verify()] == [f"calls {seq}"]
    async with RecordedEngine(file) as engine:
        assert list(engine.damaged) == [seq]
        assert [await chat(engine.url, 0), await chat(engine.url, 2)] == [answers[0], answers[2]]
        reply = await post(engine.url, "/v1/chat/completions", {**SAYS, "rid": rid(1)})
        assert reply.status_code == 422
        assert f"call {seq} of calls.fbr is damaged" in engine.misses.pop()
        assert not engine.misses


@pytest.mark.parametrize("column", ["lane", "digest", "nth", "status"])
async def test_a_damaged_column_moves_no_answer_to_another_request(tmp_path: Path, column: str) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(numbered(), file) as (recorder, _):
        answers = [await chat(recorder.url, 0) for _ in range(3)]
        of_another = await chat(recorder.url, 1)
    connection = sqlite3.connect(file)
    ((seq, lane),) = connection.execute("SELECT seq, lane FROM calls WHERE lane LIKE '%-0000' AND nth = 1").fetchall()
    values = {"lane": lane[:-1] + "1", "digest": b"?" * 16, "nth": 7, "status": 201}
    connection.execute(f"UPDATE calls SET {column} = ? , began_s = 1 WHERE seq = ?", (values[column], seq))
    connection.commit()
    connection.close()
    async with RecordedEngine(file) as engine:
        assert list(engine.damaged) == [seq]
        assert await chat(engine.url, 0) == answers[0]
        assert (await post(engine.url, "/v1/chat/completions", {**SAYS, "rid": rid(0)})).status_code == 422
        assert [await chat(engine.url, 0), await chat(engine.url, 1)] == [answers[2], of_another]
        assert f"call {seq} of calls.fbr is damaged" in engine.misses.pop()


async def test_each_column_of_a_call_is_borne_out(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(numbered(), file) as (recorder, _):
        await chat(recorder.url, 0)
    changes = {"lane": "other", "digest": b"0" * 16, "nth": 5, "method": "PUT", "path": "/generate", "status": 201}
    for name, value in {**changes, "headers": "{}", "began_s": 1.0, "seq": 99}.items():
        changed = tmp_path / f"{name}.fbr"
        shutil.copy(file, changed)
        connection = sqlite3.connect(changed)
        connection.execute(f"UPDATE calls SET {name} = ? WHERE method = 'POST'", (value,))
        connection.commit()
        connection.close()
        with Recording.open(changed) as recording:
            assert [damage.place.partition(" ")[0] for damage in recording.verify()] == ["calls"], name


@pytest.mark.parametrize("kind", ["text", "database", "newer"])
def test_what_is_no_recording_of_this_version_is_refused(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "calls.fbr"
    if kind == "text":
        file.write_text("calls" * 1_000)
    elif kind == "database":
        connection = sqlite3.connect(file)
        connection.execute("CREATE TABLE calls (seq)")
        connection.close()
    else:
        create(file).close()
        connection = sqlite3.connect(file)
        connection.execute("PRAGMA user_version = 2")
        connection.close()
    before = file.read_bytes()
    for refused in (RecordedEngine(file), EngineRecorder(file, "http://127.0.0.1:9")):
        with pytest.raises(RecordingDamaged), refused.in_thread():
            pass
    assert file.read_bytes() == before


def test_what_cannot_be_is_named(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    with pytest.raises(FileNotFoundError), RecordedEngine(file).in_thread():
        pass
    with pytest.raises(FileNotFoundError), RecordedEngine(file, upstream="http://127.0.0.1:9").in_thread():
        pass
    assert not file.exists()
    run = create(tmp_path / "run.fbr")
    run.execute("INSERT INTO meta VALUES ('run', '{}', x'')")
    run.close()
    before = (tmp_path / "run.fbr").read_bytes()
    with (
        pytest.raises(InvalidInput, match="an exported run"),
        EngineRecorder(tmp_path / "run.fbr", "http://a").in_thread(),
    ):
        pass
    assert (tmp_path / "run.fbr").read_bytes() == before
    with (
        pytest.raises(NotRecorded, match="has no calls of an engine"),
        RecordedEngine(tmp_path / "run.fbr").in_thread(),
    ):
        pass
    with pytest.raises(InvalidInput, match="cannot be written"), EngineRecorder(tmp_path, "http://a").in_thread():
        pass
    for wrong in (lambda: RecordedEngine(file, -1.0), lambda: RecordedEngine(file, float("nan"))):
        with pytest.raises(InvalidInput, match="speed must be a number"):
            wrong()
    with pytest.raises(InvalidInput, match="not the address of an engine"):
        EngineRecorder(file, "ftp://engine")


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
    async with RecordedEngine(file) as replayed, httpx.AsyncClient(verify=False) as http:
        assert await chat(replayed.url) == answer
        assert (await http.get(f"{replayed.url}/model_info")).json()["served_model_name"] == "scripted"
