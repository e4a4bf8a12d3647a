"""The base generator against a real engine's wire and a buffer's, over sockets."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse

from forebay.core.errors import InputRefused, InvalidInput
from forebay.core.ids import group_id, group_rid_prefix
from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from forebay.generators.base import BaseGenerator, Totals, query_single_turn, single_turn
from forebay.web.serving import serve_app

pytestmark = pytest.mark.usefixtures("with_and_without_workers")


class Untold(Exception):
    def __str__(self) -> str:
        raise LookupError("no words")


async def length_reward(item: dict[str, Any]) -> float:
    return float(len(item["messages"][-1]["content"]))


def generator_for(engine: ScriptedEngine, buffer: Any, **changed: Any) -> BaseGenerator:
    return BaseGenerator(engine.url, changed.pop("url", buffer.url), **changed)


async def run(
    generator: BaseGenerator, path: Path, rollout: Any = single_turn, reward: Any = length_reward, **how: Any
) -> Totals:
    async with asyncio.timeout(30):
        return await generator.run_async(path, rollout, reward, **how)


def slots(buffer: Any) -> set[tuple[Any, int, int]]:
    return {(sample["instance_id"], sample["epoch"], sample["slot"]) for sample in buffer.samples}


async def test_every_slot_of_every_group_arrives_in_slimes_shape(buffer, write_rows) -> None:
    rows = write_rows(
        {"instance_id": "a", "prompt": [{"role": "user", "content": "2+2?"}], "label": "4", "level": 3},
        {"prompt": "3+3?", "label": "6"},
    )
    async with ScriptedEngine(lambda _: "4") as engine:
        generator = generator_for(engine, buffer, sampling_params={"temperature": 0.5, "max_tokens": "64"})
        totals = await run(generator, rows, num_epoch="2")
    assert slots(buffer) == {(id_, epoch, slot) for id_ in ("a", 1) for epoch in (0, 1) for slot in (0, 1)}
    assert (totals.num_completed, totals.num_failed, totals.num_groups_opened) == (8, 0, 4)
    sample = next(sample for sample in buffer.samples if sample["instance_id"] == "a")
    assert sample["messages"] == [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    assert sample["reward"] == 1.0
    assert sample["status"] == "completed"
    extra = sample["extra_info"]
    assert (extra["label"], extra["level"], extra["temperature"], extra["max_tokens"]) == ("4", 3, 0.5, 64)
    assert (extra["finish_reason"], extra["round_number"], extra["rollout_index"]) == ("stop", 1, 1)
    assert float(extra["timestamp"]) > 1_700_000_000
    assert "prompt" not in extra
    assert len({sample["uid"] for sample in buffer.samples}) == 8
    assert engine.calls[0].body["model"] == "scripted"
    assert engine.calls[0].body["max_tokens"] == 64


async def test_groups_are_announced_before_their_first_rollout_and_the_end_is_told_last(buffer, write_rows) -> None:
    announced: list[bool] = []

    def answer(call: ScriptedCall) -> str:
        announced.append((call.prompt, 0) in buffer.opened)
        return "x"

    rows = write_rows(*({"instance_id": name, "prompt": name} for name in "abc"))
    async with ScriptedEngine(answer) as engine:
        await run(generator_for(engine, buffer, num_process=2), rows)
    assert announced == [True] * 6
    assert buffer.opened == [("a", 0), ("b", 0), ("c", 0)]
    assert [progress.get("is_last_slot_reported", False) for progress in buffer.progress] == [False] * 4 + [True]
    assert buffer.progress[-1]["num_groups_total"] == 3
    assert len(buffer.samples) == 6


async def test_no_more_than_num_process_rollouts_run_at_once(buffer, write_rows) -> None:
    rows = write_rows(*({"prompt": "q"} for _ in range(6)))
    three = asyncio.Barrier(3)

    async def script(_: ScriptedCall) -> Reply:
        await three.wait()
        return Reply(text="x", delay_s=0.02)  # for a fourth to come, if it were let through

    async with ScriptedEngine(script) as engine:
        await run(generator_for(engine, buffer, num_process=3), rows)
        assert engine.max_in_flight == 3
    assert len(buffer.samples) == 12


async def test_a_synchronous_rollout_function_runs_in_threads_beside_others(buffer, write_rows) -> None:
    rows = write_rows({"prompt": "q"}, {"prompt": "r"})
    four = asyncio.Barrier(4)

    async def script(_: ScriptedCall) -> str:
        await four.wait()
        return "x"

    async with ScriptedEngine(script) as engine:
        await run(generator_for(engine, buffer, num_process=4), rows, query_single_turn)
        assert engine.max_in_flight == 4
    assert len(buffer.samples) == 4
    assert buffer.samples[0]["messages"][-1] == {"role": "assistant", "content": "x"}


async def test_each_call_carries_its_own_rid_that_begins_with_its_groups(buffer, write_rows) -> None:
    async def two_turns(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        messages, _ = await single_turn(client, messages, params)
        return await single_turn(client, [*messages, {"role": "user", "content": "more"}], params)

    async with ScriptedEngine(lambda _: "x") as engine:
        await run(generator_for(engine, buffer), write_rows({"instance_id": "a", "prompt": "q"}), two_turns)
    rids = [call.rid for call in engine.calls]
    assert len(set(rids)) == 4
    prefix = group_rid_prefix("run-0123456789ab", group_id("a", 0))
    assert all(rid and rid.startswith(prefix) for rid in rids)
    assert len({len(rid) for rid in rids if rid}) == 1
    assert buffer.samples[0]["extra_info"]["round_number"] == 2


async def test_a_resumed_run_generates_only_what_the_plan_says_is_missing(buffer, write_rows) -> None:
    buffer.plan |= {"closed": [["a", 0], ["b", 1]], "taken": [["b", 0, [1]]], "is_resumed": True}
    rows = write_rows({"instance_id": "a", "prompt": "q"}, {"instance_id": "b", "prompt": "q"})
    async with ScriptedEngine(lambda _: "x") as engine:
        await run(generator_for(engine, buffer), rows, num_epoch=2)
    assert slots(buffer) == {("b", 0, 0), ("a", 1, 0), ("a", 1, 1)}


async def test_an_id_listed_k_times_skips_its_first_k_epochs(buffer, write_rows) -> None:
    rows = write_rows({"instance_id": 1, "prompt": "q"}, {"instance_id": "1", "prompt": "q"})
    async with ScriptedEngine(lambda _: "x") as engine:
        generator = generator_for(engine, buffer, skip_instance_ids=[1, 1, "1"])
        await run(generator, rows, num_epoch=3)
    assert slots(buffer) == {(1, 2, 0), (1, 2, 1)} | {("1", epoch, slot) for epoch in (1, 2) for slot in (0, 1)}


async def test_num_repeats_multiplies_the_epochs_and_says_so(buffer, write_rows, caplog) -> None:
    async with ScriptedEngine(lambda _: "x") as engine:
        await run(generator_for(engine, buffer, num_repeats=2), write_rows({"prompt": "q"}), num_epoch=2)
    assert len(buffer.samples) == 8
    assert "num_repeats=2 multiplies the epochs: 4 in all" in caplog.text


async def test_a_rollout_that_raises_is_tried_again_and_then_fails_without_a_reward(buffer, write_rows) -> None:
    attempts: list[int] = []

    async def flaky(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        attempts.append(client.rollout.attempt)
        if client.rollout.slot == 0 and client.rollout.attempt == 0:
            raise ValueError("once")
        if client.rollout.slot == 1:
            raise ValueError("always")
        return await single_turn(client, messages, params)

    async with ScriptedEngine(lambda _: "x") as engine:
        totals = await run(generator_for(engine, buffer, max_attempts=2), write_rows({"prompt": "q"}), flaky)
    good, bad = sorted(buffer.samples, key=lambda sample: sample["slot"])
    assert (good["attempt"], good["reward"]) == (1, 1.0)
    assert bad["status"] == "failed"
    assert "reward" not in bad
    assert (bad["error"]["type"], bad["error"]["message"]) == ("ValueError", "always")
    assert "in flaky" in bad["error"]["traceback"]
    assert sorted(attempts) == [0, 0, 1, 1]
    assert (totals.num_completed, totals.num_failed) == (1, 1)


@pytest.mark.parametrize(
    "result", [None, "text", ([{"role": "user"}],), ("text", "stop"), ([{"x": object()}], "stop"), ([], "\ud800")]
)
async def test_a_result_of_the_wrong_shape_is_a_failed_sample_that_says_so(buffer, write_rows, result) -> None:
    async def wrong(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        return result

    async with ScriptedEngine(lambda _: "x") as engine:
        await run(generator_for(engine, buffer, max_attempts=1), write_rows({"prompt": "q"}), wrong)
    assert [sample["status"] for sample in buffer.samples] == ["failed", "failed"]
    assert any(
        word in buffer.samples[0]["error"]["message"] for word in ("must return", "not a JSON value", "surrogates")
    )


@pytest.mark.parametrize(
    "leave",
    [SystemExit("bye"), StopIteration(3), asyncio.CancelledError(), Untold(), ValueError("\ud800")],
    ids=lambda leave: type(leave).__name__,
)
async def test_no_way_of_leaving_a_rollout_function_stops_the_others(buffer, write_rows, leave) -> None:
    def leaving(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        if client.rollout.slot == 0:
            raise leave
        return query_single_turn(client, messages, params)

    async with ScriptedEngine(lambda _: "x") as engine:
        await run(generator_for(engine, buffer, max_attempts=1), write_rows({"prompt": "q"}), leaving)
    assert {sample["slot"]: sample["status"] for sample in buffer.samples} == {0: "failed", 1: "completed"}


async def test_the_openai_packages_message_objects_may_be_returned(buffer, write_rows) -> None:
    async def native(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        reply = await client.with_options(max_retries=1).chat.completions.create(model="m", messages=messages, **params)
        client.rollout.extra_info["note"] = {"seen": client.rollout.row["label"]}
        return [*messages, reply.choices[0].message], reply.choices[0].finish_reason

    async with ScriptedEngine(lambda _: "x") as engine:
        await run(generator_for(engine, buffer), write_rows({"prompt": "q", "label": 7}), native)
        assert all(call.rid for call in engine.calls)
    assert buffer.samples[0]["messages"][-1]["content"] == "x"
    assert buffer.samples[0]["extra_info"]["note"] == {"seen": 7}


async def test_a_malformed_row_ends_the_run_after_what_came_before_it_was_written(buffer, write_rows) -> None:
    rows = write_rows({"prompt": "q"}, '{"prompt": ')
    async with ScriptedEngine(lambda _: "x") as engine:
        with pytest.raises(InputRefused, match=r"rows\.jsonl, line 2: not JSON"):
            await run(generator_for(engine, buffer), rows)
    assert slots(buffer) == {(0, 0, 0), (0, 0, 1)}


async def test_a_missing_input_file_is_told(buffer, tmp_path) -> None:
    async with ScriptedEngine(lambda _: "x") as engine:
        with pytest.raises(InputRefused, match="cannot be read: No such file"):
            await run(generator_for(engine, buffer), tmp_path / "none.jsonl")


def test_entry_runs_without_an_event_loop_and_refuses_to_be_called_inside_one(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "q"}))
    written: list[bytes] = []

    async def inside(generator: BaseGenerator) -> None:
        with pytest.raises(RuntimeError, match="run_async"):
            generator.entry(path, single_turn, length_reward)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        written.append((await receive())["body"])
        await JSONResponse({"success": True})(scope, receive, send)

    with ScriptedEngine(lambda _: "x").in_thread() as engine, served(app) as url:
        generator = BaseGenerator(engine.url, url, "2", "1000", "4", "math", "16")
        totals = generator.entry(str(path), query_single_turn, length_reward, "1")
        asyncio.run(inside(generator))
    assert totals.num_completed == 2
    assert {json.loads(body)["slot"] for body in written} == {0, 1}


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The address of an ASGI app that runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    serving = serve_app(app)
    port = asyncio.run_coroutine_threadsafe(serving.__aenter__(), loop).result(30)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(serving.__aexit__(None, None, None), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"num_process": "many"}, "num_process"),
        ({"num_repeat_per_sample": 0}, "num_repeat_per_sample"),
        ({"reward_timeout_s": "nan"}, "reward_timeout_s"),
        ({"sampling_params": {"max_tokens": "x"}}, "max_tokens"),
    ],
)
def test_wrong_arguments_are_named(changed, field) -> None:
    with pytest.raises(InvalidInput) as refused:
        BaseGenerator("http://e", "http://b", **changed)
    assert refused.value.field == field


@pytest.mark.parametrize("url", [None, "", []])
def test_a_run_that_was_started_without_an_engine_is_told_so(url) -> None:
    with pytest.raises(InvalidInput, match="without an engine") as refused:
        BaseGenerator.from_payload({"remote_engine_url": url, "remote_buffer_url": "http://b/w/key"})
    assert "--engine-url" in refused.value.hint


def test_a_start_payload_with_numbers_as_strings_makes_a_generator() -> None:
    payload = {
        "remote_engine_url": "http://e:1, http://e:2",
        "remote_buffer_url": "http://b/w/key",
        "num_repeat_per_sample": "8",
        "num_process": "100",
        "max_tokens": "8192",
        "sampling_params": {"temperature": 0.8, "max_tokens": 4096},
        "skip_instance_ids": None,
        "group_timeout_seconds": "60",
        "tokenizer_path": "/models/x",
    }
    generator = BaseGenerator.from_payload(payload, num_process=5)
    assert (generator.num_repeat_per_sample, generator.num_process, generator.group_timeout_s) == (8, 5, 60.0)
    assert generator.sampling_params == {"temperature": 0.8, "max_tokens": 4096}
