"""A seeded log of verl's: what a report says of a fault besides its kind, place and cost (test_planted_kinds)."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.telemetry.analysis import analyse, load
from forebay.telemetry.analysis.report import Finding, ProfileReport
from forebay.telemetry.render.tails import tail_sentence
from tests.telemetry.planted_log import (
    PUBLISHED_SHARES,
    PlannedRequest,
    PlannedStep,
    PlannedTurn,
    clean_step,
    shares_step,
    silence,
    steady_step,
    write_log,
)

Report = Callable[[list[PlannedStep]], ProfileReport]


@pytest.fixture
def report_of(tmp_path: Path) -> Report:
    return lambda steps: analyse(load(write_log(tmp_path / "logs", steps)))


def clean_steps() -> list[PlannedStep]:
    rng = random.Random(1)
    return [clean_step(rng, number) for number in range(5)]


def only_finding(report: ProfileReport) -> Finding:
    assert [finding.cause for finding in report.findings] == [report.findings[0].cause]
    return report.findings[0]


def test_the_published_figures_come_back(report_of: Report) -> None:
    rng = random.Random(67)
    seconds = [100 * rng.uniform(0.6, 1.4) for _ in range(7)]
    report = report_of([shares_step(rng, each) for each in seconds])
    for shares in (report.phase_shares, report.phase_shares_by_time, *(step.phase_shares for step in report.steps)):
        assert shares == pytest.approx(PUBLISHED_SHARES, abs=0.01)
        assert sum(shares.values()) == pytest.approx(100, abs=0.001)
    for step, curve in zip(report.steps, report.curves, strict=True):
        assert curve.time_of_80 == pytest.approx(40, abs=0.5)
        assert (curve.knee_requests, curve.knee_time) == pytest.approx((80, 40), abs=0.5)
        assert tail_sentence([curve]) == "80 % of the requests end in the first 40 % of the time."
        assert curve.percentiles["p50"] == pytest.approx(0.25 * 0.7405 * step.seconds, rel=0.02)
        assert curve.num_requests == 100
    assert [step.seconds for step in report.steps] == pytest.approx(seconds, abs=0.001)


def test_a_second_turn_of_150_seconds_is_named_with_its_turn(report_of: Report) -> None:
    steps = clean_steps()
    slow = steps[2].workers["1"][5]
    usual_s = slow.turns[1].engine_s
    slow.turns[1].engine_s = 150.0
    report = report_of(steps)
    finding = only_finding(report)
    assert finding.cause == "stalled_engine"
    assert finding.seconds == pytest.approx(150 - usual_s, rel=0.05)
    path = finding.path
    assert (path.step, path.worker, path.request, path.turn, path.event) == ("3", "1", slow.request_id, 1, "engine")
    assert finding.sentence.startswith(
        f"Step 3: request {slow.request_id} (worker 1) in turn 2 of 2 waited {finding.seconds:,.0f} s "
        "for an engine that produced nothing."
    )
    (outlier,) = [outlier for outlier in report.outliers if outlier.request == slow.request_id]
    turns = [turn["phases"]["engine"] for turn in outlier.turns]
    assert turns == pytest.approx([turn.engine_s for turn in slow.turns], abs=0.001)
    assert sum(outlier.phases.values()) == pytest.approx(outlier.seconds, abs=0.001)
    assert {"engine", "tool", "reward"} <= {event["name"] for event in outlier.events}


def test_a_worker_that_was_silent_from_25_to_175_seconds_stood_still(report_of: Report) -> None:
    steps = [steady_step(number, num_workers=2) for number in range(2)]
    silence(steps[1], "0", 25.0, 175.0)
    report = report_of(steps)
    (gap,) = report.gaps
    assert (gap.step, gap.worker, gap.is_standstill) == ("2", "0", True)
    assert (gap.begin_s, gap.end_s) == pytest.approx((25, 175), abs=0.2)
    assert (gap.num_before, gap.num_after) == (400, 112)
    assert (gap.rate_before, gap.rate_after) == pytest.approx((16, 16), rel=0.02)
    finding = only_finding(report)
    assert (finding.cause, finding.path.worker, finding.path.event) == ("stalled_engine", "0", "engine")
    assert finding.seconds == pytest.approx(150, rel=0.01)
    assert "engine 0 produced nothing for 150 s" in finding.sentence


def test_a_worker_that_goes_on_at_another_rate_was_slow(report_of: Report) -> None:
    step = steady_step(0, num_workers=2)
    silence(step, "0", 25.0, 175.0)
    late = [request for request in step.workers["0"] if request.seconds > 100]
    for place, request in enumerate(late):
        request.turns[0].engine_s += place * 0.2
    report = report_of([step])
    (gap,) = report.gaps
    assert not gap.is_standstill
    assert gap.rate_after < 0.3 * gap.rate_before
    assert only_finding(report).path.worker == "0"


def oversampled(window_s: float = 84.51, num: int = 1024, kept: int = 921) -> PlannedStep:
    requests = [
        PlannedRequest(f"r{place:04d}", [PlannedTurn(500, window_s * (0.2 + 0.8 * (place + 1) / kept) - 0.015)])
        for place in range(kept)
    ]
    requests += [
        PlannedRequest(f"r{place:04d}", [PlannedTurn(700, window_s)], aborted_at_s=window_s)
        for place in range(kept, num)
    ]
    return PlannedStep({"0": requests})


def test_of_1024_requests_921_are_kept_and_each_abort_counts_once(report_of: Report) -> None:
    report = report_of([oversampled()])
    (step,) = report.steps
    assert (step.num_requests, step.num_used, step.thrown_requests) == (1024, 921, 103)
    assert step.thrown_s == pytest.approx(103 * 84.51, rel=0.001)
    assert step.thrown_tokens == 103 * 700
    finding = only_finding(report)
    assert finding.cause == "over_sampling"
    cost = "103 that were thrown away took 8,705 s and 72,100 tokens"
    assert f"921 of 1,024 requests were used; {cost}" in finding.sentence


def test_a_late_worker_is_named_with_its_reason(report_of: Report) -> None:
    step = steady_step(0, num_requests=64)
    step.workers["0"] = steady_step(0, num_workers=1, num_requests=192, last_s=96.0).workers["0"]
    report = report_of([step])
    finding = only_finding(report)
    assert (finding.cause, finding.path.worker) == ("barrier", "0")
    assert finding.seconds == pytest.approx(64, rel=0.01)
    assert "worker 0 ended 64 s after the other 7, which waited for it: it had 192 requests" in finding.sentence
    assert report.steps[0].barrier_s == pytest.approx({"0": 0.0} | {str(n): 64.0 for n in range(1, 8)}, abs=0.01)


def test_the_dearest_comes_first_and_what_recurs_is_one_finding(report_of: Report) -> None:
    steps = clean_steps()
    for step in steps[:4]:
        step.workers["0"][3].turns[0].tool_s = 100.0
    steps[4].workers["2"][0].reward_s = 80.0
    report = report_of(steps)
    assert [finding.cause for finding in report.findings] == ["tool", "reward"]
    tools = report.findings[0]
    assert tools.seconds == pytest.approx(400, rel=0.01)
    assert tools.share == pytest.approx(tools.seconds / report.total_s)
    assert tools.sentence.startswith("In 4 of 5 steps, 400 s in all")


def test_below_a_twentieth_of_the_step_nothing_is_named(report_of: Report) -> None:
    steps = clean_steps()
    slow = min(steps[0].requests(), key=lambda request: request.seconds)
    slow.reward_s = 2.5
    assert report_of(steps).findings == []


def test_the_cap_the_turns_and_the_rewards_have_their_sentences(report_of: Report) -> None:
    steps = clean_steps()
    for step in steps:
        for request in step.requests():
            request.reward = 0.1 if request.seconds > 52 else 0.8
        capped = step.workers["0"][0].turns[0]
        capped.tokens, capped.engine_s, capped.finish_reason = 600, 60.0, "length"
    report = report_of(steps)
    assert any("The cap of 600 tokens is reached in 5 of 5 steps" in text for text in report.sentences)
    assert any("have at most 2 turns; mean time by turns: 1: " in text for text in report.sentences)
    assert any(text.startswith("The slowest 20 % of the requests have a mean reward of ") for text in report.sentences)
    step = report.steps[0]
    assert step.requests_by_turns == {1: 48, 2: 48}
    own = [request for request in steps[0].requests() if len(request.turns) == 2]
    assert step.mean_seconds_by_turns[2] == pytest.approx(sum(one.seconds for one in own) / len(own), abs=0.001)
    assert step.engine_seconds_by_turn[1] == pytest.approx(sum(o.turns[1].engine_s for o in own) / len(own), abs=0.001)
    assert step.reward_of_slowest is not None
    assert step.reward_of_rest is not None
    assert step.reward_of_slowest < step.reward_of_rest
