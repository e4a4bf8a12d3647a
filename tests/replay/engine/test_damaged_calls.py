"""A file of recorded calls that is not as it was written, or is none: what is told, and what is replayed."""

import json
import logging
import random
import re
import shutil
import sqlite3
from pathlib import Path

import pytest

from forebay.core.errors import InvalidInput
from forebay.replay import EngineRecorder, RecordedEngine, Recording
from forebay.replay.engine.answers import AllGiven
from forebay.replay.engine.call_frames import DamagedRow
from forebay.replay.engine.call_request import CallRequest
from forebay.replay.engine.known_calls import KnownCalls
from forebay.replay.errors import NotRecorded, RecordingDamaged
from forebay.replay.recording_schema import VERSION, create
from tests.replay.engine.calls_kit import SAYS, chat, numbered, post, recorded, rid

FLIPS = 300
PAGE_BYTES = 4096
OF_A_ROW = re.compile(
    rb"(?P<lane>[0-9a-f]{16}-0000).{16,17}(?P<method>POST)(?P<path>/v1/chat/completions)"
    rb".*?(?P<headers>\{\"content-type\":\"application/json\"\})",
    re.DOTALL,
)
"""A row of the first slot, as it stands in the file: its columns of text, and what is between them."""


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


@pytest.mark.parametrize("column", ["lane", "method", "path", "headers"])
async def test_what_is_no_text_any_more_keeps_its_place(tmp_path: Path, column: str) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(numbered(), file) as (recorder, _):
        answers = [await chat(recorder.url, 0) for _ in range(3)]
        of_another = await chat(recorder.url, 1)
    content = bytearray(file.read_bytes())
    # SQLite fills a page from its end on.
    rows = sorted(OF_A_ROW.finditer(content), key=lambda row: (row.start() // PAGE_BYTES, -row.start()))
    assert len(rows) == 3
    content[rows[1].start(column)] ^= 0x80
    file.write_bytes(content)
    async with RecordedEngine(file) as engine:
        (seq,) = engine.damaged.keys() - {0}  # the file itself, of which an index does not fit
        assert await chat(engine.url, 0) == answers[0]
        reply = await post(engine.url, "/v1/chat/completions", {**SAYS, "rid": rid(0)})
        assert reply.status_code == 422
        assert f"call {seq} of calls.fbr is damaged" in engine.misses.pop()
        assert [await chat(engine.url, 0), await chat(engine.url, 1)] == [answers[2], of_another]
        assert (await post(engine.url, "/v1/completions", {})).status_code == 422
        assert "but for /v1/chat/completions" in engine.misses.pop()
        assert not engine.misses
    with Recording.open(file) as recording:
        assert [call.reply.body.decode() for call in recording.calls() if call.request.method == "POST"] == [
            answers[0],
            answers[2],
            of_another,
        ]
        assert f"calls {seq}" in [damage.place for damage in recording.verify()]


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
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
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
