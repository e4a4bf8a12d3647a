"""What the gateway records of calls: turns, engine calls with the engine's times, waiting, and whose they are."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from forebay.core.ids import group_id, rollout_uid
from forebay.engines.scripted import Reply, ScriptedEngine
from forebay.telemetry.tracing import spans
from forebay.telemetry.tracing.read_trace import trace_files
from forebay.telemetry.tracing.records import Head, LoopStall, Open, Record, RolloutSummary, Span
from forebay.telemetry.tracing.trace_ids import format_traceparent, new_span_id, read_traceparent, trace_id
from tests.gateway.conftest import Stage
from tests.gateway.gateway_kit import LIMIT_S, USER, Json, OpenedAt, eventually
from tests.kit import poll_until
from tests.telemetry.trace_kit import records_in

pytestmark = pytest.mark.asyncio(loop_scope="module")

RUN = "run-traced000000"
KEY = "traced-key"
GROUP = group_id("row-1", 0)
UID = rollout_uid(RUN, GROUP, 3)
TOOL = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": "canary-argument"}'}}
PLANTED = Reply(text="one two three", queue_s=0.1, prefill_s=0.15, delay_s=0.2, cached_tokens=5)
SECOND_NS = 1_000_000_000
SLACK_S = 0.02


class Traced:
    """A run whose gateway records it, and what was recorded."""

    def __init__(self, stage: Stage, folder: Path) -> None:
        self.stage = stage
        self.gateway = stage.gateway
        self.folder = folder
        self._num_opened = 0

    async def register(self, **changes: object) -> None:
        engines = changes.pop("engines", [self.stage.engine.url])
        assert isinstance(engines, list)
        trace = {"folder": str(self.folder), "run_id": RUN, **dict(changes.pop("trace", {}))}  # type: ignore[call-overload]
        await self.gateway.register(*engines, run_id=RUN, key=KEY, trace=trace, **changes)

    async def open(self, attempt: int = 0, uid: str = UID, span: str = "", **fields: object) -> OpenedAt:
        """A rollout as our run process opens it, below its own span."""
        span = span or new_span_id()
        traceparent = format_traceparent(trace_id(RUN, uid), span)
        return await self.gateway.open(f"{uid}-{attempt:02x}", key=KEY, traceparent=traceparent, **fields)

    async def close(self, rollout: OpenedAt) -> Json:
        return await self.gateway.control("POST", f"rollouts/{rollout.rollout_id}/close", key=KEY)

    async def records(self) -> list[Record]:
        """All that was recorded, once the run is over. No line is broken."""
        await self.gateway.forget(RUN)
        return records_in(self.folder)

    async def spans(self, name: str = "") -> list[Span]:
        found = [record for record in await self.records() if isinstance(record, Span)]
        return [span for span in found if not name or span.name == name]


@pytest_asyncio.fixture(loop_scope="module")
async def traced(stage: Stage, tmp_path: Path) -> AsyncIterator[Traced]:
    traced = Traced(stage, tmp_path / "trace")
    await traced.register()
    yield traced
    await stage.gateway.forget(RUN)


def only(spans: list[Span], name: str) -> Span:
    (span,) = [span for span in spans if span.name == name]
    return span


def assert_lasts(span: Span, planted_s: float, within_s: float) -> None:
    """As long as was planted, or longer on a busy machine, but no longer than the rest of its call leaves it."""
    assert planted_s - SLACK_S <= span.d / SECOND_NS <= within_s + SLACK_S, span


async def test_a_chat_is_a_turn_with_an_engine_call_that_has_the_engines_parts(stage: Stage, traced: Traced) -> None:
    stage(PLANTED)
    span_id = new_span_id()
    rollout = await traced.open(2, span=span_id)
    await rollout.chat()
    await traced.close(rollout)
    spans = await traced.spans()
    turn, engine = only(spans, "turn"), only(spans, "engine")
    assert (turn.up, engine.up, only(spans, "engine_wait").up) == (span_id, turn.id, turn.id)
    assert {(span.uid, span.group, span.attempt, span.turn) for span in spans} == {(UID, GROUP, 2, 0)}
    parts = [only(spans, name) for name in ("engine_queue", "prefill", "decode")]
    for part, planted_s in zip(parts, (0.1, 0.15, 0.2), strict=True):
        assert part.up == engine.id
        assert_lasts(part, planted_s, engine.d / SECOND_NS - (0.45 - planted_s))
    assert parts[0].t + parts[0].d == parts[1].t
    assert parts[1].t + parts[1].d == parts[2].t
    assert parts[2].t + parts[2].d == engine.t + engine.d
    assert engine.t <= parts[0].t
    (call,) = stage.calls
    told = {name: engine.at[name] for name in ("engine", "rid", "prompt", "cached", "sampled", "versions")}
    assert told == {
        "engine": stage.engine.url,
        "rid": call.rid,
        "prompt": len(call.prompt_ids),
        "cached": 5,
        "sampled": len("one two three") + 1,
        "versions": ["default"],
    }
    assert (engine.at["finish_reason"], turn.at["finish_reason"], turn.at["has_tools"]) == ("stop", "stop", False)


async def test_the_engine_gets_the_traceparent_of_its_call(stage: Stage, traced: Traced) -> None:
    stage("4")
    rollout = await traced.open()
    await rollout.chat()
    await rollout.post("chat/completions", {"model": "m", "messages": [USER], "stream": True})
    parents = [read_traceparent(call.traceparent) for call in stage.calls]
    engines = await traced.spans("engine")
    assert [(parent.trace_id, parent.span_id) for parent in parents if parent is not None] == [
        (trace_id(RUN, UID), engine.id) for engine in engines
    ]


async def test_the_record_of_a_rollout_has_its_turns_and_the_gateway_writes_no_summary(
    stage: Stage, traced: Traced
) -> None:
    canary = {**TOOL, "function": {"name": "canary", "arguments": "{}"}}
    stage(lambda call: Reply(tool_calls=[TOOL, canary, TOOL]) if call.prompt == USER["content"] else PLANTED)
    rollout = await traced.open()
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("multiply", "add")]
    await rollout.chat(tools=tools)
    began_ns = time.monotonic_ns()
    await asyncio.sleep(0.2)  # a tool of the agent's
    waited_ns = time.monotonic_ns() - began_ns
    await rollout.chat(USER, {"role": "user", "content": "and?"})
    record = await traced.close(rollout)
    first, second = record["trace"]["turns"]
    assert (first["has_tools"], first["finish_reason"], second["finish_reason"]) == (True, "tool_calls", "stop")
    assert (first["tools"], second.get("tools")) == (["add"], None), "a name that the model made up is text"
    assert first["t"] + first["d"] == second["t"]
    for turn in (first, second):
        assert sum(turn["phases"].values()) == turn["d"]
        assert (turn["engine"], turn["versions"]) == (stage.engine.url, ["default"])
        assert 0 < turn["engine_ns"] <= turn["d"]
    assert second["engine_ns"] >= 0.4 * SECOND_NS
    assert first["phases"]["tool"] >= waited_ns
    assert "tool" not in second["phases"]
    assert second["phases"]["decode"] >= 0.18 * SECOND_NS
    assert second["sampled"] == len("one two three") + 1
    records = await traced.records()
    calls = [each for each in records if isinstance(each, Span) and each.name == "turn"]
    assert (second["t"], second["d"]) == (calls[1].t, calls[1].d), "the last one ends with its call"
    assert not [each for each in records if isinstance(each, RolloutSummary)]


async def test_time_after_an_answer_without_tools_is_the_agents(stage: Stage, traced: Traced) -> None:
    stage("4")
    rollout = await traced.open()
    await rollout.chat()
    await asyncio.sleep(0.1)
    await rollout.chat()
    first, _ = (await traced.close(rollout))["trace"]["turns"]
    assert first["phases"]["agent"] >= 0.1 * SECOND_NS
    assert "tool" not in first["phases"]


async def test_a_stream_is_recorded_to_its_end_with_its_versions(stage: Stage, traced: Traced) -> None:
    stage(Reply(text="one two three four", delay_s=0.3))
    rollout = await traced.open()
    reply = await rollout.post("chat/completions", {"model": "m", "messages": [USER], "stream": True})
    assert "[DONE]" in reply.text
    (turn,) = (await traced.close(rollout))["trace"]["turns"]
    assert (turn["versions"], turn["sampled"], turn["finish_reason"]) == (["default"], 19, "stop")
    spans = await traced.spans()
    engine = only(spans, "engine")
    assert engine.d >= 0.28 * SECOND_NS
    # A stream of SGLang's tells no stages: from the first chunk on it is generated.
    decode = only(spans, "decode")
    assert engine.t < decode.t
    assert decode.t + decode.d == engine.t + engine.d
    assert not {"engine_queue", "prefill"} & {span.name for span in spans}


async def test_what_an_abort_cuts_is_one_turn_of_several_calls(stage: Stage, traced: Traced) -> None:
    stage(lambda call: Reply(text="one two three"[len(call.said) :], hang=not call.said))
    rollout = await traced.open()
    asking = asyncio.create_task(rollout.chat())
    await stage.busy()
    await asyncio.sleep(0.02)
    await stage.abort(stage.calls[0])
    assert (await asking)["choices"][0]["message"]["content"] == "one two three"
    (turn,) = (await traced.close(rollout))["trace"]["turns"]
    spans = await traced.spans()
    first, second, *_ = [span for span in spans if span.name == "engine" and "finish_reason" in span.at]
    assert {first.up, second.up} == {only(spans, "turn").id}
    assert (first.at["finish_reason"], second.at["finish_reason"]) == ("abort", "stop")
    assert (turn["finish_reason"], turn["sampled"]) == ("stop", first.at["sampled"] + second.at["sampled"])


async def test_time_in_which_the_engines_are_paused_is_held_and_none_of_the_engines_parts(
    stage: Stage, traced: Traced
) -> None:
    paused = asyncio.Event()

    async def script(_: object) -> Reply:
        """It is decoding from here on, and says nothing before it may go on."""
        await stage.gateway.http.post(f"{stage.engine.url}/pause_generation", json={"mode": "in_place"})
        paused.set()
        return Reply(text="one two three", delay_s=0.3)

    stage(script)
    rollout = await traced.open()
    asking = asyncio.create_task(rollout.chat())
    await paused.wait()
    await stage.gateway.buffer.pause(True)
    await asyncio.sleep(0.4)
    await stage.gateway.http.post(f"{stage.engine.url}/continue_generation", json={})
    await stage.gateway.buffer.pause(False)
    await asking
    (turn,) = (await traced.close(rollout))["trace"]["turns"]
    spans = await traced.spans()
    engine, hold = only(spans, "engine"), only(spans, "hold")
    assert hold.up == engine.id
    assert hold.d >= 0.4 * SECOND_NS
    decoded = [span for span in spans if span.name == "decode"]
    assert all(part.t + part.d <= hold.t or part.t >= hold.t + hold.d for part in decoded)
    assert turn["phases"]["hold"] == hold.d, "nobody else has a share of it"


async def test_waiting_for_an_engine_is_told_apart_from_its_work(stage: Stage, traced: Traced) -> None:
    async with ScriptedEngine(lambda _: "4") as engine:
        await traced.register(engines=[engine.url])
        rollout = await traced.open()
        await rollout.chat()
        engine.available = False
        asking = asyncio.create_task(rollout.chat())
        await eventually(lambda: b'"EngineUnavailable"' in _written(traced.folder))
        await asyncio.sleep(0.3)
        engine.available = True
        await asking
        _, turn = (await traced.close(rollout))["trace"]["turns"]
    assert turn["phases"]["engine_wait"] >= 0.3 * SECOND_NS
    engines = await traced.spans("engine")
    assert [span.at.get("error") for span in engines] == [None, "EngineUnavailable", None]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_and_an_aborted_call_say_so_and_nothing_of_their_texts(
    stage: Stage, traced: Traced, stream: bool
) -> None:
    stage(lambda call: Reply(text="canary-error", error_status=400) if call.prompt == "bad" else Reply(hang=True))
    rollout = await traced.open()
    body = {"model": "m", "messages": [{"role": "user", "content": "bad"}], "stream": stream}
    assert (await rollout.post("chat/completions", body)).status_code == 400
    asking = asyncio.create_task(rollout.post("chat/completions", {**body, "messages": [USER]}))
    await stage.busy()
    record = await traced.close(rollout)
    await asking
    assert [turn.get("finish_reason", "") for turn in record["trace"]["turns"]] == ["", ""]
    spans = await traced.spans()
    assert [span.at["error"] for span in spans if span.name == "turn"] == ["EngineRefused", "Over"]
    engines = [span.at["error"] for span in spans if span.name == "engine"]
    assert engines == ["EngineRefused", "CancelledError"]


async def test_a_span_of_the_agents_own_is_the_parent_of_its_call(stage: Stage, traced: Traced) -> None:
    stage("4")
    rollout, own = await traced.open(), new_span_id()
    body = {"model": "m", "messages": [USER]}
    await rollout.post("chat/completions", body, traceparent=format_traceparent(trace_id(RUN, UID), own))
    elsewhere = format_traceparent("c" * 32, "d" * 16)
    await rollout.post("chat/completions", body, traceparent=elsewhere)
    await rollout.post("chat/completions", body, traceparent="00-nonsense")
    await traced.close(rollout)
    first, second, third = await traced.spans("turn")
    assert (first.up, first.at.get("link")) == (own, None)
    assert (second.up == third.up != own, second.at["link"], third.at.get("link")) == (True, elsewhere, None)


async def test_other_requests_of_an_agent_are_engine_calls_too(stage: Stage, traced: Traced) -> None:
    stage("4")
    rollout = await traced.open()
    await traced.gateway.http.get(f"{rollout.base_url}/models", headers={"Authorization": f"Bearer {rollout.key}"})
    await rollout.post("completions", {"model": "m", "prompt": "2+2?"})
    await traced.close(rollout)
    spans = await traced.spans("engine")
    assert [span.at["path"] for span in spans] == ["/v1/models", "/v1/completions"]


async def test_a_rollout_that_nobody_of_ours_opened_gets_its_summary_here(stage: Stage, traced: Traced) -> None:
    stage(PLANTED)
    rollout = await traced.gateway.open("theirs", key=KEY)
    await rollout.chat()
    await traced.close(rollout)
    again = await traced.gateway.open("theirs", key=KEY)
    await again.chat()
    await traced.gateway.open("theirs", key=KEY)
    summaries = [each for each in await traced.records() if isinstance(each, RolloutSummary)]
    assert [(each.uid, each.ending, each.is_last) for each in summaries] == [
        ("theirs", "finished", True),
        ("theirs", "retried", False),
        ("theirs", "aborted", True),
    ]
    for summary in summaries:
        assert sum(summary.phases.values()) == summary.d
    assert summaries[0].engine == stage.engine.url
    assert summaries[0].phases["prefill"] >= 0.13 * SECOND_NS
    assert len({each.id for each in summaries}) == 3


@pytest.mark.parametrize("own", [{}, {"tokens": [1, 2, 3]}], ids=["without tokens", "with tokens of its own"])
async def test_a_captured_rollout_is_known_by_its_sample(
    stage: Stage, traced: Traced, tmp_path: Path, own: Json
) -> None:
    stage(lambda call: f"reply to {call.prompt}")
    traced.gateway.buffer.step = 4
    await traced.gateway.forget(RUN)
    await traced.register(capturing={"secret": "traced-secret", "group_deadline_s": 60})
    url = f"{traced.gateway.url}/gateway/traced-secret"
    http = traced.gateway.http

    async def ask(*messages: Json, **fields: object) -> list[Json]:
        body = {"model": "m", "messages": list(messages), **fields}
        choices = (await http.post(f"{url}/v1/chat/completions", json=body)).json()["choices"]
        return [{"role": "assistant", "content": choice["message"]["content"]} for choice in choices]

    (first,) = await ask(USER)
    following: Json = {"role": "user", "content": "and 3+3?"}
    second, other = await ask(USER, first, following, n=2)
    await ask({"role": "user", "content": "nobody writes this one"})
    sample = {"instance_id": "row-1", "messages": [USER, first, following, second], **own}
    for uid, reward in (("sample-1", 1.0), ("sample-2", None)):
        await http.post(f"{url}/buffer/write", json={**sample, "uid": uid, "reward": reward})
    assert other == second
    traced.gateway.buffer.step = 0
    records = await traced.records()
    one, two = [each for each in records if isinstance(each, RolloutSummary)]
    assert (one.uid, one.instance, one.group, one.ending, one.reward) == ("sample-1", "row-1", GROUP, "finished", 1.0)
    assert (two.uid, two.ending, two.reward) == ("sample-2", "failed", None)
    assert (len(one.turns), len(two.turns)) == (2, 1)
    for summary in (one, two):
        assert sum(summary.phases.values()) == summary.d
        assert summary.phases["write"] > 0
    spans = [each for each in records if isinstance(each, Span)]
    assert len({span.id for span in spans}) == len(spans), "each id once, of choices that share a call too"
    of_nobody = [span for span in spans if not span.uid]
    assert {span.name for span in of_nobody} >= {"turn", "engine"}
    assert sum(span.name == "turn" for span in of_nobody) == 1
    by_id = {span.id: span for span in spans}
    for span in spans:
        if span.uid and span.name not in ("attempt",):
            assert span.up in by_id
            assert by_id[span.up].uid == span.uid


async def test_a_call_that_hangs_is_noted_with_the_load_of_its_engine(
    stage: Stage, traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "LONG_NS", SECOND_NS // 10)
    stage(Reply(text="slow", hang=True))
    # An attempt of its own: calls of a run that is forgotten are aborted for some seconds more, by the same names.
    rollout = await traced.open(9)
    asking = asyncio.create_task(rollout.chat())
    async with asyncio.timeout(LIMIT_S):
        while not any(b'"engine"' in line for line in _opens(traced.folder)):  # noqa: ASYNC110 -- a thread's work
            await asyncio.sleep(0.05)
    await stage.abort(stage.calls[0])
    asking.cancel()
    await traced.close(rollout)
    records = await traced.records()
    noted = next(each for each in records if isinstance(each, Open) and each.name == "engine")
    assert noted.at["load"] == {"running": 1, "waiting": 0}
    assert noted.at["rid"] == stage.calls[0].rid
    assert noted.id in {each.id for each in records if isinstance(each, Span)}, "it has ended since"


def _written(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in trace_files(folder)) if folder.exists() else b""


def _opens(folder: Path) -> list[bytes]:
    return [line for line in _written(folder).splitlines() if line.startswith(b'{"kind":"open"')]


def _stalls(folder: Path) -> list[bytes]:
    return [line for line in _written(folder).splitlines() if b'"kind":"loop"' in line]


async def test_a_loop_that_stands_still_is_noted(traced: Traced) -> None:
    await asyncio.sleep(0.2)
    poll_until(lambda: _stalls(traced.folder))  # what somebody's code must not do
    async with asyncio.timeout(LIMIT_S):
        while all(b'"has_ended":false' in line for line in _stalls(traced.folder)):  # noqa: ASYNC110 -- a thread's work
            await asyncio.sleep(0.05)
    stalls = [each for each in await traced.records() if isinstance(each, LoopStall)]
    assert any(each.has_ended and each.d >= SECOND_NS for each in stalls)
    assert any("test_a_loop_that_stands_still_is_noted" in frame for each in stalls for frame in each.stack)


async def test_another_start_of_the_run_is_recorded_apart_and_ends_no_call(stage: Stage, traced: Traced) -> None:
    stage(Reply(text="one two", delay_s=0.2))
    rollout = await traced.open()
    asking = asyncio.create_task(rollout.chat())
    await stage.busy()
    await traced.register(trace={"start": 2})
    assert (await asking)["choices"][0]["finish_reason"] == "stop"
    later = await traced.open(1)
    await later.chat()
    await traced.close(rollout)
    await traced.close(later)
    records = await traced.records()
    assert [each.start for each in records if isinstance(each, Head)] == [1, 2]
    assert [span.attempt for span in records if isinstance(span, Span) and span.name == "turn"] == [0, 1]


async def test_only_groups_of_the_share_keep_their_spans(stage: Stage, traced: Traced) -> None:
    stage("4")
    await traced.gateway.forget(RUN)
    await traced.register(trace={"rate": 0.0})
    rollout = await traced.open()
    await rollout.chat()
    (turn,) = (await traced.close(rollout))["trace"]["turns"]
    assert sum(turn["phases"].values()) == turn["d"] > 0
    theirs = await traced.gateway.open("theirs", key=KEY)
    await theirs.chat()
    await traced.close(theirs)
    (parent, _) = (read_traceparent(call.traceparent) for call in stage.calls)
    assert parent is not None
    assert not parent.is_sampled
    kinds = {type(each) for each in await traced.records()}
    assert kinds == {Head, RolloutSummary}


async def test_nothing_of_what_was_said_is_in_the_trace(stage: Stage, traced: Traced) -> None:
    stage(lambda _: Reply(text="canary-reply", tool_calls=[TOOL]))
    await traced.gateway.forget(RUN)
    await traced.register(capturing={"secret": "canary-secret", "group_deadline_s": 60}, api_key="canary-key")
    rollout = await traced.open()
    body = {"model": "canary-model", "messages": [{"role": "user", "content": "canary-prompt"}]}
    for stream in (False, True):
        await rollout.post("chat/completions", {**body, "stream": stream})
        await traced.gateway.http.post(
            f"{traced.gateway.url}/gateway/canary-secret/v1/chat/completions", json={**body, "stream": stream}
        )
    await rollout.post("completions", {"model": "m", "prompt": "canary-prompt"})
    await traced.close(rollout)
    assert len(await traced.spans("turn")) == 5
    text = "".join(path.read_text() for path in trace_files(traced.folder))
    assert "canary" not in text
    assert rollout.key not in text
    assert KEY not in text


async def test_without_a_trace_nothing_is_recorded_and_no_header_is_sent(stage: Stage, tmp_path: Path) -> None:
    stage("4")
    rollout = await stage.open()
    await rollout.chat()
    assert (await rollout.close())["trace"] == {"turns": []}
    assert [call.traceparent for call in stage.calls] == [None]
    assert list(tmp_path.iterdir()) == []
