import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from forebay.core.errors import EngineError, EngineUnavailable
from forebay.engines.fake_sglang.calls import Choice, Piece, PromptCall, SamplingParams, choices_of, grow
from forebay.engines.tiny.extra import require
from forebay.engines.tiny.generation_thread import GenerationThread
from forebay.engines.tiny.model import LoadedModel
from forebay.engines.tiny.recipe import question

LIMIT_S = 60.0
ENDLESS = SamplingParams(max_tokens=4000, ignore_eos=True, seed=1)


@asynccontextmanager
async def generating(model: LoadedModel, *, max_rows: int = 64) -> AsyncIterator[GenerationThread]:
    thread = GenerationThread(model, max_rows=max_rows)
    thread.start()
    try:
        async with asyncio.timeout(LIMIT_S):
            yield thread
    finally:
        await thread.stop()


def make_call(
    model: LoadedModel, params: SamplingParams, *, text: str = "What?", rid: str = "r", n: int = 1, stream: bool = False
) -> PromptCall:
    return PromptCall(rid, tuple(model.tokenizer.encode(text)), params, n=n, stream=stream)


async def finished(call: PromptCall) -> list[Choice]:
    choices = choices_of([call])
    async for _ in grow(choices):
        pass
    return choices


async def first_piece(call: PromptCall) -> Piece:
    piece = await call.pieces.get()
    assert isinstance(piece, Piece)
    return piece


def eight_calls(model: LoadedModel) -> list[PromptCall]:
    """Eight prompts of different lengths, each with settings of its own."""
    return [
        make_call(
            model,
            SamplingParams(
                max_tokens=24 + 3 * i,
                temperature=0.6 + i / 10,
                top_p=1 - i / 20,
                top_k=-1 if i % 3 else 40,
                seed=i,
                ignore_eos=True,
            ),
            text="go on. " * i + question(i, 7),
        )
        for i in range(8)
    ]


async def test_a_seeded_call_gives_the_same_alone_and_among_others(loaded: LoadedModel) -> None:
    async with generating(loaded) as thread:
        alone = []
        for call in eight_calls(loaded):
            thread.submit(call)
            alone += await finished(call)
        together = eight_calls(loaded)
        for call in together:
            thread.submit(call)
        beside = [(await finished(call))[0] for call in together]
    assert [choice.text for choice in beside] == [choice.text for choice in alone]
    for one, other in zip(alone, beside, strict=True):
        assert [t.token_id for t in one.tokens] == [t.token_id for t in other.tokens]
        assert [t.logprob for t in one.tokens] == pytest.approx([t.logprob for t in other.tokens], abs=1e-4)


async def test_logprobs_in_a_batch_are_those_of_a_plain_forward_pass(loaded: LoadedModel) -> None:
    torch = require("torch")
    async with generating(loaded) as thread:
        calls = eight_calls(loaded)
        for call in calls:
            thread.submit(call)
        choices = [(await finished(call))[0] for call in calls]
    for call, choice in zip(calls, choices, strict=True):
        told = [token.token_id for token in choice.tokens]
        with torch.inference_mode():
            logits = loaded.network(torch.tensor([[*call.prompt_ids, *told]])).logits[0]
        after = torch.log_softmax(logits / call.params.temperature, dim=-1)[len(call.prompt_ids) - 1 :]
        expected = [float(after[place, token]) for place, token in enumerate(told)]
        assert [token.logprob for token in choice.tokens] == pytest.approx(expected, abs=1e-4)


async def test_a_call_that_joins_a_running_batch_is_not_disturbed(loaded: LoadedModel) -> None:
    async with generating(loaded) as thread:
        late = eight_calls(loaded)[3]
        thread.submit(late)
        alone = await finished(late)
        running = make_call(loaded, ENDLESS, stream=True)
        thread.submit(running)
        await first_piece(running)
        late = eight_calls(loaded)[3]
        thread.submit(late)
        assert (await finished(late))[0].text == alone[0].text


async def test_the_first_choice_of_n_is_what_n_1_gives(loaded: LoadedModel) -> None:
    params = SamplingParams(max_tokens=16, seed=5, temperature=2.0)
    async with generating(loaded) as thread:
        one, four = make_call(loaded, params), make_call(loaded, params, n=4)
        thread.submit(one)
        thread.submit(four)
        single, several = await finished(one), await finished(four)
    assert several[0].text == single[0].text
    assert len({choice.text for choice in several}) > 1


async def test_a_queued_call_is_aborted_too(loaded: LoadedModel) -> None:
    async with generating(loaded, max_rows=1) as thread:
        running, queued = make_call(loaded, ENDLESS, stream=True), make_call(loaded, ENDLESS, rid="queued")
        thread.submit(running)
        thread.submit(queued)
        await first_piece(running)
        thread.abort("queued")
        (choice,) = await finished(queued)
        assert (choice.finish_reason, choice.text, len(choice.tokens)) == ("abort", "", 0)


async def test_calls_beyond_the_rows_wait_their_turn(loaded: LoadedModel) -> None:
    async with generating(loaded, max_rows=2) as thread:
        calls = [make_call(loaded, SamplingParams(max_tokens=8, ignore_eos=True), n=2) for _ in range(3)]
        for call in calls:
            thread.submit(call)
        ended = [await finished(call) for call in calls]
    assert [choice.finish_reason for choices in ended for choice in choices] == ["length"] * 6


async def test_a_step_that_fails_answers_its_calls_and_the_next_ones_work(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with generating(loaded) as thread:
        with monkeypatch.context() as broken:
            broken.setattr(type(loaded.network), "forward", lambda *_, **__: 1 / 0)
            call = make_call(loaded, SamplingParams(max_tokens=3))
            thread.submit(call)
            with pytest.raises(EngineError, match="division by zero"):
                await finished(call)
        healthy = make_call(loaded, SamplingParams(max_tokens=3, ignore_eos=True))
        thread.submit(healthy)
        assert (await finished(healthy))[0].finish_reason == "length"


async def test_stopping_ends_every_call_and_refuses_new_ones(loaded: LoadedModel) -> None:
    async with generating(loaded) as thread:
        call = make_call(loaded, ENDLESS, stream=True)
        thread.submit(call)
        await first_piece(call)
        await thread.stop()
        assert (await finished(call))[0].finish_reason == "abort"
        assert not thread.is_alive
        with pytest.raises(EngineUnavailable):
            thread.submit(call)


async def test_the_load_says_what_is_in_flight(loaded: LoadedModel) -> None:
    async with generating(loaded, max_rows=2) as thread:
        running, queued = make_call(loaded, ENDLESS, n=2, stream=True), make_call(loaded, ENDLESS, n=2)
        thread.submit(running)
        thread.submit(queued)
        for _ in range(20):
            await first_piece(running)
        load = thread.load
        assert (load.num_running, load.num_waiting, load.max_rows) == (2, 2, 2)
        assert load.num_tokens > 2 * len(running.prompt_ids)
        assert load.num_prefilled == len(running.prompt_ids)
        thread.abort_all()
        await finished(queued)
    assert (thread.load.num_running, thread.load.num_waiting) == (0, 0)
