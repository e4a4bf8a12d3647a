"""What policies are told of engines: the least loaded one, of all or of some, as rollouts come, move and go."""

import random

import pytest

from forebay.core.scheduling.engine_loads import EngineLoads

URLS = [f"http://engine-{number}" for number in range(5)]


def test_the_least_loaded_engine_is_the_one_that_counting_finds() -> None:
    draw, some = random.Random(1), frozenset(URLS[:2])
    loads = EngineLoads(100, URLS)
    running: list[str] = []
    for _ in range(3_000):
        if running and draw.random() < 0.5:
            loads.move(running.pop(draw.randrange(len(running))), None)
        else:
            running.append(draw.choice(URLS))
            loads.move(None, running[-1])
        for among in (None, some):
            least = loads.least(among)
            assert least is not None
            assert running.count(least) == min(running.count(url) for url in among or URLS)


def test_of_several_the_one_not_chosen_for_longest_comes_next() -> None:
    loads = EngineLoads(100, URLS[:3])
    chosen = []
    for _ in range(6):
        chosen.append(loads.least())
        loads.move(None, chosen[-1])
    assert chosen == URLS[:3] * 2


def test_an_engine_that_does_not_answer_is_not_chosen_and_counts_on_when_it_is_back() -> None:
    loads = EngineLoads(100, URLS[:2])
    loads.move(None, URLS[0])
    assert loads.set_engines(URLS[1:2]) == [URLS[0]]
    loads.move(None, URLS[1])
    loads.move(None, URLS[1])
    assert (loads.least(), loads.least(frozenset(URLS[:1])), URLS[0] in loads) == (URLS[1], None, False)
    assert loads.set_engines(URLS[:2]) == []
    assert (loads.least(), loads.in_flight(URLS[0])) == (URLS[0], 1)


@pytest.mark.parametrize(("num_places", "share"), [(10, 5), (9, 5), (1, 1)])
def test_engines_share_the_places_of_the_run(num_places: int, share: int) -> None:
    loads = EngineLoads(num_places, URLS[:2])
    assert [loads.places(url) for url in URLS[:2]] == [share, share]


def test_engines_with_places_of_their_own_come_last_once_they_are_full() -> None:
    loads = EngineLoads(100, URLS[:2])
    loads.limit({URLS[0]: 1, URLS[1]: 3})
    assert (loads.num_places, loads.places(URLS[1])) == (4, 3)
    chosen = []
    for _ in range(4):
        chosen.append(loads.least())
        loads.move(None, chosen[-1])
    assert chosen == [URLS[0], URLS[1], URLS[1], URLS[1]]
