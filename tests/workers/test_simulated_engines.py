"""What modelled engines take for their work, against what can be worked out by hand."""

import asyncio
from dataclasses import replace

import pytest

from forebay.core.errors import InvalidInput
from forebay.core.scheduling.oversampling import Oversampling
from forebay.workers.simulator.cost import EngineCost
from forebay.workers.simulator.modelled_engines import EngineFailure, engine_url
from forebay.workers.simulator.populations import AnswerLengths
from forebay.workers.simulator.run_measures import measure
from forebay.workers.simulator.scenario import Scenario, SimulatedRun, simulate
from forebay.workers.simulator.virtual_loop import SimulationStuck, run_virtual

STEP_S, SEQUENCE_S = 0.01, 0.001
ENGINE = EngineCost(step_s=STEP_S, step_s_per_sequence=SEQUENCE_S, places=4)


def answers(*lengths: int, prompt_tokens: int = 10, num_turns: int = 1) -> AnswerLengths:
    """One group with answers of exactly these lengths."""
    return AnswerLengths("a", prompt_tokens, 0, 0, recorded=lengths, num_turns=num_turns)


def simulated(prompt: AnswerLengths, *engines: EngineCost, num_process: int = 8) -> SimulatedRun:
    return simulate(Scenario([prompt], len(prompt.recorded), num_process, engines))


def test_one_answer_takes_a_step_for_each_token() -> None:
    run = simulated(answers(100), ENGINE)
    assert run.makespan_s == pytest.approx(100 * (STEP_S + SEQUENCE_S))
    [rollout] = run.rollouts
    assert (rollout.sampled, rollout.engine, rollout.ending, rollout.slot) == (100, engine_url(0), "finished", 0)


def test_answers_side_by_side_share_the_steps_and_the_rest_goes_on_faster() -> None:
    run = simulated(answers(50, 100), ENGINE)
    assert run.makespan_s == pytest.approx(50 * (STEP_S + 2 * SEQUENCE_S) + 50 * (STEP_S + SEQUENCE_S))


def test_what_has_no_place_waits() -> None:
    run = simulated(answers(100, 100), replace(ENGINE, places=1))
    assert run.makespan_s == pytest.approx(200 * (STEP_S + SEQUENCE_S))
    assert run.engines[0].busy_s == pytest.approx(run.makespan_s)


def test_an_engine_twice_as_fast_takes_half() -> None:
    slow = simulated(answers(100, prompt_tokens=100), replace(ENGINE, prefill_tokens_per_s=1_000))
    fast = simulated(answers(100, prompt_tokens=100), replace(ENGINE, prefill_tokens_per_s=1_000, speed=2))
    assert fast.makespan_s == pytest.approx(slow.makespan_s / 2)


def test_prompts_are_read_first_and_those_of_siblings_are_in_the_cache() -> None:
    engine = replace(ENGINE, prefill_tokens_per_s=1_000, places=1, cached_share=0.9)
    run = simulated(answers(100, 100, prompt_tokens=500), engine)
    assert run.makespan_s == pytest.approx(0.5 + 0.05 + 200 * (STEP_S + SEQUENCE_S))
    assert sorted(each.cached for each in run.rollouts) == [0, 450]


def test_turns_read_what_came_before_and_wait_for_tools() -> None:
    engine = replace(ENGINE, prefill_tokens_per_s=1_000, tool_s=2.0)
    run = simulated(answers(100, prompt_tokens=100, num_turns=2), engine)
    assert run.makespan_s == pytest.approx(0.1 + 0.15 + 100 * (STEP_S + SEQUENCE_S) + 2 * 2.0)
    assert run.rollouts[0].prompt == 100 + 150


def test_full_memory_puts_one_back_which_is_computed_anew() -> None:
    """Both fit at first: 20 tokens of prompts, and 2 more with each step, until there are 100."""
    engine = replace(ENGINE, prefill_tokens_per_s=1_000, kv_tokens=100, kv_reserve=0.0)
    run = simulated(answers(60, 60), engine)
    both, alone = STEP_S + 2 * SEQUENCE_S, STEP_S + SEQUENCE_S
    assert [use.preemptions for use in run.engines] == [1]
    assert sorted(each.preemptions for each in run.rollouts) == [0, 1]
    expected = 0.02 + 40 * both + 20 * alone + 0.05 + 20 * alone  # read again: its prompt, and 40 tokens of its own
    assert run.makespan_s == pytest.approx(expected, rel=0.02)
    assert [each.sampled for each in run.rollouts] == [60, 60]


def test_memory_bounds_what_runs_side_by_side() -> None:
    engine = replace(ENGINE, kv_tokens=100, kv_reserve=1.0)
    run = simulated(answers(60, 60), engine)
    free = simulated(answers(60, 60), ENGINE)
    assert run.makespan_s > 1.5 * free.makespan_s
    assert run.engines[0].preemptions == 0, "what may still be sampled is kept free"


def test_siblings_that_run_side_by_side_have_their_prompt_in_memory_once() -> None:
    """40 tokens of a prompt, and 20 of each answer: 60 each, or 100 in all."""
    engine = replace(ENGINE, kv_tokens=100, kv_reserve=1.0)
    prompt = replace(answers(20, 20, 20, prompt_tokens=40), has_own_limits=True)
    apart = simulated(prompt, engine)
    assert apart.makespan_s == pytest.approx(60 * (STEP_S + SEQUENCE_S))
    together = simulated(prompt, replace(engine, kv_tokens=105, shared_share=1.0))
    assert together.makespan_s == pytest.approx(20 * (STEP_S + 3 * SEQUENCE_S), rel=0.01)
    tight = simulated(prompt, replace(engine, kv_tokens=90, shared_share=1.0))
    both, alone = STEP_S + 2 * SEQUENCE_S, STEP_S + SEQUENCE_S
    assert tight.makespan_s == pytest.approx(20 * both + 20 * alone, rel=0.01)


def test_a_prompt_stays_in_memory_until_the_last_sibling_has_ended() -> None:
    """The first of two ends after 10 tokens; what comes then finds the prompt and 10 tokens of the other one."""
    engine = replace(ENGINE, kv_tokens=80, kv_reserve=0.0, shared_share=1.0)
    prompts = [AnswerLengths(name, 40, 0, 0, recorded=(10, 30)) for name in ("a", "b")]
    run = simulate(Scenario(prompts, 2, 8, [engine]))
    begun = [(each.end - each.started) / 1e9 for each in run.rollouts if each.instance == "b"]
    both, alone = STEP_S + 2 * SEQUENCE_S, STEP_S + SEQUENCE_S
    assert run.makespan_s == pytest.approx(2 * (10 * both + 20 * alone), rel=0.01)
    assert max(begun) == pytest.approx(run.makespan_s, rel=0.01)
    assert run.engines[0].preemptions == 0


def test_no_more_is_kept_free_than_a_call_may_sample() -> None:
    engine = replace(ENGINE, kv_tokens=100, kv_reserve=1.0)
    told = simulated(replace(answers(30, 30), has_own_limits=True), engine)
    untold = simulated(answers(30, 30), engine)
    assert told.makespan_s == pytest.approx(30 * (STEP_S + 2 * SEQUENCE_S))
    assert untold.makespan_s == pytest.approx(60 * (STEP_S + SEQUENCE_S))


def test_what_an_engine_had_is_sampled_again_elsewhere() -> None:
    scenario = Scenario([answers(100)], 1, 8, [ENGINE, ENGINE], failures=[EngineFailure(0, 0.55, 90.0)])
    run = simulate(scenario)
    [rollout] = run.rollouts
    assert (rollout.lost, rollout.sampled, rollout.engine) == (50, 100, engine_url(1))
    assert run.makespan_s == pytest.approx(0.55 + 100 * (STEP_S + SEQUENCE_S))


def test_a_run_waits_while_no_engine_answers() -> None:
    run = simulate(Scenario([answers(100)], 1, 8, [ENGINE], failures=[EngineFailure(0, 0.55, 9.0)]))
    assert run.makespan_s == pytest.approx(9.0 + 100 * (STEP_S + SEQUENCE_S))


def test_a_held_run_waits_for_its_trainer_and_goes_on_from_its_tokens() -> None:
    prompts = [AnswerLengths(name, 10, 0, 0, recorded=(length,)) for name, length in (("a", 100), ("b", 200))]
    run = simulate(Scenario(prompts, 1, 8, [ENGINE], oversampling=Oversampling(groups_per_step=1), train_s=5.0))
    both, alone = STEP_S + 2 * SEQUENCE_S, STEP_S + SEQUENCE_S
    assert [step.ready_s for step in run.steps] == pytest.approx([100 * both, 100 * both + 5.0 + 100 * alone])
    assert [(each.instance, each.step, each.trained_step, each.sampled) for each in run.rollouts] == [
        ("a", 0, 0, 100),
        ("b", 0, 1, 200),
    ]
    assert run.counts["tokens_held"] == pytest.approx(100, abs=1)


def test_the_last_tenth_of_a_step_is_its_tail() -> None:
    engine = replace(ENGINE, step_s_per_sequence=0.0, places=20)
    prompts = [AnswerLengths(number, 10, 0, 0, recorded=(400 if number == 19 else 100,)) for number in range(20)]
    run = simulate(Scenario(prompts, 1, 20, [engine]))
    assert measure(run).tail == pytest.approx(0.75)


def test_a_run_ends_after_its_steps() -> None:
    prompts = [AnswerLengths(number, 10, 50, 0) for number in range(9)]
    oversampling = Oversampling(groups_per_step=2)
    run = simulate(Scenario(prompts, 2, 8, [ENGINE], oversampling=oversampling, num_steps=3))
    assert len(run.steps) == 3
    assert sum(each.trained_step is not None for each in run.rollouts) == 3 * 2 * 2


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    scenario = Scenario([AnswerLengths(number, 10, 80, 30) for number in range(5)], 4, 8, [ENGINE])
    assert simulate(scenario).rollouts == simulate(scenario).rollouts
    assert simulate(replace(scenario, seed=1)).makespan_s != simulate(scenario).makespan_s


@pytest.mark.parametrize("field", ["prompts", "engines"])
def test_nothing_to_simulate_is_refused(field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        replace(Scenario([answers(1)]), **{field: []})
    assert caught.value.field == field


@pytest.mark.parametrize(("field", "value"), [("speed", 0), ("places", 0), ("step_s", -1.0), ("kv_tokens", 1)])
def test_an_engine_that_cannot_be_is_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidInput) as caught:
        replace(ENGINE, **{field: value})
    assert caught.value.field == field


def test_virtual_time_passes_at_once_and_waiting_for_nothing_is_an_error() -> None:
    async def sleep() -> float:
        await asyncio.sleep(1e6)
        return asyncio.get_running_loop().time()

    assert run_virtual(sleep()) == pytest.approx(1e6)
    with pytest.raises(SimulationStuck):
        run_virtual(_for_ever())


async def _for_ever() -> None:
    await asyncio.Event().wait()


def test_an_engine_that_is_back_in_the_same_moment_is_there() -> None:
    failures = [EngineFailure(0, at_s, at_s) for at_s in (2.3, 1.3, 0.8, 1.5, 1.2)]
    run = simulate(Scenario([answers(1_000)], 1, 8, [ENGINE], failures=failures))
    assert run.makespan_s == pytest.approx(2.3 + 1_000 * (STEP_S + SEQUENCE_S))
