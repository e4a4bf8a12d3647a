"""What a run process records of what goes wrong, of threads, and of little: real processes and scripted engines."""

import asyncio
from itertools import count
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forebay.core.ids import group_id
from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from forebay.telemetry.tracing.records import LoopStall, Open, ProcessChange, RolloutSummary, Span
from forebay.telemetry.tracing.stall_watch import STALL_S
from forebay.telemetry.tracing.trace_ids import is_kept
from tests.generators.conftest import FakeBuffer
from tests.generators.run_trace_kit import RecordedRun, S, run_traced

SYNC = """
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from forebay.generators.base import BaseGenerator, query_single_turn
from forebay.telemetry import span

TASK_TYPE = "traced"

def chat(client, messages, params):
    messages, _ = query_single_turn(client, messages, params)
    with span("parse"):
        time.sleep(0.1)
    with ThreadPoolExecutor() as threads:
        threads.submit(copy_context().run, elsewhere).result()
    return query_single_turn(client, [*messages, {"role": "user", "content": "again"}], params)

def elsewhere():
    with span("elsewhere"):
        pass

def stream(client, messages, params):
    for _ in client.chat.completions.create(model="m", messages=messages, stream=True, **params):
        time.sleep(0.02)
    return messages, "stop"

def abandon(client, messages, params):
    for chunk in client.chat.completions.create(model="m", messages=messages, stream=True, **params):
        if chunk.choices[0].delta.content:
            break
    return messages, "stop"

def refused(client, messages, params):
    return query_single_turn(client, messages, params)

def capped(client, messages, params):
    return query_single_turn(client, messages, params)

def rollout(client, messages, params):
    return globals()[client.rollout.instance_id](client, messages, params)

async def reward(item):
    return 1.0

def run_rollout(data):
    BaseGenerator.from_payload(data, max_attempts=1).entry(data["input_file"], rollout, reward)
"""
SYNC_KINDS = ("chat", "stream", "abandon", "refused", "capped")
STALLS = """
import asyncio, time
from pathlib import Path
from forebay.generators.base import BaseGenerator, single_turn

TASK_TYPE = "traced"

async def rollout(client, messages, params):
    while not Path(__file__).with_name("noted").exists():
        time.sleep(0.01)
    return await single_turn(client, messages, params)

async def reward(item):
    await asyncio.sleep(0.2)
    return 1.0

async def run_rollout(data):
    generator = BaseGenerator.from_payload(data, max_attempts=1)
    await generator.run_async(data["input_file"], rollout, reward)
"""
WAITS = """    while not Path(__file__).with_name("noted").exists():
        time.sleep(0.01)
"""
PLAIN = STALLS.replace(WAITS, "")
TWO_TURNS = PLAIN.replace(
    "    return await single_turn",
    """    messages, _ = await single_turn(client, messages, params)
    messages.append({"role": "user", "content": "again"})
    return await single_turn""",
)
CALLS = TWO_TURNS.replace(
    "    messages, _ =",
    """    # By then the call, which is made in the same loop, waits.
    asyncio.get_running_loop().call_later(1.5, Path(__file__).with_name("calling").touch)
    messages, _ =""",
)
FAILS = "TASK_TYPE = 'traced'\ndef run_rollout(data):\n    raise ValueError('no')\n"


def script(call: ScriptedCall) -> Reply:
    match call.messages[0]["content"]:
        case "refused":
            return Reply(text="it is broken", error_status=500)
        case "capped":
            return Reply(text="x", finish_reason="length")
        case "abandon":
            return Reply(text="one two three four five", tokens_per_s=20)
    return Reply(text="hello", queue_s=0.05, prefill_s=0.05, delay_s=0.1)


async def record_sync(folder: Path) -> RecordedRun:
    async with FakeBuffer().served() as buffer, ScriptedEngine(script) as engine:
        run = await run_traced(buffer, folder, SYNC, engine.url, SYNC_KINDS)
    assert run.report.is_returned, run.log()
    return run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    return asyncio.run(record_sync(tmp_path_factory.mktemp("recorded")))


@pytest.mark.parametrize("kind", SYNC_KINDS)
def test_a_rollout_in_a_thread_adds_up(recorded: RecordedRun, kind: str) -> None:
    summary = recorded.summary(kind)
    assert sum(summary.phases.values()) == pytest.approx(summary.d, rel=0.01)


def test_threads_of_a_rollout_record_below_its_turn(recorded: RecordedRun) -> None:
    summary = recorded.summary("chat")
    assert [turn.finish_reason for turn in summary.turns] == ["stop", "stop"]
    assert {"engine_queue", "prefill", "decode", "parse", "reward"} <= summary.phases.keys()
    parse, elsewhere = recorded.spans(summary, "parse", "elsewhere")
    assert (parse.turn, elsewhere.turn) == (0, 0)
    (reward,) = recorded.spans(summary, "reward")
    assert "cpu_s" not in reward.at


@pytest.mark.parametrize("kind", ["stream", "abandon"])
def test_a_stream_in_a_thread_is_one_turn(recorded: RecordedRun, kind: str) -> None:
    (turn,) = recorded.summary(kind).turns
    assert (turn.finish_reason, turn.sampled > 0) == ("stop", True)
    call = next(span for span in recorded.spans(recorded.summary(kind), "engine") if "rid" in span.at)
    assert call.at["sampled"] == turn.sampled


def test_a_call_that_fails_tells_the_kind_of_its_error_and_nothing_else(recorded: RecordedRun) -> None:
    summary = recorded.summary("refused")
    assert (summary.ending, summary.outcome) == ("failed", "engine_failure")
    call, turn = (recorded.spans(summary, name)[0] for name in ("engine", "turn"))
    assert call.at["error"] == turn.at["error"] == "InternalServerError"
    assert not any(b"it is broken" in path.read_bytes() for path in recorded.trace_dir.iterdir())


def test_a_call_that_ends_at_its_limit_is_told(recorded: RecordedRun) -> None:
    assert recorded.summary("capped").is_capped
    assert not recorded.summary("chat").is_capped


async def test_a_loop_that_stands_still_is_told_with_its_stack(buffer, tmp_path: Path) -> None:
    async with ScriptedEngine(script) as engine:

        async def go_on() -> None:
            while not stalls_in_the_code(RecordedRun(tmp_path)):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)
            for each in tmp_path.rglob("traced_generator.py"):
                each.with_name("noted").touch()

        going_on = asyncio.create_task(go_on())
        run = await run_traced(buffer, tmp_path, STALLS, engine.url, ["stalls"])
        await going_on
    during, after = stalls_in_the_code(run)
    assert (during.has_ended, after.has_ended) == (False, True)
    assert during.stack == after.stack
    assert during.t == after.t
    assert STALL_S * S <= during.d <= after.d


def stalls_in_the_code(run: RecordedRun) -> list[LoopStall]:
    """Those that were seen in the rollout function, so far."""
    told = run.of(LoopStall) if run.trace_dir.exists() else []
    code = ("traced_generator.py", " rollout")
    return [each for each in told if any(code[0] in line and line.endswith(code[1]) for line in each.stack)]


async def test_a_place_that_is_waited_for_is_queue(buffer, tmp_path: Path) -> None:
    async with ScriptedEngine(lambda _: Reply(text="x", delay_s=0.3)) as engine:
        run = await run_traced(buffer, tmp_path, PLAIN, engine.url, ["a", "b"], num_process=1)
    first, second = run.of(RolloutSummary)
    assert "queue" not in first.phases
    assert second.phases["queue"] / S >= 0.4
    assert second.started >= first.t + first.phases["decode"]


@pytest.mark.parametrize("workers", [(), pytest.param((1,), marks=pytest.mark.soak)], ids=["alone", "worker"])
async def test_a_finished_rollout_that_waits_for_its_group_is_group(buffer, tmp_path: Path, workers) -> None:
    numbers = {"a": count(), "b": count()}

    def script(call: ScriptedCall) -> Reply:
        prompt = call.messages[0]["content"]
        is_first = next(numbers[prompt]) == 0
        return Reply(text="x", delay_s=0 if is_first else 5, hang=prompt == "b" and not is_first)

    async def stop() -> None:
        await buffer.wait_for(lambda: len(buffer.samples) == 2)
        buffer.is_stopped = True
        buffer.changed.notify()

    buffer.plan["oversampling"] = {"groups_per_step": 1, "groups_begun": 2, "leftover": "defer"}
    async with ScriptedEngine(script) as engine:
        stopping = asyncio.create_task(stop())
        run = await run_traced(buffer, tmp_path, PLAIN, engine.url, ["a", "b"], group_size=2, workers=workers)
        await stopping
    for instance in "ab":  # that of "b" was thrown away: the step had enough groups
        held = max(run.summaries(instance), key=lambda each: each.phases.get("group", 0))
        (waited,) = run.spans(held, "group")
        assert waited.d >= 0.3 * S
        assert held.phases["group"] == pytest.approx(waited.d, rel=0.01)
        assert held.ending == {"a": "finished", "b": "aborted"}[instance]
    assert all("group" in sample["extra_info"]["timings"] for sample in buffer.samples[:1])


class FullBuffer(FakeBuffer):
    """Full at the first two announcements, then slow to store one: its disk takes 0.3 s."""

    num_refusals = 2

    async def _progress(self, request: Request) -> Response:
        if b"opened" in await request.body():
            if self.num_refusals:
                self.num_refusals -= 1
                return JSONResponse({"error": {"code": "buffer_full"}}, 429, headers={"Retry-After": "0"})
            await asyncio.sleep(0.3)
        return await super()._progress(request)


async def test_a_full_buffer_is_admission_and_a_slow_one_is_write(tmp_path: Path) -> None:
    async with FullBuffer().served() as buffer, ScriptedEngine(script) as engine:
        run = await run_traced(buffer, tmp_path, PLAIN, engine.url, ["a"])
    summary = run.summary("a")
    refused, written = run.spans(summary, "admission"), run.spans(summary, "write")
    assert len(refused) == 2
    assert all(span.d >= 0.1 * S for span in refused)
    slow = max((span for span in written if span.t < summary.started), key=lambda span: span.d)
    assert slow.d >= 0.3 * S
    assert slow.t >= max(span.t + span.d for span in refused), "no part of it is admission"
    assert written[-1].t > summary.started
    assert sum(summary.phases.values()) == pytest.approx(summary.d, rel=0.01)


async def test_an_engine_that_is_away_is_engine_wait(buffer, tmp_path: Path) -> None:
    async with ScriptedEngine(script) as engine:
        engine.available = False

        async def come_back() -> None:
            await buffer.wait_for(lambda: any(told["waiting_for_engine"] for told in buffer.progress))
            await asyncio.sleep(0.3)
            engine.available = True

        coming = asyncio.create_task(come_back())
        run = await run_traced(buffer, tmp_path, PLAIN, engine.url, ["a"])
        await coming
    assert run.summary("a").phases["engine_wait"] / S >= 0.3


async def test_time_in_which_engines_stand_still_is_hold_also_within_a_call(buffer, tmp_path: Path) -> None:
    may_answer = asyncio.Event()

    async def script(call: ScriptedCall) -> Reply:
        await may_answer.wait()
        return Reply(text="x", prefill_s=0.01, delay_s=0.2)

    async with ScriptedEngine(script) as engine:

        async def pause() -> None:
            await engine.wait_in_flight(1)
            buffer.pause(True)
            await buffer.wait_for(lambda: buffer.knows_paused)
            await asyncio.sleep(0.5)
            buffer.pause(False)
            await buffer.wait_for(lambda: not buffer.knows_paused)
            may_answer.set()

        pausing = asyncio.create_task(pause())
        run = await run_traced(buffer, tmp_path, PLAIN, engine.url, ["a"])
        await pausing
    summary = run.summary("a")
    (call,), (hold,) = run.spans(summary, "engine"), run.spans(summary, "hold")
    assert hold.up == call.id
    assert summary.phases["hold"] == hold.d >= 0.3 * S
    assert summary.phases["decode"] + hold.d <= call.d
    assert sum(summary.phases.values()) == pytest.approx(summary.d, rel=0.01)


async def test_calls_wait_while_engines_stand_still(buffer, tmp_path: Path) -> None:
    buffer.pause(True)
    async with ScriptedEngine(script) as engine:

        async def go_on() -> None:
            while not list(tmp_path.rglob("calling")):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)
            buffer.pause(False)

        going_on = asyncio.create_task(go_on())
        run = await run_traced(buffer, tmp_path, CALLS, engine.url, ["a"])
        await going_on
    summary = run.summary("a")
    (hold,) = run.spans(summary, "hold")
    assert summary.phases["hold"] == hold.d > 0
    assert hold.turn is not None


async def test_the_login_of_an_engine_is_in_no_trace(buffer, tmp_path: Path) -> None:
    async with ScriptedEngine(script) as engine:
        url = engine.url.replace("://", "://canary-user:canary-password@")
        run = await run_traced(buffer, tmp_path, PLAIN, url, ["a"])
        assert run.summary("a").engine == engine.url
        (call,) = run.spans(run.summary("a"), "engine")
        assert call.at["engine"] == engine.url
    written = b"".join(path.read_bytes() for path in run.trace_dir.iterdir())
    assert b"canary" not in written


@pytest.mark.soak
async def test_what_lasts_is_noted_while_it_is_open_with_the_engines_load(buffer, tmp_path: Path) -> None:
    def hang(call: ScriptedCall) -> Reply:
        return Reply(text="one two", hang=call.messages[0]["content"] == "hangs")

    async def killed(run: RecordedRun) -> None:
        async with asyncio.timeout(60):
            while not (run.trace_dir.exists() and run.of(Open, name="engine")):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.2)

    async with ScriptedEngine(hang) as engine:
        run = await run_traced(buffer, tmp_path, PLAIN, engine.url, ["hangs", "ends"], meanwhile=killed)
    (call,) = run.of(Open, name="engine")
    assert call.at["load"] == {"running": 1, "waiting": 0}
    assert (call.at["engine"], call.turn) == (engine.url, 0)
    assert {each.name for each in run.of(Open)} == {"attempt", "turn", "engine"}
    assert [summary.instance for summary in run.of(RolloutSummary)] == ["ends"]


async def test_a_group_that_was_closed_is_aborted(buffer, tmp_path: Path) -> None:
    async with ScriptedEngine(lambda _: Reply(text="one two", hang=True)) as engine:

        async def close() -> None:
            await engine.wait_in_flight(1)
            buffer.close_group(group_id("a", 0))

        closing = asyncio.create_task(close())
        run = await run_traced(buffer, tmp_path, PLAIN, engine.url, ["a"])
        await closing
    summary = run.summary("a")
    assert (summary.ending, summary.is_last, buffer.samples) == ("aborted", True, [])
    assert sum(summary.phases.values()) == pytest.approx(summary.d, rel=0.01)
    (call,) = run.spans(summary, "engine")
    assert call.at["error"] == "CancelledError"


async def test_a_run_that_is_over_tells_what_it_did_not_finish(buffer, tmp_path: Path) -> None:
    async with ScriptedEngine(lambda _: Reply(text="one two", hang=True)) as engine:

        async def end() -> None:
            await engine.wait_in_flight(2)
            buffer.is_stopped = True
            buffer.changed.notify()

        ending = asyncio.create_task(end())
        run = await run_traced(buffer, tmp_path, PLAIN, engine.url, ["a", "b"])
        await ending
    assert [summary.ending for summary in run.of(RolloutSummary)] == ["aborted", "aborted"]
    assert [change.what for change in run.of(ProcessChange)] == ["started", "ended"]


async def test_spans_are_of_whole_groups_and_summaries_of_all(buffer, tmp_path: Path) -> None:
    rows = [f"row-{number}" for number in range(12)]
    async with ScriptedEngine(lambda _: "x") as engine:
        run = await run_traced(buffer, tmp_path, PLAIN, engine.url, rows, rate=0.5)
    summaries = run.of(RolloutSummary)
    kept = {summary.group for summary in summaries if summary.has_spans}
    assert kept == {group for row in rows if is_kept(group := group_id(row, 0), 0.5)}
    assert 0 < len(kept) < len(rows) == len(summaries)
    assert {span.group for span in run.of(Span)} == kept
    assert all("timings" in sample["extra_info"] for sample in buffer.samples)


async def test_without_tracing_there_is_no_file_and_no_header(buffer, tmp_path: Path) -> None:
    async with ScriptedEngine(script) as engine:
        run = await run_traced(buffer, tmp_path, PLAIN, engine.url, ["a"], is_traced=False)
    assert run.report.is_returned
    assert not run.trace_dir.exists()
    assert "timings" not in run.sample("a")["extra_info"]
    assert [call.traceparent for call in engine.calls] == [None]


async def test_a_process_that_fails_says_so(buffer, tmp_path: Path) -> None:
    run = await run_traced(buffer, tmp_path, FAILS, "http://127.0.0.1:1", ["a"])
    assert [change.what for change in run.of(ProcessChange)] == ["started", "failed"]
