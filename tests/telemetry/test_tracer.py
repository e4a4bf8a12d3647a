"""What is recorded of attempts, turns and spans, and what is not."""

import asyncio
import contextvars
import itertools
import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from forebay.telemetry import span, traceparent
from forebay.telemetry.tracing.records import GroupChange
from forebay.telemetry.tracing.run_tracer import FLUSH_THREAD
from forebay.telemetry.tracing.trace_ids import is_kept, read_traceparent, trace_id
from forebay.telemetry.tracing.tracer import NO_SPAN, NO_TRACE, TraceSettings, start_tracing, trace_environment
from tests.kit import poll_until
from tests.telemetry.trace_kit import RUN, Json, kinds, make_tracer, of_kind


def by_name(folder: Path) -> dict[str, Json]:
    return {line["name"]: line for line in of_kind(folder, "span")}


def test_spans_of_user_code_stand_below_their_turn(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path)
    attempt = tracer.attempt("uid", "group", 2)
    with attempt.activate(), attempt.turn(0, has_tools=True), span("engine", sampled=3):
        pass
    with attempt.activate(), span("parse", bytes=5, name="json") as parse:
        parse.set(found=True)
        with span("inside"):
            pass
    attempt.summary(instance="task-1")
    tracer.close()
    spans = by_name(tmp_path)
    assert spans["parse"]["turn"] == 0
    assert spans["parse"]["at"] == {"bytes": 5, "name": "json", "found": True}
    assert spans["inside"]["up"] == spans["parse"]["id"]
    assert spans["engine"]["up"] == spans["turn"]["id"]
    assert spans["turn"]["up"] == spans["parse"]["up"] == spans["attempt"]["id"] == attempt.id
    assert {(line["uid"], line["group"], line["attempt"]) for line in spans.values()} == {("uid", "group", 2)}
    assert "up" not in spans["attempt"]


async def test_tasks_and_threads_have_the_span_of_where_they_were_started(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path)
    attempts = [tracer.attempt(f"uid-{number}", "group", 0) for number in range(3)]

    async def rollout(number: int) -> None:
        with attempts[number].activate(), span("outer", number=number):
            await asyncio.sleep(0)
            await asyncio.to_thread(in_thread, number)

    def in_thread(number: int) -> None:
        with span("thread", number=number):
            pass

    await asyncio.gather(*map(rollout, range(3)))
    tracer.close()
    spans = of_kind(tmp_path, "span")
    outer = {line["id"]: line for line in spans if line["name"] == "outer"}
    inner = [line for line in spans if line["name"] == "thread"]
    assert len(inner) == 3
    assert all(outer[line["up"]]["uid"] == line["uid"] == f"uid-{line['at']['number']}" for line in inner)


def test_a_summary_tells_turns_tokens_and_phases_that_add_up(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path)
    begun = tracer.now()
    attempt = tracer.attempt("uid", "group", 0, begun=begun)
    second = 1_000_000_000
    attempt.add("queue", begun, second)
    for number, reason in enumerate(("tool_calls", "length")):
        t = begun + (2 + 10 * number) * second
        turn = attempt.turn(number, begun=t)
        engine = {"engine": f"http://engine-{number}", "prompt": 10, "cached": 4, "versions": ["1"]}
        attempt.add("engine", t, 3 * second, sampled=2, total_s=2.5, **engine)
        rest = {"finish_reason": reason, "versions": ["1", "2"], **({"total_s": 2} if reason == "length" else {})}
        attempt.add("engine", t + 3 * second, 3 * second, sampled=1, **rest)
        turn.end(t + 6 * second, has_tools=reason == "tool_calls")
    summary = attempt.summary(until=begun + 20 * second, instance=7, epoch=1, ending="finished", reward=math.nan)
    tracer.close()
    written = of_kind(tmp_path, "rollout")[0]
    assert [turn.get("engine_ns") for turn in written["turns"]] == [None, 4.5 * second], "one call reported none"
    shares = {"queue": 1, "starting": 1, "agent": 2, "engine": 12, "tool": 4}
    assert written["phases"] == {name: share * second for name, share in shares.items()}
    assert sum(written["phases"].values()) == written["d"] == 20 * second
    assert [turn["d"] for turn in written["turns"]] == [10 * second, 8 * second]
    assert [sum(turn["phases"].values()) for turn in written["turns"]] == [10 * second, 8 * second]
    assert (written["engine"], written["prompt"], written["cached"], written["sampled"]) == (
        "http://engine-0",
        20,
        8,
        6,
    )
    assert written["is_capped"]
    assert written["has_spans"]
    assert written["turns"][1]["versions"] == ["1", "2"]
    assert (written["instance"], written["epoch"], written["reward"]) == (7, 1, None)
    assert summary.turns[0].has_tools
    assert summary.turns[1].finish_reason == "length"


def test_users_spans_that_are_called_as_ours_cost_no_summary(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path)
    attempt = tracer.attempt("uid", "group", 0)
    with attempt.activate(), attempt.turn(0, prompt="long"):
        for sampled in (3, "many", None):
            with span("engine", sampled=sampled, versions=3, engine=7, finish_reason=["stop"]):
                pass
    attempt.summary(instance=1)
    tracer.close()
    [turn] = of_kind(tmp_path, "rollout")[0]["turns"]
    assert turn["sampled"] == 3
    assert {"prompt", "versions", "engine", "finish_reason"} & set(turn) == set()


def test_phases_count_what_is_still_open(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path)
    attempt = tracer.attempt("uid", "group", 0, begun=tracer.now() - 1_000)
    attempt.begin("engine", begun=attempt.begun + 400)
    assert attempt.phases(attempt.begun + 1_000) == {"agent": 400, "engine": 600}


def test_a_summary_is_written_once(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path)
    attempt = tracer.attempt("uid", "group", 0)
    assert attempt.summary(instance=1) is attempt.summary(instance=2)
    tracer.close()
    assert kinds(tmp_path) == {"head": 1, "span": 1, "rollout": 1}


def test_spans_are_kept_of_whole_groups_and_summaries_of_all(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path, rate=0.5)
    groups = [f"group-{number}" for number in range(200)]
    for group in groups:
        for number in range(2):
            attempt = tracer.attempt(f"{group}-{number}", group, 0)
            with attempt.begin("queue"):
                pass
            attempt.summary(instance=group)
    tracer.close()
    kept = {group for group in groups if is_kept(group, 0.5)}
    assert 60 < len(kept) < 140
    spans = [line["group"] for line in of_kind(tmp_path, "span")]
    assert sorted(spans) == sorted([*kept] * 4)  # a queue and an attempt, of two rollouts
    rollouts = of_kind(tmp_path, "rollout")
    assert len(rollouts) == 400
    assert all(line.get("has_spans", False) == (line["group"] in kept) and line["phases"] for line in rollouts)


def test_with_no_bytes_for_spans_there_are_summaries_only(tmp_path: Path) -> None:
    tracer = start_tracing(TraceSettings(folder=str(tmp_path), run_id=RUN, max_bytes=0), "run")
    attempt = tracer.attempt("uid", "group", 0)
    with attempt.begin("queue"), span("of the run"):
        pass
    tracer.write(GroupChange(t=tracer.now(), group="group", state="ready"))
    attempt.summary(instance=1)
    tracer.close()
    assert kinds(tmp_path) == {"head": 1, "group": 1, "rollout": 1}


def test_attributes_stay_small_and_numbers(tmp_path: Path) -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("not shown")

    tracer = make_tracer(tmp_path)
    attempt = tracer.attempt("uid", "group", 0)
    at: dict[str, Any] = {"text": "x" * 1_000, "nan": math.nan, "inf": -math.inf, "none": None, "path": Path("/a")}
    attempt.add("long", attempt.begun, 5, **at, big=1 << 70, items=["y" * 999, 1.5, math.nan], half=0.5, yes=True)
    attempt.add("many", attempt.begun, 5, **{f"key{number}": "z" * 201 for number in range(1_000)})
    attempt.add("broken", attempt.begun, -5, shown=Broken())
    attempt.add("huge", attempt.begun, 5, digits=10**5_000)
    tracer.close()
    spans = by_name(tmp_path)
    assert spans["long"]["at"] == {
        "text": "x" * 200,
        "path": "/a",
        "big": str(1 << 70),
        "items": ["y" * 200, 1.5, None],
        "half": 0.5,
        "yes": True,
    }
    assert len(spans["many"]["at"]) == 32
    assert "at" not in spans["broken"]
    assert spans["broken"]["d"] == 0
    assert "at" not in spans["huge"]


def test_an_exception_goes_on_and_is_named(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path)
    attempt = tracer.attempt("uid", "group", 0)
    with pytest.raises(KeyError), attempt.activate(), span("parse"):
        raise KeyError("secret")
    tracer.close()
    assert by_name(tmp_path)["parse"]["at"] == {"error": "KeyError"}


def test_only_the_first_end_counts(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path)
    attempt = tracer.attempt("uid", "group", 0)
    handle = attempt.begin("engine", begun=attempt.begun)
    handle.end(attempt.begun + 7, finish_reason="stop")
    handle.end(attempt.begun + 9)
    tracer.close()
    assert [(line["d"], line["at"]) for line in of_kind(tmp_path, "span")] == [(7, {"finish_reason": "stop"})]


def test_traceparent_is_the_current_span_in_the_trace_of_the_rollout(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path, rate=0.0)
    attempt = tracer.attempt("uid", "group", 0)
    assert traceparent() is None
    with attempt.activate():
        assert traceparent() == attempt.traceparent
        with span("engine") as engine:
            parent = read_traceparent(traceparent())
    assert parent == (trace_id(RUN, "uid"), engine.id, False)
    tracer.close()


def test_another_process_may_have_opened_the_attempt(tmp_path: Path) -> None:
    """The gateway adds spans to it; whoever opened it writes it."""
    tracer = make_tracer(tmp_path)
    attempt = tracer.attempt("uid", "group", 0, id="00000000000000aa")
    with attempt.begin("engine"):
        pass
    tracer.note_long()
    tracer.close()
    assert [line["up"] for line in of_kind(tmp_path, "span")] == ["00000000000000aa"]
    assert attempt.traceparent == f"00-{trace_id(RUN, 'uid')}-00000000000000aa-01"


def test_without_tracing_nothing_happens() -> None:
    assert span("parse", bytes=1) is NO_SPAN
    with span("parse") as parse, NO_TRACE.attempt("uid", "group", 0).activate():
        parse.set(found=1)
        assert traceparent() is None
    attempt = NO_TRACE.attempt("uid", "group", 0)
    with attempt.turn(0) as turn, attempt.begin("engine"):
        turn.on_open = None
    attempt.add("tool", 1, 2)
    assert attempt.phases() == {}
    assert attempt.summary(instance=3, ending="failed").ending == "failed"
    assert trace_environment() == {}


def test_outside_of_rollouts_a_span_is_the_runs(tmp_path: Path) -> None:
    settings = TraceSettings(folder=str(tmp_path), run_id=RUN)
    tracer = start_tracing(settings, "run")
    assert start_tracing(settings, "run") is tracer
    with span("load data"):
        assert traceparent() is not None
    tracer.close()
    tracer.close()
    assert traceparent() is None
    [line] = of_kind(tmp_path, "span")
    assert (line["name"], line.get("uid"), line.get("up")) == ("load data", None, None)


def test_nothing_is_opened_before_the_first_record_and_nothing_is_taken_after_the_end(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path / "trace")
    attempt = tracer.attempt("uid", "group", 0)
    tracer.flush()
    assert not (tmp_path / "trace").exists()
    tracer.close()
    with attempt.begin("engine"):
        pass
    assert attempt.summary(instance=1).phases
    assert not (tmp_path / "trace").exists()


def test_the_clock_is_monotonic_and_anchored_in_the_head(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path)
    before = time.monotonic()
    now = tracer.now()
    assert 0 <= now - tracer.at(before) < 1_000_000_000
    assert abs(now - time.time_ns()) < 1_000_000_000
    tracer.write(GroupChange(t=now, group="group", state="open"))
    tracer.close()
    [head] = of_kind(tmp_path, "head")
    assert tracer.at(0) == head["wall_ns"] - head["mono_ns"]
    assert (head["run_id"], head["process"], head["version"]) == (RUN, "gateway", 1)


def test_many_threads_lose_nothing(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path)
    attempt = tracer.attempt("uid", "group", 0)

    def work() -> None:
        with attempt.activate():
            for _ in range(500):
                with span("tool"):
                    pass

    threads = [threading.Thread(target=contextvars.copy_context().run, args=(work,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    summary = attempt.summary(instance=1)
    tracer.close()
    spans = of_kind(tmp_path, "span")
    assert len({line["id"] for line in spans}) == len(spans) == 4_001
    assert sum(summary.phases.values()) == summary.d


def test_attributes_that_others_set_meanwhile_cost_nothing(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path)
    attempt = tracer.attempt("uid", "group", 0)
    is_over = threading.Event()
    handle = attempt.begin("engine")

    def change() -> None:
        for number in itertools.count():
            if is_over.is_set():
                return
            handle.at[f"key{number % 30}"] = number
            handle.at.pop(f"key{(number - 7) % 30}", None)

    thread = threading.Thread(target=change)
    thread.start()
    for _ in range(2_000):
        handle.is_noted = False
        handle.note_open()
    handle.end()
    is_over.set()
    thread.join()
    tracer.close()
    assert kinds(tmp_path)["open"] == 2_000
    assert kinds(tmp_path)["span"] == 1


def test_a_trace_that_goes_wrong_ends_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def note_long(self) -> None:
            raise ZeroDivisionError

        def flush(self) -> None: ...

        def after_fork(self) -> None: ...

    class Sound(Broken):
        num_flushes = 0

        def note_long(self) -> None: ...

        def flush(self) -> None:
            self.num_flushes += 1

    sound = Sound()
    FLUSH_THREAD.see_to(Broken())
    FLUSH_THREAD.see_to(sound)
    FLUSH_THREAD.hurry()
    poll_until(lambda: sound.num_flushes)
    assert "a trace ends here" in caplog.text
    FLUSH_THREAD.leave(sound)
