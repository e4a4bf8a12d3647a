"""What an engine is asked afterwards: logprobs of given tokens, to check a sample or to complete a stream."""

import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from forebay.core.errors import EngineError, EngineUnavailable, InvalidInput
from forebay.engines.capture.checking import check
from forebay.engines.capture.fill_gaps import complete
from forebay.engines.capture.turn import SamplingSpan, Turn, VersionSpan
from forebay.engines.scripted import ScriptedEngine
from forebay.engines.scripted.tokens import logprob
from tests.engines.capture.kit import make_turn, recorded
from tests.kit import TIME_LIMIT_S

PROMPT, SAMPLED = [5, 6, 7], [8, 9, 10]
NOBODY = "http://127.0.0.1:9"


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(lambda _: "x") as engine:
        yield engine


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=TIME_LIMIT_S) as client:
        yield client


def exact(version: str = "default", **changes: Any) -> Turn:
    """A turn with the logprobs that the scripted engine has for it."""
    before = [PROMPT[-1], *SAMPLED]
    told = [logprob(one, other, version) for one, other in zip(before, SAMPLED, strict=False)]
    return make_turn(PROMPT, SAMPLED, **{"logprobs": told, **changes})


def sample_of(turn: Turn) -> dict[str, Any]:
    return recorded(turn).samples()[0].fields()


async def test_an_exact_sample_has_no_difference(engine: ScriptedEngine) -> None:
    checked = await check(engine.url + "/v1", sample_of(exact()))
    assert (checked.num_tokens, checked.num_unknown, checked.weight_version) == (3, 0, "default")
    assert checked.max_delta < 1e-12


async def test_a_difference_is_told(engine: ScriptedEngine) -> None:
    sample = sample_of(exact())
    sample["logprobs"][4] += 0.25
    checked = await check(engine.url, sample)
    assert checked.max_delta == pytest.approx(0.25)
    assert checked.mean_delta == pytest.approx(0.25 / 3)
    sample["loss_mask"][4] = 0
    assert (await check(engine.url, sample)).max_delta < 1e-12


async def test_the_tokens_of_one_version_can_be_checked_alone(engine: ScriptedEngine) -> None:
    spans = [VersionSpan("1", 0, 1), VersionSpan("2", 1, 3)]
    sample = sample_of(exact(versions=spans))
    sample["logprobs"][3] += 9.0
    assert (await check(engine.url, sample, weight_version=2)).max_delta < 1e-12
    assert (await check(engine.url, sample, weight_version=1)).max_delta == pytest.approx(9.0)
    assert (await check(engine.url, sample, weight_version=3)).num_tokens == 0


async def test_what_cannot_be_checked_is_refused(engine: ScriptedEngine) -> None:
    with pytest.raises(InvalidInput, match="no tokens"):
        await check(engine.url, {"messages": []})
    with pytest.raises(EngineUnavailable):
        await check(NOBODY, sample_of(exact()))
    engine.available = False
    with pytest.raises(EngineError):
        await check(engine.url, sample_of(exact()))


def gappy(**changes: Any) -> Turn:
    told = exact().logprobs
    assert told is not None
    return exact(logprobs=[told[0], math.nan, math.nan], **changes)


async def test_a_stream_gets_its_version_and_the_logprobs_that_are_missing(
    engine: ScriptedEngine, http: httpx.AsyncClient
) -> None:
    (turn,) = await complete(http, engine.url, [gappy()], ("default", "default"))
    assert turn.logprobs == exact().logprobs
    assert turn.versions == [VersionSpan("default", 0, 3)]


async def test_weights_that_changed_meanwhile_are_both_named(engine: ScriptedEngine, http: httpx.AsyncClient) -> None:
    (turn,) = await complete(http, engine.url, [gappy()], ("older", "default"))
    assert (turn.seen_versions, turn.versions, turn.is_kv_mixed) == (["older", "default"], [], True)
    assert turn.logprobs is not None
    assert math.isnan(turn.logprobs[1])


async def test_logprobs_of_another_temperature_are_not_filled_in(
    engine: ScriptedEngine, http: httpx.AsyncClient
) -> None:
    (turn,) = await complete(http, engine.url, [exact(logprobs=[-50.0, math.nan, -1.0])], ("default", "default"))
    assert turn.logprobs is not None
    assert math.isnan(turn.logprobs[1])


@pytest.mark.parametrize(
    ("sampling", "is_scored"),
    [
        ({}, True),
        ({"top_p": 0.9, "top_k": None}, True),
        ({"temperature": 0}, True),
        ({"temperature": 0.7}, False),
        ({"temperature": None}, False),
        ({"grammar": "regex"}, False),
        (None, False),
    ],
)
async def test_an_answer_without_any_logprob_is_scored_at_temperature_1(
    engine: ScriptedEngine, http: httpx.AsyncClient, sampling: dict[str, Any] | None, is_scored: bool
) -> None:
    """As a stream that is nothing but a call of a tool, or an end token."""
    spans = [] if sampling is None else [SamplingSpan(sampling, 0, 3)]
    (turn,) = await complete(http, engine.url, [exact(logprobs=None, sampling=spans)], ("default", "default"))
    assert turn.logprobs == (exact().logprobs if is_scored else None)


async def test_under_a_grammar_nothing_is_filled_in_though_the_rest_agrees(
    engine: ScriptedEngine, http: httpx.AsyncClient
) -> None:
    (turn,) = await complete(
        http, engine.url, [gappy(sampling=[SamplingSpan({"grammar": "regex"}, 0, 3)])], ("default", "default")
    )
    assert turn.logprobs is not None
    assert math.isnan(turn.logprobs[1])


async def test_an_engine_that_is_gone_costs_no_stream(http: httpx.AsyncClient) -> None:
    assert await complete(http, NOBODY, [exact()], (None, None)) == [exact()]
    (turn,) = await complete(http, NOBODY, [exact()], ("7", None))
    assert turn == msgspec.structs.replace(exact(), seen_versions=["7"])
