"""Opening and closing rollouts, and what their calls are recorded as."""

import asyncio

import openai
import pytest

from forebay.engines.scripted import Reply
from forebay.gateway.app import create_gateway
from forebay.gateway.spec import GatewaySpec
from forebay.web.serving import serve_app
from tests.gateway.conftest import Stage, codes_of
from tests.gateway.gateway_kit import RUN_ID, RUN_KEY, USER, Json, assert_whole, rid_of_run
from tests.kit import assert_error

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHATS = "chat/completions"
ASK: Json = {"model": "any", "messages": [USER]}


async def test_a_chat_is_answered_by_the_engine_and_recorded_token_by_token(stage: Stage) -> None:
    stage("four")
    rollout = await stage.open()
    async with rollout.client() as client:
        reply = await client.chat.completions.create(model="any", messages=[USER])
    assert reply.choices[0].message.content == "four"
    told = await rollout.close()
    (sample,) = told["samples"]
    assert_whole(sample)
    assert sample["messages"][-1]["content"] == "four"
    assert (told["num_calls"], told["failures"], told["finish_reason"]) == (1, [], "stop")
    assert all(rid_of_run(call.rid) for call in stage.calls)


async def test_a_streamed_chat_is_recorded_as_well(stage: Stage) -> None:
    stage("two and two")
    rollout = await stage.open()
    async with rollout.client() as client:
        stream = await client.chat.completions.create(model="any", messages=[USER], stream=True)
        texts = [choice.delta.content async for chunk in stream for choice in chunk.choices]
    assert "".join(filter(None, texts)) == "two and two"
    (sample,) = (await rollout.close())["samples"]
    assert_whole(sample)
    assert sample["messages"][-1]["content"] == "two and two"


async def test_turns_that_go_on_make_one_sample_and_another_history_makes_a_fork(stage: Stage) -> None:
    stage(lambda call: f"answer to {call.prompt}")
    rollout = await stage.open()
    messages: list[Json] = []
    for number in range(3):
        messages.append({"role": "user", "content": f"question {number}"})
        messages.append((await rollout.chat(*messages))["choices"][0]["message"])
    await rollout.chat({"role": "user", "content": "all in one line"})
    told = await rollout.record()
    assert told == await rollout.record(), "looking changes nothing"
    assert told == await rollout.close()
    fork, main = told["samples"]
    answers = [message["content"] for message in fork["messages"] if message["role"] == "assistant"]
    assert answers == [f"answer to question {number}" for number in range(3)]
    assert main["messages"][-1]["content"] == "answer to all in one line"
    assert told["counters"]["forked"] == 1


async def test_defaults_are_for_calls_that_leave_them_out_and_the_bound_is_for_all(stage: Stage) -> None:
    stage("4")
    rollout = await stage.open(sampling_params={"temperature": 0.5, "top_k": 7, "max_tokens": 64}, max_tokens=32)
    await rollout.chat()
    await rollout.chat(temperature=1.0, max_completion_tokens=99)
    await rollout.chat(max_tokens=3)
    first, second, third = (call.body for call in stage.calls)
    assert (first["temperature"], first["top_k"], first["max_tokens"]) == (0.5, 7, 32)
    assert (second["temperature"], second["max_completion_tokens"]) == (1.0, 32)
    assert "max_tokens" not in second
    assert third["max_tokens"] == 3


async def test_a_rollout_opened_again_ends_the_one_before(stage: Stage) -> None:
    stage("4")
    first, second = await stage.gateway.open("twice"), await stage.gateway.open("twice")
    assert first.key != second.key
    assert (await first.post(CHATS, ASK)).status_code == 401
    await second.chat()
    assert len((await second.close())["samples"]) == 1


async def test_closing_ends_what_is_in_flight_at_the_engine(stage: Stage) -> None:
    stage(Reply(hang=True))
    rollout = await stage.open()
    calls = [asyncio.create_task(rollout.post(CHATS, {**ASK, "stream": is_stream})) for is_stream in (False, True)]
    await stage.busy(2)
    told = await rollout.close()
    await stage.busy(0)
    whole, streamed = await asyncio.gather(*calls)
    assert codes_of([whole]) == [(410, "rollout_over")]
    assert "rollout_over" in streamed.text
    assert (told["samples"], told["num_calls"], told["failures"]) == ([], 2, [])


async def test_the_deadline_of_a_rollout_bounds_its_calls(stage: Stage) -> None:
    stage(Reply(hang=True))
    rollout = await stage.open(deadline_s=0.2)
    first = await rollout.post(CHATS, ASK)
    await stage.busy(0)
    assert codes_of([first, await rollout.post(CHATS, ASK)]) == [(410, "rollout_over")] * 2
    assert [failure["kind"] for failure in (await rollout.close())["failures"]] == ["engine", "engine"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_goes_away_ends_its_call_at_the_engine(stage: Stage, is_stream: bool) -> None:
    stage(Reply(hang=True))
    rollout = await stage.open()
    call = asyncio.create_task(rollout.post(CHATS, {**ASK, "stream": is_stream}))
    await stage.busy()
    call.cancel()
    await stage.busy(0)
    assert [call.finished for call in stage.calls] in (["abort"], ["disconnected"])
    assert (await rollout.close())["samples"] == []


async def test_a_run_that_is_forgotten_ends_its_rollouts(stage: Stage) -> None:
    stage(Reply(hang=True))
    run = {"run_id": "run-forgotten000", "key": "its-key"}
    await stage.gateway.register(stage.engine.url, **run)
    rollout = await stage.gateway.open("forgotten", key="its-key")
    call = asyncio.create_task(rollout.post(CHATS, ASK))
    await stage.busy()
    await stage.gateway.forget("run-forgotten000")
    assert (await call).status_code == 410
    assert (await rollout.post(CHATS, ASK)).status_code == 401
    body = {"rollout_id": "x", "deadline_s": 1}
    assert_error(await stage.gateway.ask("POST", "rollouts", body, key="its-key"), 401, "unauthorized")
    await stage.busy(0)


async def test_a_registration_that_is_repeated_changes_nothing(stage: Stage) -> None:
    stage("4")
    run = {"run_id": "run-repeated0000", "key": "repeated-key"}
    await stage.gateway.register(stage.engine.url, **run)
    rollout = await stage.gateway.open("repeated", key="repeated-key")
    await stage.gateway.register(stage.engine.url, **run)
    await rollout.chat()
    await stage.gateway.register(stage.engine.url, model="another", **run)
    assert (await rollout.post(CHATS, ASK)).status_code == 401


async def test_a_run_that_cannot_be_taken_over_does_not_take_the_others_with_it(stage: Stage) -> None:
    good = {"key": RUN_KEY, "engine_urls": [stage.engine.url], "buffer_url": stage.gateway.buffer_url}
    runs = {"run-broken": {**good, "key": "broken", "engine_urls": [" "]}, RUN_ID: good}
    app = create_gateway(GatewaySpec("control", "", max_body_bytes=1 << 20, max_bodies_bytes=1 << 20, runs=runs))
    async with serve_app(app) as port, app.router.lifespan_context(app):
        url = f"http://127.0.0.1:{port}/gateway/rollouts"
        for key, status in ((RUN_KEY, 201), ("broken", 401)):
            body, headers = {"rollout_id": "r", "deadline_s": 1}, {"x-api-key": key}
            assert (await stage.gateway.http.post(url, json=body, headers=headers)).status_code == status


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rollout_id": "a/b"}, "rollout_id"),
        ({"rollout_id": 1}, "rollout_id"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"deadline_s": None}, "deadline_s"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"sampling_params": []}, "sampling_params"),
        ({"rid_prefix": "fb-anothersrun00-"}, "rid_prefix"),
        ({"surplus": 1}, "surplus"),
    ],
)
async def test_wrong_bodies_are_told(stage: Stage, changes: Json, field: str) -> None:
    told = await stage.gateway.ask("POST", "rollouts", {"rollout_id": "r", "deadline_s": 1, **changes})
    assert_error(told, 422, "invalid_input", field)


async def test_a_rollout_that_is_not_open_is_not_found(stage: Stage) -> None:
    assert_error(await stage.gateway.ask("GET", "rollouts/none"), 404, "not_found")
    assert_error(await stage.gateway.ask("POST", "rollouts/none/close"), 404, "not_found")


async def test_the_official_client_gets_errors_of_its_own_kinds(stage: Stage) -> None:
    rollout = await stage.open()
    async with rollout.client() as client:
        await rollout.close()
        with pytest.raises(openai.AuthenticationError) as refused:
            await client.chat.completions.create(model="any", messages=[USER])
        assert refused.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
