"""``longest-first``: what it predicts, and in which order rollouts are started by that."""

import math
import random

import pytest

from forebay.workers.scheduling.lengths import LengthPredictor
from tests.scheduling.policy_kit import URLS, Bench, past, policy_of, run_to_the_end, waiting


def order(bench: Bench) -> list[object]:
    """Instances in the order in which their groups began."""
    return [bench.groups[group].instance_id for group in bench.begun]


def test_groups_begin_by_what_earlier_epochs_and_runs_had() -> None:
    history = [past("short", 10), past("long", 4_000), past("middle", 500)]
    bench = Bench(policy_of("longest-first", history=history), [waiting(name) for name in ("short", "long", "middle")])
    bench.fill()
    assert order(bench) == ["long", "middle", "short"]


def test_newer_answers_count_more_than_older_ones() -> None:
    history = [*(past("grown", 10) for _ in range(20)), *(past("grown", 5_000, 1) for _ in range(8)), past("same", 500)]
    bench = Bench(policy_of("longest-first", history=history), [waiting("same"), waiting("grown")])
    bench.fill()
    assert order(bench) == ["grown", "same"]


def test_an_id_is_not_the_string_of_it() -> None:
    first, second = waiting("1", group="text"), waiting(1, group="number")
    bench = Bench(policy_of("longest-first", history=[past("1", 10), past(1, 900)]), [first, second])
    bench.fill()
    assert bench.begun == ["number", "text"]


def test_without_anything_seen_the_order_is_that_of_the_file_and_groups_go_on_whole() -> None:
    bench = Bench(policy_of("longest-first"), [waiting(n, 3, num_chars=n) for n in range(4)])
    bench.fill()
    assert order(bench) == [0, 1, 2]
    assert [key.group for key in bench.chosen[:3]] == ["group-0"] * 3


@pytest.mark.parametrize("sign", [-1, 1])
def test_prompts_tell_the_length_of_instances_that_were_not_seen(sign: int) -> None:
    draw = random.Random(3)
    seen = [waiting(f"seen-{n}", 1, num_chars=100 * (n + 1)) for n in range(40)]
    unseen = [waiting(n, 1, num_chars=100 * (n + 1)) for n in range(10, 20)]
    bench = Bench(policy_of("longest-first", window=10), [*seen, *unseen], num_places=4)
    lengths = {
        group.group: int(group.num_chars**sign * 5_000_000 * draw.uniform(0.9, 1.1)) for group in (*seen, *unseen)
    }
    run_to_the_end(bench, lambda key: lengths[key.group] // 1_000)
    last = [instance for instance in order(bench) if instance in range(10, 20)]
    assert last == sorted(last, reverse=sign > 0)


def test_prompts_that_tell_nothing_are_not_listened_to() -> None:
    draw, predictor = random.Random(1), LengthPredictor()
    for number in range(200):
        predictor.add(number, int(500 * math.exp(draw.gauss(0, 0.4))), draw.randint(10, 1_000))
    assert predictor.slope == 0.0
    assert predictor.of_prompt(10) == predictor.of_prompt(1_000) == pytest.approx(math.log(500), abs=0.1)


def test_siblings_that_were_short_let_their_group_wait_for_a_longer_one() -> None:
    history = [past("known", 500), past("other", 900)]
    groups = [waiting("new", 4), waiting("known", 4)]
    bench = Bench(policy_of("longest-first", history=history), groups, num_places=1)
    first = bench.fill()[0].rollout
    assert first.group == "group-new"  # in the mean of all, it is longer
    bench.end(first, tokens=20)
    assert [choice.rollout.group for choice in bench.fill()] == ["group-known"]


def test_a_group_goes_on_before_one_that_is_little_longer() -> None:
    history = [past("a", 500), past("b", 400)]
    bench = Bench(policy_of("longest-first", history=history), [waiting("a", 3), waiting("b", 3)], num_places=1)
    first = bench.fill()[0].rollout
    bench.end(first, tokens=200)  # the mean is that of both: about 316
    assert [choice.rollout.group for choice in bench.fill()] == ["group-b"]
    bench = Bench(policy_of("longest-first", history=history), [waiting("a", 3), waiting("b", 3)], num_places=1)
    first = bench.fill()[0].rollout
    bench.end(first, tokens=300)  # 387, and a quarter more than that is beyond 400
    assert [choice.rollout.group for choice in bench.fill()] == ["group-a"]


def test_what_broke_or_was_aborted_was_at_least_so_long() -> None:
    predictor = LengthPredictor()
    predictor.add("a", 100)
    assert not predictor.add_bound("a", 50)
    assert predictor.add_bound("a", 1_000)
    assert predictor.of_instance("a") == pytest.approx((math.log1p(100) + math.log1p(1_000)) / 2)
    assert not predictor.add_bound("unseen", 1_000)


def test_the_rest_of_a_short_group_is_not_left_for_more_groups_than_the_window_has() -> None:
    # Each group has one short answer, which ends first; the next group always seems to be longer.
    bench = Bench(policy_of("longest-first", window=4), [waiting(n, 3) for n in range(60)], num_places=2)
    begun_when_chosen = []
    while not bench.is_over:
        started = [bench.begun.index(choice.rollout.group) for choice in bench.fill()]
        begun_when_chosen += [len(bench.begun) - 1 - at for at in started]
        key = next(iter(bench.running))
        bench.end(key, tokens=10 if key.number == 0 else 1_000)
    assert max(begun_when_chosen) <= 4 + 2  # and one for each that ran meanwhile


def test_siblings_stay_with_the_engine_of_their_group() -> None:
    bench = Bench(policy_of("longest-first", affinity=100), [waiting("a", 3)])
    bench.loads.move(None, URLS[1])
    # Whatever the affinity: those with nothing to do come first.
    assert {choice.engine for choice in bench.fill()} == {URLS[0], URLS[2], URLS[3]}
    bench = Bench(policy_of("longest-first", affinity=4), [waiting("a", 4)], num_places=20)
    for url in URLS:
        bench.loads.move(None, url)
    assert len({choice.engine for choice in bench.fill()}) == 1


def test_long_answers_first_end_earlier_than_the_order_of_the_file() -> None:
    draw = random.Random(7)
    lengths = {f"group-{n}": int(1_000 * math.exp(draw.gauss(0, 0.7))) for n in range(60)}
    history = [past(n, lengths[f"group-{n}"]) for n in range(60)]

    def makespan(name: str) -> float:
        bench = Bench(policy_of(name, history=history), [waiting(n) for n in range(60)], num_places=16)
        now, ends = 0.0, {}
        while True:
            for choice in bench.fill():
                ends[choice.rollout] = now + lengths[choice.rollout.group]
            if bench.is_over:
                return now
            key = min(bench.running, key=ends.__getitem__)
            now = ends[key]
            bench.end(key, lengths[key.group])

    assert makespan("longest-first") <= 0.95 * makespan("pull")
