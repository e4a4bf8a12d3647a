"""A file of recorded calls that is not as it was written, or is none: it is refused whole."""

import random
from pathlib import Path

import pytest

from forebay.core.errors import InvalidInput
from forebay.core.records import log_records
from forebay.core.records.log_records import RECORD_VERSION
from forebay.replay import EngineRecorder, RecordedEngine, Recording
from forebay.replay.call_request import CallRequest
from forebay.replay.engine.call_writer import CallWriter
from forebay.replay.errors import NotRecorded, RecordingDamaged
from forebay.replay.recorded_calls import CallReply
from tests.replay.engine.calls_kit import chat, numbered, recorded
from tests.replay.recordings.recording_kit import flip_bit, write_recording


def write_call(file: Path) -> None:
    writer = CallWriter(file)
    reply = CallReply(200, "application/json", [(0.0, b"{}")])
    writer.put(writer.reserve(), CallRequest.read("POST", "/generate", b"{}"), reply)
    writer.close()


async def test_any_flipped_bit_has_the_file_refused_at_its_record(tmp_path: Path) -> None:
    file, flipped = tmp_path / "calls.fbr", tmp_path / "flipped.fbr"
    async with recorded(numbered(), file) as (recorder, _):
        for slot in range(3):
            await chat(recorder.url, slot)
            await chat(recorder.url, slot, is_stream=True)
    whole, chance = file.read_bytes(), random.Random(7)
    for place in range(0, len(whole), 37):
        changed = bytearray(whole)
        changed[place] ^= 1 << chance.randrange(8)
        flipped.write_bytes(changed)
        with pytest.raises(RecordingDamaged), RecordedEngine(flipped).in_thread():
            pass
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1
    flipped.write_bytes(damaged)
    with (
        pytest.raises(RecordingDamaged, match=r"flipped\.fbr: byte \d+: ") as refused,
        EngineRecorder(flipped, "http://127.0.0.1:9").in_thread(),
    ):
        pass
    assert whole[int(refused.value.place.split()[1]) :].startswith(b"\xf5FBR")


async def test_what_a_killed_recorder_left_unfinished_is_cut(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(numbered(), file) as (recorder, _):
        answers = [await chat(recorder.url, slot) for slot in range(2)]
    num_whole = file.stat().st_size
    async with recorded(numbered(), file) as (recorder, _):
        await chat(recorder.url, 2)
    content = file.read_bytes()
    for num_more in (1, 40, 200):
        file.write_bytes(content[: num_whole + num_more])
        with Recording.open(file) as recording:
            assert len([call for call in recording.calls() if call.request.method == "POST"]) == 2
        async with recorded(numbered(), file) as (recorder, _):
            another = await chat(recorder.url, 5)
        async with RecordedEngine(file) as engine:
            assert [await chat(engine.url, 0), await chat(engine.url, 1)] == answers
            assert await chat(engine.url, 5) == another


@pytest.mark.parametrize("kind", ["text", "damaged", "newer"])
def test_what_is_no_recording_of_this_version_is_refused(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "calls.fbr"
    if kind == "text":
        file.write_text("calls" * 1_000)
    else:
        with monkeypatch.context() as patched:
            patched.setattr(log_records, "RECORD_VERSION", RECORD_VERSION + (kind == "newer"))
            write_call(file)
        if kind == "damaged":
            flip_bit(file, file.stat().st_size - 1)
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
    write_recording(tmp_path / "run.fbr")
    before = (tmp_path / "run.fbr").read_bytes()
    with (
        pytest.raises(InvalidInput, match="an exported run"),
        EngineRecorder(tmp_path / "run.fbr", "http://a").in_thread(),
    ):
        pass
    assert (tmp_path / "run.fbr").read_bytes() == before
    with (
        pytest.raises(NotRecorded, match="has no engine calls"),
        RecordedEngine(tmp_path / "run.fbr").in_thread(),
    ):
        pass
    with pytest.raises(InvalidInput, match="cannot be written"), EngineRecorder(tmp_path, "http://a").in_thread():
        pass
    for wrong in (lambda: RecordedEngine(file, -1.0), lambda: RecordedEngine(file, float("nan"))):
        with pytest.raises(InvalidInput, match="speed must be a finite number"):
            wrong()
    with pytest.raises(InvalidInput, match="not the address of an engine"):
        EngineRecorder(file, "ftp://engine")
