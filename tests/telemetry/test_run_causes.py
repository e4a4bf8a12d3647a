"""Causes that concern the buffer, the trainer or the run as a whole, from record files with planted truth."""

from pathlib import Path

import pytest

from forebay.telemetry.analysis import analyse, load
from forebay.telemetry.analysis.report import ProfileReport
from forebay.telemetry.tracing.records import SharedEngines
from tests.telemetry.planted_trace import PlantedTrace


@pytest.fixture
def trace(tmp_path: Path) -> PlantedTrace:
    return PlantedTrace(tmp_path / "trace")


def report_of(trace: PlantedTrace) -> ProfileReport:
    return analyse(load(trace.folder))


@pytest.mark.parametrize(
    ("ending", "reason", "text"),
    [
        ("failed", "failed", "8 of 8 requests failed (environment_failure)"),
        ("finished", "invalid", "8 of 8 requests were in discarded groups (invalid)"),
    ],
)
def test_a_run_that_delivered_nothing_says_so_first(trace: PlantedTrace, ending: str, reason: str, text: str) -> None:
    run, server = trace.file("run"), trace.file("server")
    for group in "abcd":
        for slot in range(2):
            outcome = "environment_failure" if ending == "failed" else ""
            run.rollout(f"{group}/{slot}", 0, 10 + slot, ending=ending, outcome=outcome)
        server.group(group, "discarded", 11, reason=reason)
    first = report_of(trace).findings[0]
    assert (first.cause, first.share_of) == ("nothing_delivered", "run")
    assert first.sentence.startswith("No group was delivered: ")
    assert text in first.sentence


def test_failed_attempts_are_counted_by_kind_and_cost_their_time(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    for slot in range(4):
        run.rollout(f"a/{slot}", 0, 10)
    run.rollout("a/4", 0, 8, ending="retried", outcome="engine_failure", is_last=False)
    run.rollout("a/4", 9, 19, attempt=1)
    server.group("a", "ready", 19, last="a/4")
    server.read(0, 19, 19.1, ["a"], step=0, by="a")
    report = report_of(trace)
    (finding,) = report.findings
    assert (finding.cause, finding.path.request, finding.path.event) == ("failures", "a/4", "engine_failure")
    assert finding.seconds == pytest.approx(9)
    assert "1 of 6 attempts failed: engine_failure 1 (8 s)." in report.sentences


def test_a_trainer_that_reads_one_group_at_a_time_is_told(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    for group in "abcd":
        run.rollout(f"{group}/0", 0, 10)
        server.group(group, "ready", 10, last=f"{group}/0")
    for place, group in enumerate("abcd"):
        server.read(10 + 3 * place, 10 + 3 * place, 10.1 + 3 * place, [group], step=0)
    (finding,) = report_of(trace).findings
    assert finding.cause == "small_reads"
    assert finding.seconds == pytest.approx(9.1)
    assert "the trainer read its 4 groups in 4 reads of 1, although more were ready" in finding.sentence


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_trainer_is_late_only_if_nothing_was_generated_meanwhile(trace: PlantedTrace, goes_on: bool) -> None:
    run, server = trace.file("run"), trace.file("server")
    for slot in range(4):
        run.rollout(f"a/{slot}", 0, 10)
    run.rollout("b/0", 10 if goes_on else 29, 40)
    server.group("a", "ready", 10, last="a/3")
    server.read(0, 1, 2, [], step=0)
    server.read(30, 30, 31, ["a"], step=0)
    server.group("b", "ready", 40, last="b/0")
    server.read(40, 40, 41, ["b"], step=1)
    causes = {finding.cause: finding.seconds for finding in report_of(trace).findings}
    assert causes.get("late_trainer", 0.0) == (0.0 if goes_on else pytest.approx(19))


def test_calls_are_slower_while_another_run_uses_the_engines(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    server.write(SharedEngines(t=server.at(20), engines=["http://e1", "http://e2"], runs=["run-other"]))
    for step, takes_s in enumerate((10, 20, 20)):
        begin = (0, 20, 50)[step]
        for slot in range(8):
            end = begin + takes_s
            turns = [(begin, end, {"decode": float(takes_s)}, {"engine": f"http://e{1 + slot % 2}", "sampled": 100})]
            run.rollout(f"{step}/{slot}", begin, end, engine=f"http://e{1 + slot % 2}", turns=turns, sampled=100)
        server.group(str(step), "ready", begin + takes_s, last=f"{step}/7")
        server.read(begin, begin + takes_s, begin + takes_s + 0.1, [str(step)], step=step, by=str(step))
    (finding,) = report_of(trace).findings
    assert finding.cause == "shared_engines"
    assert finding.seconds == pytest.approx(20, rel=0.01)
    assert "another run uses the same engines: calls take 2 times as long" in finding.sentence


def test_a_trainer_is_not_late_while_rollouts_still_run(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    run.rollout("a/0", 0, 10)
    server.group("a", "ready", 10, last="a/0")
    server.read(0, 10, 10.1, ["a"], step=0, by="a")
    run.rollout("b/0", 10, 25)
    server.group("b", "ready", 25, last="b/0")
    run.open("attempt", 10, "c/0", group="c")
    server.open("read", 50, "")
    run.span("agent", 10, 100, "c/0", group="c")
    assert "late_trainer" not in {finding.cause for finding in report_of(trace).findings}


def test_one_worker_is_still_compared_with_the_others(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    for slot in range(16):
        engine, end = ("http://e1", 10) if slot % 2 else ("http://e2", 30)
        turns = [(0, end, {"decode": float(end)}, {"engine": engine, "sampled": 100})]
        run.rollout(f"a/{slot}", 0, end, engine=engine, turns=turns, sampled=100)
    server.group("a", "ready", 30, last="a/14")
    server.read(0, 30, 30.1, ["a"], step=0, by="a")
    for worker in ("http://e1", "http://e2"):
        report = analyse(load(trace.folder), worker=worker)
        assert [(finding.cause, finding.path.worker) for finding in report.findings] == [("slow_engine", "http://e2")]


def test_many_reads_that_wait_a_little_for_one_cause_are_a_finding(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    for place in range(25):
        begin = 4 * place
        attempt = run.rollout(f"{place}/0", begin, begin + 4, phases={"admission": 3.0, "decode": 1.0})
        run.span("admission", begin, begin + 3, f"{place}/0", up=attempt, group=str(place))
        run.span("decode", begin + 3, begin + 4, f"{place}/0", up=attempt, group=str(place), turn=0)
        server.group(str(place), "ready", begin + 4, last=f"{place}/0")
        server.read(begin, begin + 4, begin + 4, [str(place)], step=0, by=str(place))
    (finding,) = report_of(trace).findings
    assert (finding.cause, finding.seconds) == ("admission", pytest.approx(75, rel=0.01))


def test_the_report_on_one_step_names_the_same_cause_as_the_whole_report(trace: PlantedTrace) -> None:
    """Each step has three calls at each engine, which are too few to judge one: those of earlier steps count, too."""
    run, server = trace.file("run"), trace.file("server")
    for step in range(4):
        begin, ends = 20 * step, (10, 16)
        for slot in range(6):
            engine, end = f"http://e{slot % 2}", begin + ends[slot % 2]
            turns = [(begin, end, {"engine": float(end - begin)}, {"engine": engine, "sampled": 100})]
            run.rollout(f"{step}/{slot}", begin, end, engine=engine, turns=turns, sampled=100)
        server.group(str(step), "ready", begin + 16, last=f"{step}/5")
        server.read(begin, begin + 16, begin + 20, [str(step)], step=step, by=str(step))
    whole, last = report_of(trace), analyse(load(trace.folder), step="3")
    for report in (whole, last):
        assert (report.findings[0].cause, report.findings[0].path.worker) == ("slow_engine", "http://e1")
    assert last.findings[0].seconds == pytest.approx(6, rel=0.01)
    assert [engine.num_calls for engine in last.engines] == [3, 3]
