"""What is read out of logs: answers by prompt, engines as models, and a simulation that is what was recorded."""

import json
import random
from pathlib import Path

import msgspec
import pytest

from forebay.core.errors import InvalidInput
from forebay.core.scheduling.oversampling import Oversampling
from forebay.telemetry.tracing.records import Dropped
from forebay.telemetry.tracing.trace_budget import enforce_budget
from forebay.workers.simulator.cost import EngineCost
from forebay.workers.simulator.populations import AnswerLengths
from forebay.workers.simulator.recorded.engine_fit import NOTHING_WAITED, fit_engines
from forebay.workers.simulator.recorded.log_facts import answer_facts, run_facts
from forebay.workers.simulator.recorded.read_logs import read_log
from forebay.workers.simulator.recorded.recorded_scenario import recorded_prompts, recorded_scenario, self_check
from forebay.workers.simulator.scenario import simulate
from tests.simulator.recorded_kit import queued_log, recorded_run, small_scenario, write_trace
from tests.telemetry.planted_log import clean_step, write_log


def test_the_answers_and_settings_of_a_run_are_read_back(tmp_path: Path) -> None:
    path, run = recorded_run(tmp_path)
    log = read_log(path.parent)
    assert (log.group_size, log.num_process, len(log.engines)) == (4, 16, 2)
    answers = run.scenario.answers
    for prompt in run.scenario.prompts:
        (group,) = [each for each in log.groups() if each[0].instance == prompt.instance_id]
        assert [each.sampled for each in group] == [answers.of(prompt, 0, number, 0).tokens for number in range(4)]
    assert log.makespan_s == pytest.approx(run.makespan_s, rel=0.01)


def test_what_no_plan_says_is_seen_in_the_rollouts(tmp_path: Path) -> None:
    write_trace(tmp_path, simulate(small_scenario()), has_plan=False)
    log = read_log(tmp_path / "trace")
    assert (log.group_size, log.num_process) == (4, 16)


@pytest.mark.parametrize(
    "engines",
    [
        (EngineCost(places=64),) * 2,
        (EngineCost(step_s=0.004, step_s_per_sequence=0.002, places=64, tool_s=0.3),) * 2,
        (EngineCost(places=64), EngineCost(places=64, speed=2.0)),
    ],
)
def test_engines_that_are_known_are_found_again(tmp_path: Path, engines: tuple[EngineCost, ...]) -> None:
    path, run = recorded_run(tmp_path, small_scenario(engines))
    log = read_log(path.parent)
    fit = fit_engines(log)
    first, second = fit.costs.values()
    assert second.speed / first.speed == pytest.approx(engines[1].speed / engines[0].speed, rel=0.03)
    for number in (3, 8):
        assert first.tokens_per_s(number) == pytest.approx(engines[0].tokens_per_s(number), rel=0.05)
    assert first.tool_s == pytest.approx(engines[0].tool_s, abs=0.05)
    assert (first.places, first.kv_tokens, fit.is_limited_by) == (NOTHING_WAITED, None, "")
    assert self_check(log, fit).simulated_s == pytest.approx(run.makespan_s, rel=0.03)


def test_a_cache_that_is_given_is_the_engines(tmp_path: Path) -> None:
    path, _ = recorded_run(tmp_path)
    assert {each.kv_tokens for each in fit_engines(read_log(path.parent), 5_000).costs.values()} == {5_000}


@pytest.mark.parametrize(("places", "kv_tokens"), [(5, None), (64, 1_200)])
def test_what_held_calls_up_is_found_again(places: int, kv_tokens: int | None) -> None:
    """Four answers each share a prompt of 172 tokens, which is more than half of what each has in the cache."""
    log = queued_log(places, kv_tokens or 1 << 30)
    fit = fit_engines(log)
    (cost,) = fit.costs.values()
    assert cost.shared_share == pytest.approx(170 / 172)
    assert self_check(log, fit).simulated_s == pytest.approx(log.makespan_s, rel=0.05)
    if kv_tokens is None:
        assert (fit.is_limited_by, cost.places, cost.kv_tokens) == ("places", places, None)
    else:
        assert (fit.is_limited_by, cost.places) == ("kv", NOTHING_WAITED)
        assert cost.kv_tokens == pytest.approx(kv_tokens, rel=0.1)
        assert cost.kv_reserve >= 0.8


def test_time_that_an_engine_says_is_its_own_is_not_taken_for_a_pause() -> None:
    (cost,) = fit_engines(queued_log(64, 1 << 30, tail_s=0.5)).costs.values()
    assert cost.tool_s == pytest.approx(0.0, abs=0.01)


def test_steps_and_the_time_of_training_are_simulated(tmp_path: Path) -> None:
    scenario = small_scenario(train_s=7.0, oversampling=Oversampling(groups_per_step=4, leftover="discard"))
    path, run = recorded_run(tmp_path, scenario)
    log = read_log(path.parent)
    assert recorded_scenario(log, fit_engines(log)).train_s == pytest.approx(7.0, abs=0.3)
    assert self_check(log, fit_engines(log)).simulated_s == pytest.approx(run.makespan_s, rel=0.05)


def test_each_seed_has_the_same_answers_in_other_slots(tmp_path: Path) -> None:
    from numpy.random import default_rng

    path, _ = recorded_run(tmp_path)
    log = read_log(path.parent)
    plain, _ = recorded_prompts(log)
    shuffled, _ = recorded_prompts(log, default_rng(1))
    by_name = {each.instance_id: each for each in shuffled}
    assert [each.instance_id for each in plain] != [each.instance_id for each in shuffled]
    assert all(sorted(each.recorded) == sorted(by_name[each.instance_id].recorded) for each in plain)
    assert any(each.recorded != by_name[each.instance_id].recorded for each in plain)


def test_a_broken_line_is_told_with_its_number(tmp_path: Path) -> None:
    path, _ = recorded_run(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], b'{"kind": "roll\n', *lines[5:]]))
    with pytest.raises(InvalidInput, match=rf"{path.name}: line 6 is broken: not a record") as told:
        read_log(path)
    assert told.value.field == "source"
    assert told.value.hint


def test_half_a_line_of_a_killed_process_is_left_out(tmp_path: Path) -> None:
    path, _ = recorded_run(tmp_path)
    whole = len(read_log(path).rollouts)
    content = path.read_bytes()
    num_lines = content.count(b"\n")
    path.write_bytes(content[:-20])
    log = read_log(path)
    assert len(log.rollouts) == whole - 1
    assert log.notes == [f"{path}:{num_lines} is incomplete and was skipped"]


def test_a_log_without_lengths_is_told(tmp_path: Path) -> None:
    write_trace(tmp_path, simulate(small_scenario()), has_lengths=False)
    with pytest.raises(InvalidInput, match="has no lengths: none of its 48 rollouts records sampled tokens") as told:
        read_log(tmp_path / "trace")
    assert told.value.field == "source"
    assert told.value.hint


def test_summaries_and_the_plan_outlive_the_spans_that_the_budget_takes(tmp_path: Path) -> None:
    path, _ = recorded_run(tmp_path)
    span = json.dumps(
        {"kind": "span", "name": "engine", "t": 1, "d": 1, "id": "0", "at": {"x": "y" * 200}}, separators=(",", ":")
    )
    with path.open("a") as file:
        file.write(f"{span}\n" * 2_000)
    before = read_log(path)
    assert enforce_budget(path.parent, 100_000).spans == 2_000
    after = read_log(path)
    assert after.rollouts == before.rollouts
    assert after.settings == before.settings
    assert self_check(after, fit_engines(after)) == self_check(before, fit_engines(before))


def test_summaries_that_are_missing_are_noted(tmp_path: Path) -> None:
    path, _ = recorded_run(tmp_path)
    with path.open("ab") as file:
        file.write(msgspec.json.encode(Dropped(t=1, summaries=3)) + b"\n")
    assert read_log(path).notes == ["the trace reports that 3 summaries of rollouts are missing"]


def test_verl_logs_are_read_as_well(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "log", [clean_step(random.Random(seed), seed) for seed in range(2)])
    log = read_log(folder)
    assert len(log.rollouts) == 2 * 4 * 24
    assert (log.group_size, len(log.engines)) == (1, 4)
    assert any("each answer counts as a prompt" in note for note in log.notes)
    fit = fit_engines(log)
    cost = next(iter(fit.costs.values()))
    assert cost.tokens_per_s(10) == pytest.approx(10.0, rel=0.05)  # that of the planted log, whatever runs beside
    assert self_check(log, fit).simulated_s > 0


def test_a_verl_log_with_a_broken_line_is_told_with_its_number(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "log", [clean_step(random.Random(1), 1)])
    path = sorted(folder.rglob("worker_*.jsonl"))[0]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], "{\n", *lines[2:]]))
    with pytest.raises(InvalidInput, match=rf"{path.name}: line 3 is broken"):
        read_log(folder)


def test_what_a_probe_would_have_told_is_counted() -> None:
    hidden, short, long, longest = [100, 100, 900], [100, 120, 140], [700, 800, 600], [900, 700, 800]
    facts = answer_facts([hidden, short, long, longest, short], threshold=512)
    assert facts.false_negatives == pytest.approx(1 / 3)
    assert facts.precision == 1.0
    assert (facts.num_groups, facts.num_answers, facts.group_size, facts.longest) == (5, 15, 3, 900)
    assert facts.cv_most == pytest.approx(1.0285, abs=0.001)  # of the first: a deviation of 377 at a mean of 367
    assert facts.rank_correlation == pytest.approx(0.9177, abs=0.001)
    alone = answer_facts([[5], [6]])
    assert (alone.cv_within, alone.precision, alone.rank_correlation) == (None, None, None)
    assert answer_facts([[480] * 8, [520] * 8]).threshold == 512


def test_a_planted_tail_and_idle_engines_are_seen(tmp_path: Path) -> None:
    even, _ = recorded_run(tmp_path / "even")
    prompts = small_scenario().prompts
    tail = [*prompts[:-1], AnswerLengths("t", 200, 5e3, 1.0)]
    long, _ = recorded_run(tmp_path / "tail", small_scenario(prompts=tail, max_tokens=10_000))
    plain, planted = run_facts(read_log(even)), run_facts(read_log(long))
    assert planted.tail_share > 0.6 > plain.tail_share
    assert planted.free_share > plain.free_share + 0.2
    assert planted.num_engines == 2
