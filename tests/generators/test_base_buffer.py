"""How samples reach the buffer: until acknowledged, in whatever state it is, or until the run is stopped."""

import asyncio
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from forebay.core.errors import InvalidInput
from forebay.engines.scripted import Reply, ScriptedEngine
from forebay.generators.base import BaseGenerator, Totals, query_single_turn, single_turn
from forebay.generators.buffer_link.abc import LinkRefused, RunGone
from forebay.generators.buffer_link.forebay import ServerLink
from forebay.generators.buffer_link.slime import SlimeLink
from forebay.generators.job.run_job import connect_link


async def reward(item: dict[str, Any]) -> float:
    return 1.0


async def run(generator: BaseGenerator, path: Any, rollout: Any = single_turn) -> Totals:
    async with asyncio.timeout(30):
        return await generator.run_async(path, rollout, reward)


def busy(status: int) -> Response:
    return JSONResponse({"error": {"code": "busy"}}, status, headers={"Retry-After": "0"})


@pytest.mark.parametrize("status", [429, 503, 507])
async def test_a_busy_buffer_is_asked_again_at_every_step(buffer, write_rows, status) -> None:
    buffer.answers = [busy(status) for _ in range(6)]
    async with ScriptedEngine(lambda _: "x") as engine:
        totals = await run(BaseGenerator(engine.url, buffer.url), write_rows({"prompt": "q"}))
    assert not buffer.answers
    assert {sample["slot"] for sample in buffer.samples} == {0, 1}
    assert totals.num_completed == 2


async def test_a_refused_batch_is_offered_one_by_one_so_that_one_sample_cannot_hold_up_the_others(
    buffer, write_rows
) -> None:
    link = ServerLink(buffer.url)
    buffer.answers = [busy(429)]
    writer = link.writer(10)
    await asyncio.gather(writer.write({"uid": "1"}), writer.write({"uid": "2"}))
    await writer.close()
    assert buffer.batch_sizes == [1, 1]
    await link.close()


async def test_a_sample_refused_for_now_is_offered_again_and_the_rest_is_not(buffer, write_rows) -> None:
    refusals = [{"code": "buffer_full", "message": "full"}] * 2
    buffer.refused = lambda sample: refusals.pop() if sample["slot"] == 0 and refusals else None
    async with ScriptedEngine(lambda _: "x") as engine:
        await run(BaseGenerator(engine.url, buffer.url), write_rows({"prompt": "q"}))
    assert not refusals
    assert sorted(sample["slot"] for sample in buffer.samples) == [0, 1]


async def test_a_sample_refused_for_good_fills_its_slot_as_failed(buffer, write_rows) -> None:
    def refuse(sample: dict[str, Any]) -> dict[str, Any] | None:
        is_bad = sample["slot"] == 0 and sample["status"] == "completed"
        return {"code": "invalid_input", "message": "no"} if is_bad else None

    buffer.refused = refuse
    async with ScriptedEngine(lambda _: "x") as engine:
        await run(BaseGenerator(engine.url, buffer.url), write_rows({"prompt": "q"}))
    assert {sample["slot"]: sample["status"] for sample in buffer.samples} == {0: "failed", 1: "completed"}


async def test_a_lost_acknowledgement_makes_no_second_sample(buffer, write_rows) -> None:
    stored: list[str] = []

    def store_and_lose(sample: dict[str, Any]) -> None:
        stored.append(sample["uid"])
        if len(stored) == 1:
            buffer.answers.append(busy(503))

    buffer.refused = store_and_lose
    async with ScriptedEngine(lambda _: "x") as engine:
        await run(BaseGenerator(engine.url, buffer.url, num_process=1), write_rows({"prompt": "q"}))
    assert len({sample["uid"] for sample in buffer.samples}) == 2


@pytest.mark.parametrize("rollout", [single_turn, query_single_turn])
async def test_a_run_that_is_gone_is_left_at_once_and_its_calls_are_aborted(buffer, write_rows, rollout) -> None:
    async with ScriptedEngine(lambda _: Reply(hang=True)) as engine:
        started = asyncio.create_task(run(BaseGenerator(engine.url, buffer.url), write_rows({"prompt": "q"}), rollout))
        await engine.wait_in_flight(2)
        buffer.is_gone = True
        buffer.changed.notify()
        totals = await started
        await engine.wait_in_flight(0)
    assert totals.is_stopped
    assert not buffer.samples


async def test_a_stopped_run_is_left_at_once(buffer, write_rows) -> None:
    async with ScriptedEngine(lambda _: Reply(hang=True)) as engine:
        started = asyncio.create_task(run(BaseGenerator(engine.url, buffer.url), write_rows({"prompt": "q"})))
        await engine.wait_in_flight(2)
        buffer.is_stopped = True
        buffer.changed.notify()
        assert (await started).is_stopped


async def test_a_run_gone_before_its_plan_stops_cleanly(buffer, write_rows) -> None:
    buffer.is_gone = True
    async with ScriptedEngine(lambda _: "x") as engine:
        totals = await run(BaseGenerator(engine.url, buffer.url), write_rows({"prompt": "q"}))
    assert totals.is_stopped
    assert not engine.calls


async def test_a_buffer_of_another_kind_below_a_run_key_is_told_apart(buffer, write_rows) -> None:
    buffer.answers = [JSONResponse({"detail": "what?"}, 422)]
    async with ScriptedEngine(lambda _: "x") as engine:
        with pytest.raises(LinkRefused, match="422 for plan: "):
            await run(BaseGenerator(engine.url, buffer.url), write_rows({"prompt": "q"}))


async def test_few_finished_samples_wait_while_the_buffer_has_no_room(buffer, write_rows) -> None:
    rows = write_rows(*({"prompt": "q"} for _ in range(20)))
    async with ScriptedEngine(lambda _: "x") as engine:
        generator = BaseGenerator(engine.url, buffer.url, num_process=2, queue_size=1)
        buffer.refused = lambda _: {"code": "buffer_full", "message": "full"}
        started = asyncio.create_task(run(generator, rows))
        # One is being offered, one waits, and each of the two places holds a finished one.
        await engine.wait_calls(4)
        await buffer.wait_for(lambda: len(buffer.batch_sizes) > 3)
        assert len(engine.calls) <= 5
        buffer.refused = lambda _: None
        await started
    assert len(buffer.samples) == 40


async def test_slimes_own_buffer_gets_items_one_by_one_and_nothing_else(buffer, write_rows) -> None:
    buffer.answers = [busy(503)]

    async def half(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        if client.rollout.slot == 2:
            raise ValueError("no")
        return await single_turn(client, messages, params)

    async with ScriptedEngine(lambda _: "x") as engine:
        generator = BaseGenerator(engine.url, buffer.root_url, num_repeat_per_sample=3, max_attempts=1)
        totals = await run(generator, write_rows({"instance_id": "a", "prompt": "q"}), half)
    assert sorted(sample["slot"] for sample in buffer.samples) == [0, 1]
    assert all({"uid", "instance_id", "messages", "reward", "extra_info"} <= set(sample) for sample in buffer.samples)
    assert not buffer.progress
    assert (totals.num_completed, totals.num_failed) == (2, 1)


async def test_a_404_from_a_buffer_without_run_keys_stops_the_run(buffer) -> None:
    link = SlimeLink(f"{buffer.root_url}/nowhere")
    writer = link.writer(10)
    await writer.write({"uid": "1"})
    with pytest.raises(RunGone):
        await writer.close()
    await link.close()


async def test_the_address_decides_which_buffer_it_is() -> None:
    for url, kind in {
        "http://b:1/w/k3y": ServerLink,
        "http://b:1/w/k3y/": ServerLink,
        "http://b:1": SlimeLink,
        "http://b:1/s/name": SlimeLink,
    }.items():
        link = connect_link(url)
        assert type(link) is kind
        await link.close()
    with pytest.raises(InvalidInput):
        connect_link("b:1")


async def test_a_subclass_of_slimes_writes_a_sample_until_it_is_acknowledged(buffer) -> None:
    buffer.answers = [busy(503), busy(429), busy(500)]
    generator = BaseGenerator("http://engine.invalid", buffer.root_url)
    sample = {"uid": "u", "instance_id": "a", "messages": [], "reward": 1.0, "slot": "theirs"}
    await asyncio.to_thread(generator.send_data_to_buffer, sample)
    assert not buffer.answers
    assert [each["slot"] for each in buffer.samples] == ["theirs"]


async def test_what_the_buffer_refuses_of_it_is_told_and_the_next_goes_on(buffer, caplog) -> None:
    buffer.answers = [JSONResponse({"error": {"code": "invalid_input", "message": "messages is missing"}}, 422)]
    generator = BaseGenerator("http://engine.invalid", buffer.root_url)
    for number in range(2):
        await asyncio.to_thread(
            generator.send_data_to_buffer, {"uid": f"u{number}", "instance_id": "a", "messages": []}
        )
    assert [each["uid"] for each in buffer.samples] == ["u1"]
    assert "refused sample 'u0': 422" in caplog.text
    with pytest.raises(TypeError, match="not a JSON value"):
        await asyncio.to_thread(generator.send_data_to_buffer, {"uid": "u", "bad": object()})
