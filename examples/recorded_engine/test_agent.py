"""The agent's test, on answers that were recorded: no engine, no GPU, the same tokens each time."""

from pathlib import Path

import httpx
from agent import solve

from forebay.replay import RecordedEngine

CALLS = Path(__file__).with_name("calls.fbr")


def test_the_agent_multiplies() -> None:
    with RecordedEngine(CALLS).in_thread() as engine:
        assert "408" in solve(engine.url, "What is 17 * 24?")
        # Leaving would raise NotRecorded, with the first difference, had the agent asked for anything else.
        assert len(engine.calls) == 2


def test_another_question_is_no_answer_of_an_old_one() -> None:
    with RecordedEngine(CALLS).in_thread() as engine:
        body = {"model": "any", "messages": [{"role": "user", "content": "What is 17 * 25?"}]}
        assert httpx.post(f"{engine.url}/v1/chat/completions", json=body).status_code == 422
        assert "the nearest recorded request is" in engine.misses[0]
        engine.misses.clear()  # this one was expected
