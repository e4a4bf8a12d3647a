"""A test of the agent on recorded answers: no engine, no GPU, the same tokens each time."""

import httpx
import pytest
from agent import solve

from forebay.replay import RecordedEngine

# Without this line, each test has its own recording in recordings/.
pytestmark = pytest.mark.recorded_engine("calls.fbr")


def test_the_agent_multiplies(recorded_engine: RecordedEngine) -> None:
    assert "408" in solve(recorded_engine.url, "What is 17 * 24?")
    # If the agent makes any other request, the end of the test raises NotRecorded with the first difference.
    assert len(recorded_engine.calls) == 2
    assert recorded_engine.unused == []


def test_another_question_does_not_get_a_recorded_answer(recorded_engine: RecordedEngine) -> None:
    body = {"model": "any", "messages": [{"role": "user", "content": "What is 17 * 25?"}]}
    assert httpx.post(f"{recorded_engine.url}/v1/chat/completions", json=body).status_code == 422
    assert "the nearest recorded request is" in recorded_engine.misses[0]
    recorded_engine.misses.clear()  # this one was expected
