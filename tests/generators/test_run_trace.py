"""What a run process records of its rollouts: real processes, engines that answer what a script says."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from forebay.telemetry.tracing.records import Head, LoopStall, ProcessChange, RolloutSummary, RunPlan, Span
from forebay.telemetry.tracing.stall_watch import STALL_S
from forebay.telemetry.tracing.trace_ids import read_traceparent, trace_id
from tests.generators.conftest import FakeBuffer
from tests.generators.run_trace_kit import RUN_ID, RecordedRun, S, run_traced

SOURCE = """
import asyncio, time
from forebay.generators.base import AgentFailed, BaseGenerator, query_single_turn, single_turn
from forebay.generators.sandbox import Sandbox
from forebay.generators.tools import ToolBox
from forebay.telemetry import span, traceparent

TASK_TYPE = "traced"

async def lookup(key: str) -> str:
    "Look something up."
    await asyncio.sleep(0.2)
    return "a value"

def reward(item):
    until_s = time.process_time() + 0.1
    while time.process_time() < until_s: pass
    return 0.25

async def chat(client, messages, params):
    await asyncio.sleep(0.1)
    messages, _ = await single_turn(client, messages, params)
    with span("parse", size=3) as parse:
        assert traceparent() == parse.traceparent
        await asyncio.sleep(0.1)
        with span("inner"):
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.1)
    return await single_turn(client, [*messages, {"role": "user", "content": "again"}], params)

async def tools(client, messages, params):
    box = ToolBox([lookup])
    messages, _ = await single_turn(client, messages, params, box.definitions)
    messages = [*messages, *await box.answer(messages[-1]["tool_calls"])]
    await asyncio.sleep(0.1)
    return await single_turn(client, messages, params, box.definitions)

async def stream(client, messages, params):
    stream = await client.chat.completions.create(model="m", messages=messages, stream=True, **params)
    async for chunk in stream:
        await asyncio.sleep(0.02)
    return await single_turn(client, [*messages, {"role": "user", "content": "again"}], params)

async def sandbox(client, messages, params):
    async with Sandbox() as box:
        await box.run(["sleep", "0.2"])
        finished = await box.run("echo $TRACEPARENT")
        client.rollout.extra_info["seen"] = finished.stdout.strip()
    return await single_turn(client, messages, params)

async def retry(client, messages, params):
    if client.rollout.attempt == 0:
        await single_turn(client, messages, params)
        raise ValueError("once")
    return await single_turn(client, messages, params)

async def fail(client, messages, params):
    await single_turn(client, messages, params)
    raise AgentFailed("always")

KINDS = {each.__name__: each for each in (chat, tools, stream, sandbox, retry, fail)}

async def rollout(client, messages, params):
    return await KINDS[client.rollout.instance_id](client, messages, params)

def run_rollout(data):
    with span("preparing"):
        pass
    generator = BaseGenerator.from_payload(data, max_attempts=2)
    generator.entry(data["input_file"], rollout, reward)
"""
KINDS = ("chat", "tools", "stream", "sandbox", "retry", "fail")
TOOL_CALL = {"id": "call_1", "type": "function", "function": {"name": "lookup", "arguments": '{"key": "k"}'}}


def script(call: ScriptedCall) -> Reply:
    decode_s = 1.0 if call.body.get("stream") else 0.2
    times = {"queue_s": 0.05, "prefill_s": 0.1, "delay_s": decode_s, "cached_tokens": 2}
    calls = [TOOL_CALL] if call.body.get("tools") and call.messages[-1]["role"] == "user" else []
    return Reply(text="" if calls else "hello", tool_calls=calls, **times)


class Recorded(RecordedRun):
    """With what the engine was asked."""

    engine_url: str
    calls: list[ScriptedCall]


class SlowBuffer(FakeBuffer):
    """It takes some milliseconds to store a group: waits below one are not recorded."""

    async def _progress(self, request: Request) -> Response:
        await asyncio.sleep(0.01)
        return await super()._progress(request)


async def record(folder: Path) -> Recorded:
    async with SlowBuffer().served() as buffer, ScriptedEngine(script) as engine:
        run = await run_traced(buffer, folder, SOURCE, engine.url, KINDS, kind=Recorded)
        run.engine_url, run.calls = engine.url, engine.calls
    assert run.report is not None
    assert run.report.is_returned, run.log()
    return run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return asyncio.run(record(tmp_path_factory.mktemp("recorded")))


def adds_up(parts: Iterable[float], whole: float) -> None:
    assert sum(parts) == pytest.approx(whole, rel=0.01)


def seconds(phases: dict[str, int]) -> dict[str, float]:
    return {name: spent / S for name, spent in phases.items()}


def test_the_phases_of_each_attempt_and_turn_add_up(recorded: Recorded) -> None:
    summaries = recorded.of(RolloutSummary)
    assert len(summaries) == len(KINDS) + 2
    for summary in summaries:
        adds_up(summary.phases.values(), summary.d)
        assert summary.t <= summary.started <= summary.t + summary.d
        before = summary.turns[0].t - summary.t
        adds_up([before, *(turn.d for turn in summary.turns)], summary.d)
        for turn in summary.turns:
            adds_up(turn.phases.values(), turn.d)


def test_spans_are_a_tree_below_their_attempt(recorded: Recorded) -> None:
    for summary in recorded.of(RolloutSummary):
        (root,) = recorded.spans(summary, "attempt")
        assert (root.id, root.t, root.d, root.up) == (summary.id, summary.t, summary.d, "")
        spans = recorded.spans(summary)
        ids = {span.id: span for span in spans}
        assert len(ids) == len(spans)
        for span in spans:
            assert span.id == root.id or span.up in ids
            assert span.t >= root.t - 1
            assert span.t + span.d <= root.t + root.d + 1


def test_the_phases_are_what_the_time_was_spent_on(recorded: Recorded) -> None:
    summary = recorded.summary("chat")
    spent = seconds(summary.phases)
    calls = {"engine_queue": 0.1, "prefill": 0.2, "decode": 0.4}
    slept = {**calls, "parse": 0.1, "inner": 0.05, "agent": 0.1, "starting": 0.1}
    for name, least in slept.items():
        assert spent[name] >= least * 0.95, name
    # No more than their spans, however long those take here.
    for name in ("engine_queue", "prefill", "decode", "inner", "reward"):
        whole = sum(span.d for span in recorded.spans(summary, name))
        assert summary.phases[name] == pytest.approx(whole, rel=0.01), name
    parse, inner = recorded.spans(summary, "parse", "inner")
    assert summary.phases["parse"] == pytest.approx(parse.d - inner.d, rel=0.01)
    assert spent["reward"] >= 0.095
    assert {"engine_wait", "reward_queue", "write"} <= spent.keys()
    assert "tool" not in spent


def test_a_summary_says_what_the_rollout_was_and_came_to(recorded: Recorded) -> None:
    summary = recorded.summary("chat")
    assert (summary.ending, summary.outcome, summary.reward, summary.is_last) == ("finished", "", 0.25, True)
    assert (summary.epoch, summary.slot, summary.number, summary.attempt, summary.step) == (0, 0, 0, 0, 0)
    assert summary.uid == recorded.sample("chat")["uid"] == f"{RUN_ID}-{summary.group}-0000"
    assert summary.reward_cpu_s is not None
    assert 0.05 < summary.reward_cpu_s <= summary.phases["reward"] / S + 0.05
    assert summary.engine == recorded.engine_url
    assert summary.has_spans
    assert not summary.is_capped


def test_a_turn_says_what_its_engine_was_asked_and_gave(recorded: Recorded) -> None:
    summary = recorded.summary("chat")
    calls = [call for call in recorded.calls if call.messages[0]["content"] == "chat"]
    assert len(summary.turns) == 2
    for call, turn in zip(calls, summary.turns, strict=True):
        assert (turn.engine, turn.cached, turn.finish_reason, turn.has_tools) == (recorded.engine_url, 2, "stop", False)
        assert (turn.prompt, turn.sampled) == (len(call.prompt_ids), len(call.sampled_ids))
        assert turn.versions == [call.asked_version]
    for turn, span in zip(summary.turns, recorded.spans(summary, "engine"), strict=True):
        assert 0.35 * S <= turn.engine_ns == round(span.at["total_s"] * S) <= span.d
    assert summary.prompt == sum(turn.prompt for turn in summary.turns)
    assert (summary.cached, summary.sampled) == (4, sum(turn.sampled for turn in summary.turns))


def test_an_engine_call_has_its_parts_and_the_id_that_the_engine_knows(recorded: Recorded) -> None:
    summary = recorded.summary("chat")
    rids = [call.rid for call in recorded.calls if call.messages[0]["content"] == "chat"]
    calls = recorded.spans(summary, "engine")
    assert [call.at["rid"] for call in calls] == rids
    for number, call in enumerate(calls):
        parts = [span for span in recorded.spans(summary) if span.up == call.id]
        assert [part.name for part in parts] == ["engine_queue", "prefill", "decode"]
        assert parts[-1].t + parts[-1].d == call.t + call.d
        assert call.turn == number
        assert call.at["finish_reason"] == "stop"


def test_spans_of_user_code_have_their_attributes_and_their_turn(recorded: Recorded) -> None:
    parse, inner = recorded.spans(recorded.summary("chat"), "parse", "inner")
    assert (parse.at, parse.turn, inner.turn, inner.up) == ({"size": 3}, 0, 0, parse.id)
    (outside,) = recorded.of(Span, name="preparing")
    assert (outside.uid, outside.up) == ("", "")


def test_tools_are_measured_and_what_follows_tool_calls_is_theirs(recorded: Recorded) -> None:
    summary = recorded.summary("tools")
    assert [(turn.has_tools, turn.tools) for turn in summary.turns] == [(True, ["lookup"]), (False, [])]
    assert summary.turns[0].finish_reason == "tool_calls"
    (tool,) = recorded.spans(summary, "tool")
    assert tool.at == {"tool": "lookup"}
    assert tool.d / S >= 0.19
    assert seconds(summary.turns[0].phases)["tool"] >= tool.d / S + 0.095
    assert "tool" not in summary.turns[1].phases


def test_a_stream_lasts_until_it_is_read(recorded: Recorded) -> None:
    summary = recorded.summary("stream")
    streamed, second = summary.turns
    assert streamed.engine_ns == 0 < second.engine_ns, "an engine reports no total for a stream"
    assert (streamed.finish_reason, streamed.prompt > 0, streamed.sampled > 0) == ("stop", True, True)
    (call,) = [span for span in recorded.spans(summary, "engine") if span.turn == 0 and "rid" in span.at]
    (turn,) = [span for span in recorded.spans(summary, "turn") if span.turn == 0]
    assert call.d / S >= 0.35
    assert turn.t + turn.d >= call.t + call.d
    assert seconds(streamed.phases)["decode"] >= 0.1
    assert second.sampled > 0


def test_a_sandbox_is_environment_and_its_commands_find_the_span(recorded: Recorded) -> None:
    summary = recorded.summary("sandbox")
    first, second = recorded.spans(summary, "environment")
    assert first.d / S >= 0.19
    assert first.at["exit_status"] == 0
    assert 0 <= first.at["cpu_s"] < first.d / S - 0.1  # it slept
    parent = read_traceparent(recorded.sample("sandbox")["extra_info"]["seen"])
    assert parent == (trace_id(RUN_ID, summary.uid), second.id, True)


def test_each_attempt_is_told_and_lies_behind_the_one_before(recorded: Recorded) -> None:
    first, last = recorded.summaries("retry")
    assert (first.ending, first.outcome, first.is_last, first.attempt) == ("retried", "agent_failure", False, 0)
    assert (last.ending, last.outcome, last.is_last, last.attempt) == ("finished", "", True, 1)
    assert first.uid == last.uid
    assert first.id != last.id
    assert first.t + first.d == last.t
    assert first.phases["retry"] / S >= 0.1
    assert "retry" not in last.phases
    assert [turn.sampled > 0 for turn in (*first.turns, *last.turns)] == [True, True]


def test_a_failed_rollout_is_told_as_such_and_so_is_its_sample(recorded: Recorded) -> None:
    first, last = recorded.summaries("fail")
    assert (first.ending, last.ending) == ("retried", "failed")
    assert first.outcome == last.outcome == "agent_failure"
    assert last.reward is None
    assert recorded.sample("fail")["extra_info"]["timings"]["decode"] >= 0.19


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_says_what_its_time_was_spent_on(recorded: Recorded, kind: str) -> None:
    summary = recorded.summaries(kind)[-1]
    timings = dict(recorded.sample(kind)["extra_info"]["timings"])
    total, turns = timings.pop("total"), timings.pop("turns")
    adds_up(timings.values(), total)
    timings.pop("write", None)  # so far, only of its group
    assert turns == len(summary.turns)
    without_write = {name: spent for name, spent in seconds(summary.phases).items() if name != "write"}
    assert timings.keys() == without_write.keys()
    later = {name: spent - timings[name] for name, spent in without_write.items()}
    # Until the write has begun, one of them goes on.
    assert sum(abs(each) > 0.001 for each in later.values()) <= 1, later
    assert min(later.values()) > -0.001


def test_only_the_main_sample_of_a_rollout_says_so(recorded: Recorded) -> None:
    assert ["timings" in fork["extra_info"] for fork in recorded.forks("stream")] == [False]


def test_engines_get_the_span_of_their_call(recorded: Recorded) -> None:
    for call in recorded.calls:
        parent = read_traceparent(call.traceparent)
        assert parent is not None
        (span,) = recorded.of(Span, id=parent.span_id)
        assert (span.name, span.at["rid"]) == ("engine", call.rid)
        assert parent.trace_id == trace_id(RUN_ID, span.uid)


def test_the_process_tells_its_begin_and_end(recorded: Recorded) -> None:
    (head,) = [record for record in recorded.records() if isinstance(record, Head)]
    assert (head.run_id, head.process, head.start) == (RUN_ID, "run", 1)
    assert [change.what for change in recorded.of(ProcessChange)] == ["started", "ended"]
    assert all(stall.d >= STALL_S * S for stall in recorded.of(LoopStall))  # those of the machine, if it has any


async def test_the_plan_of_a_run_is_recorded_without_logins_and_keys(buffer: FakeBuffer, tmp_path: Path) -> None:
    buffer.plan |= {"oversampling": {"rollouts_per_group": 2}}
    scheduler = {
        "policy": "pull",
        "window": 7,
        "heavy": ["http://user:canary@127.0.0.1:9"],
        "options": {"key": "canary"},
    }
    async with ScriptedEngine(lambda _: "4") as engine:
        url = engine.url.replace("//", "//user:canary@")
        buffer.plan |= {"scheduler": scheduler}
        run = await run_traced(buffer, tmp_path, SOURCE, url, ["fail"], max_tokens=77, task_type="traced")
    (plan,) = run.of(RunPlan)
    assert (plan.task_type, plan.group_size, plan.num_process, plan.num_epochs) == ("traced", 1, 16, 1)
    assert (plan.max_tokens, plan.max_attempts, plan.engines) == (77, 2, [engine.url])
    assert plan.scheduler == {"window": 7, "heavy": ["http://127.0.0.1:9"]}
    assert plan.oversampling == {"rollouts_per_group": 2}
    assert plan.t <= min(each.t for each in run.of(RolloutSummary))
    assert b"canary" not in b"".join(path.read_bytes() for path in run.trace_dir.iterdir())
