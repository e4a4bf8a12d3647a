"""What lower caps and fewer requests would have saved; runs side by side; statistics. All against closed forms."""

import random
from pathlib import Path

import pytest

from forebay.telemetry.analysis import analyse, load
from forebay.telemetry.analysis.compare import compare
from forebay.telemetry.analysis.report import ProfileReport
from forebay.telemetry.analysis.robust import (
    correlation,
    log_deviations,
    median,
    median_slope,
    percentile,
    resistant_line,
    thinned,
    variation,
)
from tests.telemetry.planted_log import PlannedRequest, PlannedStep, PlannedTurn, clean_step, write_log

TOKEN_S = 0.1


def capped_run(folder: Path, cap: int, *, num_steps: int = 4, reward: float = 0.5) -> ProfileReport:
    """Answers of 10, 20, …, 1,000 tokens, cut at ``cap``; none is slow: a tenth of a second a token."""
    steps = []
    for number in range(num_steps):
        requests = []
        for place in range(100):
            tokens = min(cap, 10 * (place + 1))
            reason = "length" if 10 * (place + 1) > cap else "stop"
            turn = PlannedTurn(tokens, tokens * TOKEN_S, 0.0, 0.0, finish_reason=reason)
            own = 0.0 if reason == "length" else reward
            requests.append(PlannedRequest(f"{number}-{place}", [turn], reward_s=0.0, reward=own))
        steps.append(PlannedStep({"0": requests}, {}))
    return analyse(load(write_log(folder, steps)))


def test_a_lower_cap_saves_the_tokens_that_it_cuts_of_the_last(tmp_path: Path) -> None:
    report = capped_run(tmp_path, 1000)
    by_cap = {found.value: found for found in report.whatifs if found.what == "cap"}
    assert list(by_cap) == [900, 800, 700, 600, 500, 400, 300, 200]
    for cap, found in by_cap.items():
        num_cut = 100 - cap / 10
        assert found.saved_s == pytest.approx((1000 - cap) * TOKEN_S, rel=0.01)
        assert found.num_cut == 4 * num_cut
        assert found.reward_lost == pytest.approx(4 * num_cut * 0.5)


def test_waiting_for_fewer_saves_what_lies_between_two_ends(tmp_path: Path) -> None:
    report = capped_run(tmp_path, 1000)
    by_share = {found.value: found for found in report.whatifs if found.what == "wait_for"}
    assert list(by_share) == [0.99, 0.95, 0.9, 0.8]
    for share, found in by_share.items():
        assert found.saved_s == pytest.approx((1 - share) * 100 * 10 * TOKEN_S, rel=0.01)
        assert found.num_cut == 4 * round((1 - share) * 100)


def test_where_lowering_the_cap_gains_nothing_more_is_said(tmp_path: Path) -> None:
    """Below 600 tokens the step waits for a tool that no cap shortens."""
    requests = [PlannedRequest(str(place), [PlannedTurn(50, 5.0)]) for place in range(90)]
    requests += [PlannedRequest(f"l{place}", [PlannedTurn(910 + place, 91 + place * TOKEN_S)]) for place in range(9)]
    requests.append(PlannedRequest("tool", [PlannedTurn(50, 5.0, tool_s=55.0), PlannedTurn(50, 1.0)]))
    report = analyse(load(write_log(tmp_path, [PlannedStep({"0": requests}, {})])))
    assert any("; a lower cap saves no more." in text for text in report.sentences)


def test_a_cap_that_cuts_few_answers_is_recommended(tmp_path: Path) -> None:
    requests = [PlannedRequest(str(place), [PlannedTurn(100 + place, 10.0 + place / 10)]) for place in range(99)]
    requests.append(PlannedRequest("long", [PlannedTurn(1000, 100.0)]))
    report = analyse(load(write_log(tmp_path, [PlannedStep({"0": requests}, {})])))
    (text,) = [text for text in report.sentences if "and cut 1 of 100 answers" in text]
    assert text.startswith("max_tokens 200 would have saved 80 s a step")


def test_two_runs_with_different_caps_stand_side_by_side(tmp_path: Path) -> None:
    long, short = capped_run(tmp_path / "cap1000", 1000), capped_run(tmp_path / "cap600", 600, num_steps=3, reward=0.9)
    found = compare([long, short])
    base, other = found.runs
    assert (base.name, other.name) == ("cap1000", "cap600")
    assert base.figures.seconds == pytest.approx(1000 * TOKEN_S, rel=0.01)
    assert other.figures.seconds == pytest.approx(600 * TOKEN_S, rel=0.01)
    assert base.figures.interval_s == pytest.approx(1000 * TOKEN_S + 5, rel=0.01)
    tokens = sum(range(10, 1001, 10)), sum(min(600, length) for length in range(10, 1001, 10))
    assert base.figures.tokens_per_s == pytest.approx(tokens[0] / 100, rel=0.01)
    assert other.figures.tokens_per_s == pytest.approx(tokens[1] / 60, rel=0.01)
    assert (other.figures.length_min, other.figures.length_max) == (10, 600)
    assert other.figures.length_mean == pytest.approx(tokens[1] / 100)
    assert other.figures.share_at_cap == pytest.approx(0.4, abs=0.011)
    assert other.saved_s == pytest.approx(40, rel=0.01)
    assert other.speedup == pytest.approx(1000 / 600, rel=0.01)
    assert other.throughput_gain == pytest.approx(tokens[1] / 60 / (tokens[0] / 100), rel=0.01)
    assert other.reward_gain == pytest.approx(0.6 * 0.9 - 0.5)
    assert base.saved_s is None
    assert [step.name for step in found.steps] == ["1", "2", "3", "4"]
    last = found.steps[3].runs
    assert last[1] is None
    assert last[0] is not None
    assert last[0].reward_mean == pytest.approx(0.5)
    assert found.sentences[0].startswith("cap600: 40 s less a step than cap1000, ")


def test_a_peak_that_only_one_of_seven_runs_has_does_not_come_from_the_data(tmp_path: Path) -> None:
    reports = []
    for run in range(7):
        rng = random.Random(run)
        steps = [clean_step(rng, place, 1, 16) for place in range(6)]
        if run == 3:
            steps[4].phases["cache_flush"] = 200.0
        reports.append(analyse(load(write_log(tmp_path / f"run{run}", steps))))
    found = compare(reports)
    assert [run.outlier_steps for run in found.runs] == [[], [], [], ["5"], [], [], []]
    (peak,) = [text for text in found.sentences if "the data is not the cause" in text]
    assert peak.startswith("Step 5 took ")
    assert "in run3 and " in peak


def test_runs_of_one_name_are_numbered(tmp_path: Path) -> None:
    same = capped_run(tmp_path / "logs", 100, num_steps=1)
    assert [run.name for run in compare([same, same]).runs] == ["logs (1)", "logs (2)"]


def test_a_line_is_not_moved_by_wild_points() -> None:
    points = [(float(x), 2.0 + 0.5 * x) for x in range(1, 31)] + [(15.0, 900.0), (16.0, 800.0)]
    base, slope = resistant_line(points)
    assert (base, slope) == (pytest.approx(2.0, abs=0.3), pytest.approx(0.5, rel=0.05))
    assert resistant_line([(10.0, 5.0), (10.0, 7.0)]) == (0.0, pytest.approx(0.6))
    assert resistant_line([]) == (0.0, 0.0)


def test_a_line_that_the_points_do_not_tell_goes_through_the_origin() -> None:
    steep = [(73.0, 0.05)] * 8 + [(81.0, 0.45)] * 8
    assert resistant_line(steep) == (0.0, pytest.approx(0.5 * (0.05 / 73 + 0.45 / 81)))
    far_apart = [(40.0 + place, 0.1) for place in range(8)] + [(80.0 + place, 1.0) for place in range(8)]
    base, slope = resistant_line(far_apart)
    assert base == 0
    assert 0.1 / 40 < slope < 1.0 / 80
    one_stalled = [(100.0, 10.0), (110.0, 11.0), (120.0, 12.0), (130.0, 13.0), (140.0, 14.0), (150.0, 900.0)]
    assert resistant_line(one_stalled) == (0.0, pytest.approx(0.1))


def test_the_median_slope_is_that_of_all_pairs_and_is_found_for_many_steps() -> None:
    rng = random.Random(1)
    for number in range(6, 60):
        values = [round(rng.uniform(-0.2, 0.2) * place + rng.gauss(0, 1), number % 5) for place in range(number)]
        pairs = [(left, right) for right in range(number) for left in range(right)]
        slopes = [(values[right] - values[left]) / (right - left) for left, right in pairs]
        assert median_slope(values) == pytest.approx(median(slopes), rel=1e-9, abs=1e-9)
    assert median_slope([0.25 * place for place in range(10_000)]) == 0.25  # of 50 million pairs


def test_statistics_are_those_of_the_books() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([], 50) == 0.0
    assert median([9.0, 1.0, 5.0]) == 5.0
    assert variation([2.0, 4.0, 6.0]) == pytest.approx(0.5)
    assert correlation([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]) == pytest.approx(1.0)
    assert correlation([1.0, 1.0], [2.0, 4.0]) == 0.0
    assert log_deviations([1.0, 1.0, 1.0, 2.718281828])[3] == pytest.approx(50, rel=0.01)
    assert thinned(list(range(1001)), 11) == list(range(0, 1001, 100))
    assert thinned([1.0, 2.0], 5) == [1.0, 2.0]
