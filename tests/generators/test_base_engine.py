"""What the base generator does when engines go away, abort, or are too slow for a group."""

import asyncio
import threading
from contextlib import AsyncExitStack
from typing import Any

from forebay.core.ids import group_id, group_rid_prefix
from forebay.engines.pool import REST_FIRST_S
from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from forebay.generators.base import BaseGenerator, Totals, query_single_turn, single_turn

GROUP_A = group_id("a", 0)
PREFIX_A = group_rid_prefix("run-0123456789ab", GROUP_A)


async def reward(item: dict[str, Any]) -> float:
    return 1.0


async def run(generator: BaseGenerator, path: Any, rollout: Any = single_turn) -> Totals:
    async with asyncio.timeout(30):
        return await generator.run_async(path, rollout, reward)


def two_rows(write_rows: Any) -> Any:
    return write_rows({"instance_id": "a", "prompt": "a"}, {"instance_id": "b", "prompt": "b"})


async def test_an_engine_that_is_not_there_yet_is_waited_for_and_no_attempt_is_lost(buffer, write_rows) -> None:
    async with ScriptedEngine(lambda _: "x") as engine:
        url = engine.url
    started = asyncio.create_task(run(BaseGenerator(url, buffer.url, max_attempts=1), two_rows(write_rows)))
    await buffer.wait_for(lambda: buffer.progress and buffer.progress[-1].get("waiting_for_engine"))
    async with engine:
        totals = await started
    assert (totals.num_completed, totals.num_failed) == (4, 0)
    assert buffer.progress[-1].get("waiting_for_engine") is False
    assert {sample["attempt"] for sample in buffer.samples} == {0}


async def check_outage(buffer: Any, write_rows: Any, rollout: Any) -> None:
    """The engine goes in the middle of a two-turn rollout and comes back: nothing is begun anew."""
    first_turns: list[str] = []

    def answer(call: ScriptedCall) -> str:
        if len(call.messages) == 1:
            first_turns.append(call.prompt)
            engine.available = False
        return "x"

    async with ScriptedEngine(answer) as engine:
        generator = BaseGenerator(engine.url, buffer.url, num_process=1, max_attempts=1)
        started = asyncio.create_task(run(generator, write_rows({"instance_id": "a", "prompt": "a"}), rollout))
        for count in (1, 2):
            await buffer.wait_for(
                lambda count=count: (
                    [progress.get("waiting_for_engine") for progress in buffer.progress].count(True) == count
                )
            )
            engine.available = True
        totals = await started
    assert (totals.num_completed, totals.num_failed) == (2, 0)
    assert first_turns == ["a", "a"]
    assert [sample["extra_info"]["round_number"] for sample in buffer.samples] == [2, 2]


async def test_an_outage_in_the_middle_of_a_rollout_is_waited_out(buffer, write_rows) -> None:
    async def two_turns(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        messages, _ = await single_turn(client, messages, params)
        return await single_turn(client, [*messages, {"role": "user", "content": "more"}], params)

    await check_outage(buffer, write_rows, two_turns)


async def test_an_outage_is_waited_out_in_threads_too(buffer, write_rows) -> None:
    def two_turns(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        messages, _ = query_single_turn(client, messages, params)
        return query_single_turn(client, [*messages, {"role": "user", "content": "more"}], params)

    await check_outage(buffer, write_rows, two_turns)


async def test_deadlines_stand_still_while_waiting_for_an_engine(buffer, write_rows) -> None:
    buffer.plan |= {"group_deadline_seconds": 5.0}
    async with ScriptedEngine(lambda _: "x") as engine:
        engine.available = False
        generator = BaseGenerator(engine.url, buffer.url)
        started = asyncio.create_task(run(generator, write_rows({"instance_id": "a", "prompt": "a"})))
        await buffer.wait_for(lambda: buffer.progress and buffer.progress[-1].get("waiting_for_engine"))
        done, _ = await asyncio.wait({started}, timeout=5.5)
        assert not done
        engine.available = True
        totals = await started
    assert (totals.num_completed, totals.num_groups_closed) == (2, 0)


async def test_an_outage_is_one_wait_although_the_rest_of_a_failed_engine_is_short(buffer, write_rows) -> None:
    def answer(call: ScriptedCall) -> str:
        engine.available = call.number > 0
        return "x"

    async with ScriptedEngine(answer) as engine:
        generator = BaseGenerator(engine.url, buffer.url, num_process=1)
        started = asyncio.create_task(run(generator, write_rows({"instance_id": "a", "prompt": "a"})))
        await buffer.wait_for(lambda: buffer.progress and buffer.progress[-1].get("waiting_for_engine"))
        done, _ = await asyncio.wait({started}, timeout=3 * REST_FIRST_S)
        assert not done
        engine.available = True
        await started
    told = [progress.get("waiting_for_engine") for progress in buffer.progress]
    assert (told.count(True), told[-1]) == (1, False)


async def test_rollouts_are_spread_over_several_engines_and_move_away_from_a_dead_one(buffer, write_rows) -> None:
    rows = write_rows(*({"prompt": "q"} for _ in range(4)))
    four = asyncio.Barrier(4)

    async def script(_: ScriptedCall) -> str:
        await four.wait()  # whichever end first: none does before all four are there
        return "x"

    async with ScriptedEngine(script) as first, ScriptedEngine(script) as second:
        await run(BaseGenerator(f"{first.url},{second.url}", buffer.url, num_process=4), rows)
        assert (len(first.calls), len(second.calls)) == (4, 4)
        second.available = False
        buffer.samples.clear()
        totals = await run(BaseGenerator([first.url, second.url], buffer.url, num_process=4, max_attempts=1), rows)
        assert (totals.num_completed, totals.num_failed) == (8, 0)
        assert len(first.calls) == 12


async def test_the_rollouts_of_a_dead_engine_are_spread_over_the_others(buffer, write_rows) -> None:
    go_on = asyncio.Event()

    async def script(call: ScriptedCall) -> str:
        if len(call.messages) > 1:
            await go_on.wait()
        return "x"

    async def two_turns(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        messages, _ = await single_turn(client, messages, params)
        begun.add(client.rollout.uid)
        if len(begun) == 6:
            engines[0].available = False
            all_begun.set()
        await all_begun.wait()
        return await single_turn(client, [*messages, {"role": "user", "content": "more"}], params)

    begun: set[str] = set()
    all_begun = asyncio.Event()
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(ScriptedEngine(script)) for _ in range(3)]
        rows = write_rows(*({"prompt": "q"} for _ in range(3)))
        generator = BaseGenerator([engine.url for engine in engines], buffer.url, num_process=6, max_attempts=1)
        started = asyncio.create_task(run(generator, rows, two_turns))
        await asyncio.gather(*(engine.wait_in_flight(3) for engine in engines[1:]))
        go_on.set()
        totals = await started
    assert (totals.num_completed, totals.num_failed) == (6, 0)


async def test_calls_side_by_side_that_fail_together_fail_one_engine(buffer, write_rows, caplog) -> None:
    async def side_by_side(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        await single_turn(client, messages, params)
        dying = next(engine for engine in engines if engine.url == client.rollout.engine_url)
        dying.available = False
        asked = await asyncio.gather(*(single_turn(client, messages, params) for _ in range(4)))
        return asked[0]

    buffer.plan["group_size"] = 1
    async with ScriptedEngine(lambda _: "x") as first, ScriptedEngine(lambda _: "x") as second:
        engines = [first, second]
        generator = BaseGenerator([first.url, second.url], buffer.url, 1, max_attempts=1)
        totals = await run(generator, write_rows({"prompt": "q"}), side_by_side)
    assert (totals.num_completed, totals.num_failed) == (1, 0)
    assert "no engine answers" not in caplog.text


async def test_an_aborted_reply_without_tokens_left_ends_as_length(buffer, write_rows) -> None:
    async with ScriptedEngine(lambda _: Reply(text="one two", finish_reason="abort")) as engine:
        await run(BaseGenerator(engine.url, buffer.url, max_tokens=14), write_rows({"prompt": "a"}), query_single_turn)
    assert len(engine.calls) == 4
    sample = buffer.samples[0]
    assert sample["extra_info"]["finish_reason"] == "length"
    assert sample["messages"][-1]["content"] == "one twoone two"


async def test_tool_calls_stay_in_the_message(buffer, write_rows) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}

    async def with_tools(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        return await single_turn(
            client, messages, {**params, "top_k": 5}, [{"type": "function", "function": {"name": "add"}}]
        )

    async with ScriptedEngine(lambda _: Reply(tool_calls=[call])) as engine:
        await run(BaseGenerator(engine.url, buffer.url), write_rows({"prompt": "a"}), with_tools)
    assert engine.calls[0].body["tools"][0]["function"]["name"] == "add"
    assert engine.calls[0].body["top_k"] == 5
    sample = buffer.samples[0]
    assert sample["messages"][-1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert sample["extra_info"]["finish_reason"] == "tool_calls"


def hang_on_a(call: ScriptedCall) -> Reply:
    return Reply(text="partial", hang=True) if call.messages[0]["content"] == "a" else Reply(text="x")


async def test_a_group_closed_by_the_buffer_is_cancelled_and_aborted_and_the_run_goes_on(buffer, write_rows) -> None:
    async with ScriptedEngine(hang_on_a) as engine:
        generator = BaseGenerator(engine.url, buffer.url, num_process=2)
        started = asyncio.create_task(run(generator, two_rows(write_rows)))
        await engine.wait_in_flight(2)
        buffer.close_group(GROUP_A)
        await engine.wait_in_flight(0)
        totals = await started
    assert {sample["instance_id"] for sample in buffer.samples} == {"b"}
    assert (totals.num_completed, totals.num_failed, totals.num_groups_closed) == (2, 0, 1)
    assert PREFIX_A in engine.aborts


async def test_calls_side_by_side_end_with_their_group_and_the_run_goes_on(buffer, write_rows) -> None:
    async def side_by_side(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(single_turn(client, messages, params)) for _ in range(2)]
        return asked[0].result()

    async with ScriptedEngine(hang_on_a) as engine:
        generator = BaseGenerator(engine.url, buffer.url, num_process=2)
        started = asyncio.create_task(run(generator, two_rows(write_rows), side_by_side))
        await engine.wait_in_flight(4)
        buffer.close_group(GROUP_A)
        totals = await started
    assert {sample["instance_id"] for sample in buffer.samples} == {"b"}
    assert (totals.num_completed, totals.num_failed, totals.num_groups_closed) == (2, 0, 1)


async def test_a_call_in_a_thread_ends_with_its_group_even_in_a_function_that_retries(buffer, write_rows) -> None:
    ended = threading.Event()

    def stubborn(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        try:
            for _ in range(100):
                try:
                    result = query_single_turn(client, messages, params)
                except Exception:  # noqa: BLE001 - as ported functions do
                    continue
                if result[1] != "abort":
                    return result
            raise AssertionError("never told that its group is closed")
        finally:
            if client.rollout.instance_id == "a":
                ended.set()

    async with ScriptedEngine(hang_on_a) as engine:
        generator = BaseGenerator(engine.url, buffer.url, num_process=1)
        started = asyncio.create_task(run(generator, two_rows(write_rows), stubborn))
        await engine.wait_in_flight(1)
        buffer.close_group(GROUP_A)
        await engine.wait_in_flight(0)
        totals = await started
        assert await asyncio.to_thread(ended.wait, 30.0)
    assert {sample["instance_id"] for sample in buffer.samples} == {"b"}
    assert len([call for call in engine.calls if call.messages[0]["content"] == "a"]) == 1
    assert totals.num_groups_closed == 1


async def test_a_groups_deadline_holds_without_a_word_from_the_buffer(buffer, write_rows) -> None:
    buffer.plan |= {"group_deadline_seconds": 5.0}
    async with ScriptedEngine(hang_on_a) as engine:
        totals = await run(BaseGenerator(engine.url, buffer.url, num_process=2), two_rows(write_rows))
        await engine.wait_in_flight(0)
    assert {sample["instance_id"] for sample in buffer.samples} == {"b"}
    assert totals.num_groups_closed == 1
    assert PREFIX_A in engine.aborts


async def test_a_groups_time_out_counts_from_its_last_sample(buffer, write_rows) -> None:
    buffer.plan |= {"group_timeout_seconds": 5.0}

    async with ScriptedEngine(lambda call: "x" if call.number == 0 else Reply(hang=True)) as engine:
        totals = await run(BaseGenerator(engine.url, buffer.url, num_process=1), write_rows({"prompt": "q"}))
    assert len(buffer.samples) == 1
    assert totals.num_groups_closed == 1


async def test_a_call_may_take_no_longer_than_its_group_has_left(buffer, write_rows) -> None:
    buffer.plan |= {"group_deadline_seconds": 40}
    seen: list[Any] = []

    async def look(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        with client.rollout.calls.one_call(Options(600.0), None) as bound:
            seen.append(bound.timeout)
        with client.rollout.calls.one_call(Options(5.0), None) as bound:
            seen.append(bound.timeout)
        return [], "stop"

    async with ScriptedEngine(lambda _: "x") as engine:
        await run(BaseGenerator(engine.url, buffer.url, num_process=1), write_rows({"prompt": "q"}), look)
    assert 30 < seen[0].read <= 40
    assert seen[1].read == 5.0


class Options:
    """What the base generator reads of the openai package's request options."""

    json_data: dict[str, Any] | None = None
    url = "/chat/completions"

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout

    def model_copy(self, *, update: dict[str, Any]) -> "Options":
        copied = Options(0)
        copied.__dict__.update(update)
        return copied
