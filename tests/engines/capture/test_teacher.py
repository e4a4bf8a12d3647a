"""Logprobs under a teacher, from a real server's prefill."""

import numpy
import pytest

from forebay.core.errors import EngineError, InvalidInput
from forebay.engines.capture import teacher
from forebay.engines.capture.fill_gaps import score
from forebay.engines.router_workers import admin_client
from forebay.engines.scripted import Reply, ScriptedEngine
from forebay.engines.scripted.tokens import encode


async def test_each_token_but_the_first_has_its_logprob_under_the_teacher() -> None:
    ids = encode("some text of a rollout")
    async with ScriptedEngine(lambda _: "x") as engine, admin_client(None, 10.0) as http:
        rows = (await teacher.arrays(engine.url, {"tokens": ids}))["teacher_logprobs"]
        expected = (await score(http, engine.url, ids)).logprobs[1:]
    assert rows.tokens == [(1, len(ids))]
    assert rows.data.dtype == numpy.float32
    assert rows.data.tolist() == pytest.approx(expected)


async def test_what_is_no_answer_of_a_teacher_is_an_error() -> None:
    with pytest.raises(InvalidInput, match="at least 2 tokens"):
        await teacher.arrays("http://127.0.0.1:9", {"messages": []})
    async with ScriptedEngine(lambda _: Reply(error_status=500)) as engine:
        with pytest.raises(EngineError):
            await teacher.arrays(engine.url + "/nowhere", {"tokens": [1, 2, 3]})
    async with ScriptedEngine(lambda _: "x") as engine:  # it knows no most probable ids
        with pytest.raises(EngineError, match="cannot be read as logprobs of the input"):
            await teacher.arrays(engine.url, {"tokens": encode("some text")}, top_k=2)
