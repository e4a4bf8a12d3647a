"""Attempts that were broken at their cap: what a report, and each export, makes of them."""

import io
import json
from pathlib import Path

import pytest

from forebay.telemetry.analysis import analyse, load
from forebay.telemetry.analysis.report import ProfileReport
from forebay.telemetry.export.otel_spans import otel_spans
from forebay.telemetry.export.perfetto import PerfettoExport
from tests.telemetry.planted_trace import PlantedTrace
from tests.telemetry.trace_kit import read_whole

NUM_ALIKE = 9


@pytest.fixture
def trace(tmp_path: Path) -> PlantedTrace:
    """A step of ten rollouts, of which ``a/9`` came to its cap and ran again; ``b/0`` was never chosen again."""
    planted = PlantedTrace(tmp_path / "trace")
    run, server = planted.file("run"), planted.file("server")
    for number in range(NUM_ALIKE):
        run.rollout(f"a/{number}", 0, 50, sampled=500)
    run.rollout("a/9", 0, 40, sampled=400, ending="broken", is_last=False, is_capped=True)
    run.rollout("a/9", 40, 100, sampled=600, attempt=1)
    run.rollout("b/0", 0, 40, sampled=300, ending="broken", is_capped=True)
    server.group("a", "ready", 100, last="a/9")
    server.read(0, 100, 100, ["a"], step=0)
    return planted


@pytest.fixture
def report(trace: PlantedTrace) -> ProfileReport:
    return analyse(load(trace.folder))


def test_their_tokens_and_time_were_thrown_away(report: ProfileReport) -> None:
    (step,) = report.steps
    assert (step.num_requests, step.num_used) == (NUM_ALIKE + 2, NUM_ALIKE + 1)
    assert (step.thrown_requests, step.thrown_tokens) == (1, 300)
    assert (step.broken_attempts, step.broken_tokens) == (1, 400)
    assert step.broken_s == pytest.approx(40)
    [finding] = [each for each in report.findings if each.cause == "over_sampling"]
    told = "1 attempts that were stopped at their cap and run again took 40 s and 400 tokens"
    assert told in finding.sentence
    assert "surplus requests" in finding.sentence


def test_where_caps_cost_the_time_the_advice_is_a_higher_one(tmp_path: Path) -> None:
    planted = PlantedTrace(tmp_path / "trace")
    run, server = planted.file("run"), planted.file("server")
    run.rollout("a/0", 0, 40, sampled=400, ending="broken", is_last=False, is_capped=True)
    run.rollout("a/0", 40, 100, sampled=600, attempt=1)
    server.group("a", "ready", 100, last="a/0")
    server.read(0, 100, 100, ["a"], step=0)
    report = analyse(load(planted.folder))
    [finding] = [each for each in report.findings if each.cause == "over_sampling"]
    assert finding.sentence.endswith("A higher cap of the scheduler would stop fewer attempts.")
    assert "surplus" not in finding.sentence


def test_to_be_broken_is_neither_to_be_open_nor_to_be_aborted_nor_an_outlier(
    trace: PlantedTrace, report: ProfileReport
) -> None:
    endings = {request.request_id: request.ending for step in load(trace.folder).steps() for request in step.requests}
    assert (endings["a/9"], endings["b/0"]) == ("finished", "broken")
    assert not report.steps[0].is_open
    assert not {"b/0", "b/1"} & {outlier.request for outlier in report.outliers}


def test_perfetto_shows_how_each_attempt_ended(trace: PlantedTrace) -> None:
    file = io.BytesIO()
    PerfettoExport(file).draw(read_whole(trace.folder))
    told = [event["args"]["ending"] for event in json.loads(file.getvalue()) if "ending" in event.get("args", {})]
    assert told.count("broken") == 2


def test_a_collector_hears_of_no_error(trace: PlantedTrace) -> None:
    spans = otel_spans(read_whole(trace.folder))
    roots = [span.attributes or {} for span in spans if span.name == "attempt"]
    broken = [about for about in roots if about["rl.ending"] == "broken"]
    assert len(broken) == 2
    assert not any("error.type" in about for about in broken)
