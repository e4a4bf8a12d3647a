"""``static``: bound to an engine at submission, each engine with its own queue and its share of the places."""

from collections import Counter

from tests.scheduling.policy_kit import URLS, Bench, policy_of, run_to_the_end, waiting

A, B, C, D = URLS


def engines(bench: Bench) -> dict[str, str]:
    return {f"{key.group[6:]}/{key.number}": str(choice.engine) for key, choice in bench.running.items()}


def test_rollouts_are_dealt_out_in_turn() -> None:
    bench = Bench(policy_of("static"), [waiting(n, 3) for n in range(4)], num_places=12)
    bench.fill()
    assert list(engines(bench).values()) == [A, B, C, D] * 3


def test_an_engine_that_is_done_early_gets_nothing_of_the_others() -> None:
    bench = Bench(policy_of("static"), [waiting(n, 2) for n in range(4)], num_places=2, urls=(A, B))
    bench.fill()
    for _ in range(3):
        (key,) = [key for key, choice in bench.running.items() if choice.engine == A]
        bench.end(key)
        bench.fill()
    (key,) = [key for key, choice in bench.running.items() if choice.engine == A]
    bench.end(key)
    assert bench.fill() == []
    assert Counter(str(choice.engine) for choice in bench.running.values()) == {B: 1}
    assert len(bench.waiting) == 3


def test_an_engine_has_no_more_than_its_share_of_the_places() -> None:
    bench = Bench(policy_of("static"), [waiting(n, 4) for n in range(4)], num_places=8, urls=(A, B))
    bench.fill()
    assert Counter(engines(bench).values()) == {A: 4, B: 4}
    bench.loads.limit({A: 6, B: 4})
    bench.fill()
    assert Counter(engines(bench).values()) == {A: 6, B: 4}


def test_what_waited_for_an_engine_that_is_lost_is_dealt_out_to_the_others() -> None:
    bench = Bench(policy_of("static"), [waiting(n, 2) for n in range(6)], num_places=3, urls=(A, B, C))
    bench.fill()
    bench.set_engines((A, C))
    run_to_the_end(bench, lambda _: 10)
    assert len(bench.ended) == 12


def test_what_was_lost_goes_back_to_its_engine_unless_that_is_gone() -> None:
    bench = Bench(policy_of("static"), [waiting(0, 2)], num_places=2, urls=(A, B))
    first, second = bench.fill()
    bench.lose(first.rollout)
    assert [choice.engine for choice in bench.fill()] == [A]
    bench.lose(second.rollout)
    bench.set_engines((A,))
    bench.end(first.rollout)
    assert [(choice.rollout, choice.engine) for choice in bench.fill()] == [(second.rollout, A)]


def test_an_engine_that_comes_later_gets_its_part_of_what_is_submitted_then() -> None:
    bench = Bench(policy_of("static", window=2), [waiting(n, 2) for n in range(8)], num_places=2, urls=(A,))
    bench.fill()
    bench.set_engines((A, B))
    used = set()
    while not bench.is_over:
        bench.fill()
        used |= set(engines(bench).values())
        bench.end(next(iter(bench.running)))
    assert used == {A, B}


def test_a_group_that_was_passed_over_waits_for_its_engine_and_later_ones_wait_with_it() -> None:
    # Engine B never gets a rollout to its end: groups of one rollout that are bound to it are passed over.
    bench = Bench(policy_of("static", window=3, group_size=1), [waiting(n, 1) for n in range(30)], 2, (A, B))
    bench.fill()
    for _ in range(20):
        done = [key for key, choice in bench.running.items() if choice.engine == A]
        if not done:
            break
        bench.end(done[0])
        bench.fill()
    assert bench.passed_over() <= 3
    assert bench.waiting
    run_to_the_end(bench, lambda _: 1)
    assert len(bench.ended) == 30
