"""What the report says of each step, from record files with planted truth."""

import json
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.errors import InvalidInput
from forebay.telemetry.analysis import analyse, load
from forebay.telemetry.analysis.critical_path import critical_path
from forebay.telemetry.analysis.report import PathPart, StepSummary
from forebay.telemetry.analysis.step_summary import summarise
from forebay.telemetry.analysis.timeline import Event, ProfileStep, ReadTimes, Request
from tests.telemetry.planted_trace import PlantedTrace, seconds


@pytest.fixture
def trace(tmp_path: Path) -> PlantedTrace:
    return PlantedTrace(tmp_path / "trace")


def summaries(trace: PlantedTrace) -> list[StepSummary]:
    return analyse(load(trace.folder)).steps


def shown(parts: list[PathPart]) -> list[tuple[str, str, float, float]]:
    """Event, request, begin and seconds of each part."""
    return [
        (part.path.event, part.path.request, round(seconds(part.begin_s), 6), round(part.seconds, 6)) for part in parts
    ]


def two_steps(trace: PlantedTrace) -> None:
    """Step 1 waits from 15 to 40 for group ``b``, whose ``b/1`` queues, answers, calls a slow tool, is judged."""
    run, server = trace.file("run"), trace.file("server")
    run.rollout("a/0", 0, 10)
    server.group("a", "ready", 10, last="a/0")
    server.read(1, 10, 11, ["a"], step=0)
    phases = {"queue": 8.0, "decode": 4.0, "tool": 10.0, "reward": 6.0}
    attempt = run.rollout("b/1", 11, 39, phases=phases, reward=1.0)
    run.span("queue", 11, 19, "b/1", up=attempt, group="b")
    run.span("decode", 19, 23, "b/1", up=attempt, group="b", turn=0)
    run.span("tool", 23, 33, "b/1", up=attempt, group="b", turn=0)
    run.span("tool", 23, 25, "b/1", up=attempt, group="b", turn=0)
    run.span("reward", 33, 39, "b/1", up=attempt, group="b")
    run.rollout("b/0", 11, 20)
    run.rollout("c/0", 11, 30)
    server.group("c", "ready", 30, last="c/0")
    server.group("b", "ready", 39.5, last="b/1")
    server.read(15, 40, 42, ["b", "c"], step=1, by="b")


def test_a_step_trains_waits_and_sends(trace: PlantedTrace) -> None:
    two_steps(trace)
    first, second = summaries(trace)
    assert (first.train_s, first.wait_s, first.send_s) == pytest.approx((1, 9, 1))
    assert (second.train_s, second.wait_s, second.send_s) == pytest.approx((4, 25, 2))
    assert second.seconds == pytest.approx(31)


def test_ranks_that_wait_at_once_wait_once() -> None:
    reads = [ReadTimes(10, 20, 22), ReadTimes(12, 25, 30), ReadTimes(40, 45, 50)]
    step = ProfileStep("1", 0, 50, asked_s=10, satisfied_s=45, reads=reads)
    summary = summarise(step, critical_path(step))
    assert (summary.wait_s, summary.send_s, summary.train_s) == pytest.approx((15 + 5, 5 + 5, 10 + 10))


def test_the_critical_path_goes_back_through_what_ended_last(trace: PlantedTrace) -> None:
    two_steps(trace)
    _, step = summaries(trace)
    assert shown(step.critical_path) == [
        ("queue", "b/1", 15, 4),
        ("decode", "b/1", 19, 4),
        ("tool", "b/1", 23, 10),
        ("reward", "b/1", 33, 6),
        ("buffer", "", 39, 1),
    ]
    assert {part.path.group for part in step.critical_path} == {"b"}
    assert [part.path.turn for part in step.critical_path] == [None, 0, 0, None, None]
    assert step.critical_path[2].path.worker == "http://e1"
    assert sum(part.seconds for part in step.critical_path) == pytest.approx(step.wait_s, rel=0.01)
    assert step.beyond_next_s == pytest.approx(9.5)


def test_a_trainer_that_asked_late_waited_for_nobody(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    run.rollout("a/0", 0, 10)
    server.group("a", "ready", 10, last="a/0")
    server.read(60, 60.5, 61, ["a"], step=0)
    (step,) = summaries(trace)
    assert shown(step.critical_path) == [("late_trainer", "", 60, 0.5)]
    assert (step.train_s, step.beyond_next_s) == (pytest.approx(60), None)


def test_a_rollout_that_began_late_was_waited_for_before(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    run.rollout("a/0", 20, 30, phases={"decode": 10.0})
    server.group("a", "ready", 30, last="a/0")
    server.read(5, 30, 31, ["a"], step=0)
    (step,) = summaries(trace)
    assert shown(step.critical_path) == [("queue", "", 5, 15), ("decode", "a/0", 20, 10)]


def test_what_hangs_is_at_the_end_of_the_path_of_an_open_step(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    server.open("read", 5, "", id="read1")
    attempt = run.open("attempt", 0, "a/0", group="a")
    run.open("tool", 10, "a/0", up=attempt, turn=0, group="a")
    run.span("decode", 0, 10, "a/0", up=attempt, turn=0, group="a")
    run.rollout("b/0", 0, 100)
    (step,) = summaries(trace)
    assert step.is_open
    assert shown(step.critical_path) == [("decode", "a/0", 5, 5), ("tool", "a/0", 10, 90)]
    assert step.wait_s == pytest.approx(95)


events = st.lists(
    st.tuples(
        st.sampled_from(["queue", "decode", "tool", "reward"]),
        st.floats(0, 100, allow_subnormal=False),
        st.floats(0, 60, allow_subnormal=False),
    ),
    max_size=12,
)
moments = st.floats(0, 150, allow_subnormal=False)


@given(events, moments, moments, st.booleans(), st.booleans())
def test_a_path_adds_up_to_its_wait_and_has_no_hole(
    planted: list[tuple[str, float, float]], asked: float, waited: float, is_ready: bool, has_reads: bool
) -> None:
    leaves = [Event(name, begin, begin + d) for name, begin, d in planted]
    end = max([event.end_s for event in leaves], default=1.0)
    request = Request("a/0", "w", 0.0, end, group="a", events=leaves, phases={"decode": end})
    satisfied = asked + waited
    step = ProfileStep("1", 0.0, max(satisfied, end) + 1, asked, satisfied, requests=[request])
    if is_ready:
        step.ready_s = {"a": min(end, satisfied)}
    if has_reads:
        step.reads = [ReadTimes(asked, satisfied, step.end_s, groups=["a"])]
    parts = critical_path(step).parts
    assert sum(part.seconds for part in parts) == pytest.approx(waited, rel=0.01, abs=1e-6)
    for before, after in pairwise(parts):
        assert before.begin_s + before.seconds == pytest.approx(after.begin_s)
    if parts:
        assert parts[0].begin_s == pytest.approx(asked)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["decode", "tool", "parse"]),
            st.integers(0, 9_000),
            st.integers(0, 5_000),
            st.integers(-1, 7),
            st.sampled_from(["run", "gateway"]),
        ),
        max_size=8,
    )
)
def test_phases_add_up_to_their_rollout_however_spans_overlap(
    tmp_path_factory: pytest.TempPathFactory, planted: list[tuple[str, int, int, int, str]]
) -> None:
    trace = PlantedTrace(tmp_path_factory.mktemp("trace"))
    run, gateway = trace.file("run"), trace.file("gateway", pid=9)
    attempt = run.rollout("a/0", 0, 10, phases={"agent": 10.0})
    ids = [f"{number:016x}" for number in range(len(planted))]
    for id_, (name, begin, d, up, process) in zip(ids, planted, strict=True):
        file = run if process == "run" else gateway
        above = ids[up] if 0 <= up < len(ids) else attempt
        file.span(name, begin / 1000, (begin + d) / 1000, "a/0", id=id_, up=above, group="a")
    (step,) = load(trace.folder).steps()
    (request,) = step.requests
    assert sum(request.phases.values()) == pytest.approx(request.duration_s, rel=0.01)
    assert all(value >= 0 for value in request.phases.values())


def test_parallel_spans_split_their_time(trace: PlantedTrace) -> None:
    """Two tools at once in the run, and one call in the gateway: what the summary could not know is counted anew."""
    run, gateway = trace.file("run"), trace.file("gateway", pid=9)
    attempt = run.rollout("a/0", 0, 10, phases={"tool": 6.0, "agent": 4.0})
    run.span("search", 0, 4, "a/0", up=attempt, group="a")
    run.span("browse", 2, 6, "a/0", up=attempt, group="a")
    gateway.span("decode", 6, 10, "a/0", up=attempt, group="a", turn=0)
    (step,) = summaries(trace)
    assert step.phase_seconds == pytest.approx({"search": 3, "browse": 3, "decode": 4})
    assert step.phase_shares == pytest.approx({"search": 30, "browse": 30, "decode": 40})


def test_shares_are_a_mean_over_steps_and_one_by_time(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    run.rollout("a/0", 0, 10, phases={"decode": 9.0, "tool": 1.0})
    server.read(0, 10, 10, ["a"], step=0)
    run.rollout("b/0", 10, 40, phases={"decode": 15.0, "tool": 15.0})
    server.read(10, 40, 40, ["b"], step=1)
    report = analyse(load(trace.folder))
    assert report.phase_shares == pytest.approx({"decode": 70, "tool": 30})
    assert report.phase_shares_by_time == pytest.approx({"decode": 60, "tool": 40})
    assert sum(report.phase_shares.values()) == pytest.approx(100)


def test_lengths_throughput_cache_and_rewards(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    for number in range(10):
        run.rollout(
            f"a/{number}", 0, 10 + number, sampled=100 * (number + 1), prompt=1000, cached=250,
            is_capped=number >= 8, reward=0.0 if number >= 8 else 1.0,
            reward_parts={"exact": 1.0, "form": number / 4} if number < 5 else {"exact": 0.0},
        )  # fmt: skip
    server.read(0, 20, 20, ["a"], step=0)
    (step,) = summaries(trace)
    assert (step.length_min, step.length_mean, step.length_median) == (100, 550, 550)
    assert (step.length_p95, step.length_max, step.share_at_cap) == (pytest.approx(955), 1000, pytest.approx(0.2))
    assert step.tokens_per_s == pytest.approx(5500 / 20)
    assert step.cache_hit_rate == pytest.approx(0.25)
    assert (step.reward_mean, step.reward_of_slowest, step.reward_of_rest) == pytest.approx((0.8, 0.0, 1.0))
    assert step.reward_parts == pytest.approx({"exact": 0.5, "form": 0.5})


def test_group_skew_is_the_mean_of_last_end_minus_first(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    for uid, end in (("a/0", 10), ("a/1", 14), ("b/0", 9), ("b/1", 11), ("c/0", 30)):
        run.rollout(uid, 0, end)
    server.read(0, 30, 30, ["a", "b", "c"], step=0)
    (step,) = summaries(trace)
    assert step.group_skew == pytest.approx(3)


def test_requests_and_barrier_seconds_by_worker(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    for number, (engine, end) in enumerate((("e1", 10), ("e1", 12), ("e2", 30))):
        run.rollout(f"a/{number}", 0, end, engine=engine)
    server.group("a", "ready", 30, last="a/2")
    server.read(0, 30, 31, ["a"], step=0)
    (step,) = summaries(trace)
    assert step.requests_by_worker == {"e1": 2, "e2": 1}
    assert step.barrier_s == pytest.approx({"e1": 18, "e2": 0})


def test_turns_and_their_engine_seconds(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    one = [(0, 10, {"decode": 6.0, "prefill": 1.0, "agent": 3.0}, {})]
    two = [(0, 8, {"decode": 4.0, "tool": 4.0}, {}), (8, 20, {"engine": 12.0}, {})]
    run.rollout("a/0", 0, 10, turns=one)
    run.rollout("a/1", 0, 20, turns=two)
    run.rollout("a/2", 0, 22, turns=two)
    server.read(0, 22, 23, ["a"], step=0)
    (step,) = summaries(trace)
    assert step.requests_by_turns == {1: 1, 2: 2}
    assert step.mean_seconds_by_turns == pytest.approx({1: 10, 2: 21})
    assert step.engine_seconds_by_turn == pytest.approx({0: 5, 1: 12})


def test_what_over_sampling_threw_away_is_clipped_to_the_window(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    run.rollout("a/0", 0, 10)
    server.read(0, 10, 10, ["a"], step=0)
    run.rollout("b/0", 10, 20)
    run.rollout("x/0", 4, 18, ending="aborted", sampled=70)
    server.group("x", "discarded", 18, reason="surplus")
    run.rollout("x/1", 12, 25, ending="aborted", sampled=30)
    run.rollout("b/1", 10, 15, ending="failed", sampled=500)
    server.read(10, 20, 20, ["b"], step=1)
    _, step = summaries(trace)
    assert (step.num_requests, step.num_used) == (4, 1)
    assert (step.thrown_requests, step.thrown_tokens) == (2, 100)
    assert step.thrown_s == pytest.approx(8 + 8)


def test_groups_that_were_judged_and_discarded_are_no_surplus(trace: PlantedTrace, tmp_path: Path) -> None:
    run, server = trace.file("run"), trace.file("server")
    for group in ("a", "x", "y"):
        run.rollout(f"{group}/0", 0, 10, sampled=5)
        server.group(group, "discarded" if group != "a" else "ready", 10, reason="invalid" if group != "a" else "")
    server.read(0, 10, 10, ["a"], step=0)
    report = analyse(load(trace.folder))
    (step,) = report.steps
    assert (step.thrown_requests, step.discarded_requests, step.discarded_tokens) == (0, {"invalid": 2}, 10)
    assert step.discarded_s == pytest.approx(20)
    causes = {finding.cause: finding for finding in report.findings}
    assert "over_sampling" not in causes
    assert "(2 invalid) took 20 s and 10 tokens (66.7 % of all request time)" in causes["discarded"].sentence


def test_one_step_or_one_worker_can_be_asked_for(trace: PlantedTrace) -> None:
    two_steps(trace)
    run = trace.file("run", number=1)
    run.rollout("b/7", 11, 21, engine="http://e2")
    report = analyse(load(trace.folder), step="1", worker="http://e2")
    (step,) = report.steps
    assert (step.name, step.num_requests, step.requests_by_worker) == ("1", 1, {"http://e2": 1})
    assert step.critical_path[-2].path.request == "b/1"  # the release waited for it, wherever it ran
    with pytest.raises(InvalidInput, match=r"there is no step '9' \(known: 0, 1"):
        analyse(load(trace.folder), step="9")
    with pytest.raises(InvalidInput, match=r"there is no worker 'e9' \(known: http://e1, http://e2"):
        analyse(load(trace.folder), worker="e9")


def test_the_report_names_what_was_left_out(trace: PlantedTrace) -> None:
    two_steps(trace)
    trace.file("gateway").write_line(b"half a line")
    report = analyse(load(trace.folder))
    assert report.num_problems == 1
    assert report.problems[0].startswith(f"{trace.folder}/gateway-1-7.0.jsonl:2: not a record")
    document = json.loads(msgspec.json.encode(report))
    assert [step["name"] for step in document["steps"]] == ["0", "1"]
    assert document["num_requests"] == 4


def test_a_part_shorter_than_the_clocks_are_apart_is_none() -> None:
    """Times of another process are off by some microseconds: there is no agent between two events."""
    leaves = [Event("queue", 0, 2.000001), Event("decode", 2.00004, 6, 0), Event("reward", 5.99999, 9.99998)]
    request = Request("a/0", "w", 0, 10, group="a", events=leaves)
    step = ProfileStep("0", 0, 11, 1, 10, requests=[request], ready_s={"a": 10})
    parts = critical_path(step).parts
    assert [part.path.event for part in parts] == ["queue", "decode", "reward"]
    assert sum(part.seconds for part in parts) == pytest.approx(9, abs=1e-6)
