"""A recorded engine as a test's cassette: recorded once, compared without dates, asked for what was not used."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay.core.errors import InvalidInput
from forebay.engines.scripted import ScriptedEngine
from forebay.replay import RecordedEngine
from forebay.replay.errors import NotRecorded
from tests.replay.engine.calls_kit import SAYS, Json, chat, numbered, post, recorded

NO_ENGINE = "http://127.0.0.1:9"
TESTS = """
import re

import httpx
import pytest


def ask(engine, text):
    body = {"model": "any", "messages": [{"role": "user", "content": text}]}
    reply = httpx.post(f"{engine.url}/v1/chat/completions", json=body, timeout=60).json()
    return reply["choices"][0]["message"]["content"]


@pytest.mark.parametrize("text", ["What is 3 / 5?", "What is 3 * 5?"])
def test_each_has_a_recording(recorded_engine, text):
    assert ask(recorded_engine, text) == "answer"
    assert len(recorded_engine.calls) == 1
    assert recorded_engine.unused == []


@pytest.mark.recorded_engine("calls.fbr", match=lambda body: re.sub("NOW", "then", str(body)))
def test_what_changes_is_not_compared(recorded_engine):
    assert ask(recorded_engine, "It is NOW.") == "answer"
"""


def dated(day: int, question: str = "What is due?") -> list[Json]:
    return [{"role": "user", "content": f"Today is 2026-03-{day:02}. {question}"}]


def without_dates(body: Any) -> Any:
    for message in body["messages"]:
        message["content"] = re.sub(r"\d{4}-\d{2}-\d{2}", "DATE", message["content"])
    return body


async def test_once_asks_the_engine_only_while_there_is_no_file(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    with pytest.raises(FileNotFoundError, match="upstream=URL"):
        async with RecordedEngine(file, record="once"):
            pass
    async with RecordedEngine(file, upstream=NO_ENGINE, record="once") as engine:
        assert (await post(engine.url, "/v1/chat/completions", {"messages": dated(1)})).status_code == 503
    assert not file.exists()
    async with ScriptedEngine(numbered()) as upstream:
        async with RecordedEngine(file, upstream=upstream.url, record="once") as engine:
            answers = [await chat(engine.url), await chat(engine.url)]
            assert len(engine.calls) == len(upstream.calls) == len(set(answers)) == 2

        async def asks_for_more() -> None:
            async with RecordedEngine(file, upstream=upstream.url, record="once") as engine:
                assert [await chat(engine.url), await chat(engine.url)] == answers
                assert (await post(engine.url, "/v1/embeddings", {"input": "x"})).status_code == 422

        with pytest.raises(NotRecorded, match="/v1/embeddings") as raised:
            await asks_for_more()
        assert f"remove {file} to record again" in raised.value.hint
        assert len(upstream.calls) == 2
    with pytest.raises(InvalidInput, match=r"record must be 'missing' or 'once' \(got 'always'\)"):
        RecordedEngine(file, upstream=NO_ENGINE, record="always")  # type: ignore[arg-type]


async def test_bodies_match_without_what_changes_in_them(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(numbered(), file) as (recorder, _):
        answer = await chat(recorder.url, messages=dated(1))
    async with RecordedEngine(file, match=without_dates) as engine:
        assert await chat(engine.url, messages=dated(2)) == answer
        assert engine.calls[0].value["messages"] == dated(2)
        other = {**SAYS, "messages": dated(3, "What is late?")}
        refused = (await post(engine.url, "/v1/chat/completions", other)).json()["error"]["message"]
        assert 'recorded "Today is DATE. What is due?", now "Today is DATE. What is late?"' in refused
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": 7})):
            assert (await post(engine.url, path, body)).status_code == 422
        assert "match failed on the body of POST /v1/completions: KeyError('messages')" in engine.misses[1]
        assert len(engine.misses) == 3
        engine.misses.clear()
    with pytest.raises(InvalidInput, match="match failed on the body of POST /v1/chat/completions"):
        async with RecordedEngine(file, match=lambda body: body["none"]):
            pass


async def test_with_an_engine_behind_it_a_match_is_recorded_once(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    async with ScriptedEngine(numbered()) as upstream:
        options: Json = {"upstream": upstream.url, "record": "once", "match": without_dates, "again": True}
        async with RecordedEngine(file, **options) as engine:
            answer = await chat(engine.url, messages=dated(1))
            assert await chat(engine.url, messages=dated(2)) == answer
        assert len(upstream.calls) == 1


async def test_the_calls_that_were_not_asked_for_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    async with recorded(numbered(), file) as (recorder, _):
        for day in (1, 2, 2, 3):
            await chat(recorder.url, messages=dated(day))
        await post(recorder.url, "/tokenize", {"prompt": "x"})
    async with RecordedEngine(file, again=True) as engine:
        for day in (2, 1, 1):
            await chat(engine.url, messages=dated(day))
        assert [call.value["messages"] for call in engine.unused] == [dated(2), dated(3)]
        await chat(engine.url, messages=dated(3))
        await chat(engine.url, messages=dated(2))
    assert engine.unused == []


def test_a_pytest_fixture_records_once_and_replays(tmp_path: Path) -> None:
    (tmp_path / "test_agent.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers -p no:asyncio\n")

    def outcome(*options: str) -> str:
        command = [sys.executable, "-m", "pytest", "-W", "error", "-p", "no:cacheprovider", *options, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path).stdout

    assert "run pytest --record-engine URL" in (without := outcome()), without
    with ScriptedEngine(lambda _: "answer").in_thread() as upstream:
        assert "3 passed" in (first := outcome("--record-engine", upstream.url)), first
        assert len(upstream.calls) == 3
    made = sorted(path.name for path in tmp_path.rglob("*.fbr"))
    assert len(made) == 3
    test_file = tmp_path / "test_agent.py"
    test_file.write_text(test_file.read_text().replace('"It is NOW."', '"It is then."'))
    assert "3 passed" in (later := outcome()), later
    test_file.write_text(test_file.read_text().replace("What is 3 / 5?", "What is 3 / 6?"))
    assert "1 error" in (changed := outcome("-k", "3")), changed
