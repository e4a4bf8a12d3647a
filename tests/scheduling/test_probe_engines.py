"""The policy ``probe`` over engines that come and go, and whatever else may happen."""

import random
from collections import Counter
from typing import Any

import pytest

from forebay.core.errors import InvalidInput
from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.policy import RolloutKey
from tests.scheduling.policy_kit import URLS, Bench, policy_of
from tests.scheduling.probe_kit import (
    CAP,
    FAST,
    NAMES,
    at,
    bench,
    end_all,
    end_probes,
    group,
    of,
    probed,
)


def test_where_a_heavy_engine_is_lost_others_become_heavy() -> None:
    run, _ = probed(places=8, heavy=0.25)
    run.set_engines(FAST)
    run.break_off(at(run, FAST)[0], CAP)
    for key in at(run, FAST[:1]):
        run.end(key)
    started = run.fill()
    assert {choice.engine for choice in started if choice.cap_tokens is None} == {FAST[0]}
    assert {choice.engine for choice in started if choice.cap_tokens} <= set(FAST[1:])
    finish(run)
    assert Counter(choice.rollout.group for choice in run.started).total() == 41


def test_named_heavy_engines_are_stood_in_for_until_they_are_back() -> None:
    run = bench([*NAMES, "x"], heavy=[URLS[3]], window=5, places=16)
    run.fill()
    run.set_engines(URLS[:3])
    end_probes(run)
    run.fill()
    assert {choice.engine for choice in of(run.started, "g4") if choice.rollout.number} == {URLS[0]}
    run.set_engines(URLS)
    while not any(group == "g9" for group, _ in run.running):
        end_all(run)
        run.fill()
    end_probes(run)
    run.fill()
    assert {choice.engine for choice in of(run.started, "g9") if choice.rollout.number} == {URLS[3]}


def test_what_waits_for_a_lost_engine_goes_to_other_fast_ones() -> None:
    run, _ = probed(places=8)
    gone = FAST[0]
    run.set_engines([url for url in URLS if url != gone])
    before = len(run.started)
    finish(run)
    assert gone not in {choice.engine for choice in run.started[before:]}
    assert Counter(choice.rollout.group for choice in run.started) == dict.fromkeys(NAMES, 4)


def test_the_last_engine_takes_everything_uncut() -> None:
    run, _ = probed(places=8)
    run.set_engines(FAST[:1])
    before = len(run.started)
    finish(run)
    later = run.started[before:]
    assert {(choice.engine, choice.cap_tokens) for choice in later} == {(FAST[0], None)}
    assert Counter(choice.rollout.group for choice in run.started) == dict.fromkeys(NAMES, 4)


def finish(run: Bench) -> None:
    """Let everything end that is started, until nothing is."""
    run.fill()
    while run.running:
        end_all(run)
        run.fill()


@pytest.mark.parametrize(
    ("urls", "addresses", "settings", "field", "hint"),
    [
        (URLS[:1], URLS[:1], {}, "scheduler.policy", "remote_engine_url"),
        (["http://worker"], ["http://router"], {}, "scheduler.policy", "remote_engine_url"),
        (URLS, URLS, {"heavy": ["http://engine-9"]}, "scheduler.heavy", "http://engine-0, http://engine-1"),
        (
            URLS,
            ["http://router"],
            {"heavy": ["http://engine-9"]},
            "scheduler.heavy",
            "http://engine-0, http://engine-1",
        ),
        (URLS, URLS, {"heavy": URLS}, "scheduler.heavy", "leave some out"),
    ],
)
def test_engines_that_cannot_be_split_are_refused(
    urls: Any, addresses: Any, settings: Any, field: str, hint: str
) -> None:
    policy = policy_of("probe", **settings)
    with pytest.raises(InvalidInput) as raised:
        policy.next(EngineLoads(8, urls, addresses))
    assert raised.value.field == field
    assert hint in str(raised.value.hint)


@pytest.mark.parametrize(
    ("urls", "addresses", "heavy"),
    [
        (URLS[:1], URLS, [URLS[2]]),  # which does not answer yet
        (URLS, ["http://router"], [URLS[1], "http://engine-down"]),
        (URLS, (), [URLS[1]]),
    ],
)
def test_engines_that_do_not_answer_just_now_are_engines_of_the_run(urls: Any, addresses: Any, heavy: Any) -> None:
    policy = policy_of("probe", heavy=heavy)
    policy.submit(group("a"))
    assert policy.next(EngineLoads(8, urls, addresses)) is not None


# --- anything at all


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_each_rollout_of_an_open_group_is_brought_to_its_end_once(seed: int) -> None:
    draw = random.Random(seed)
    urls = [f"http://engine-{number}" for number in range(draw.randint(2, 6))]
    size, window = draw.randint(1, 5), draw.randint(1, 9)
    names = [f"g{number}" for number in range(40)]
    run = bench(
        [group(name, size) for name in names],
        urls,
        places=draw.randint(1, 20),
        window=window,
        group_size=size,
        cap=draw.choice(["cut", "own", "none", 50]),
        heavy=draw.choice([0.25, 0.6, urls[:1]]),
        top=draw.choice([0.2, 0.5]),
        fast_concurrency=draw.choice([1, 1.5, 2]),
    )
    caps: dict[RolloutKey, int | None] = {}
    done: Counter[RolloutKey] = Counter()
    closed: set[str] = set()
    while True:
        for choice in run.fill():
            caps[choice.rollout] = choice.cap_tokens
            assert choice.rollout.group not in closed
            assert choice.engine in run.loads
        if not run.running:
            break
        key = draw.choice(list(run.running))
        happens, tokens = draw.random(), draw.randint(1, 200)
        if happens < 0.03:
            run.close(key[0])
            closed.add(key[0])
        elif happens < 0.08:
            run.lose(key)
        elif happens < 0.13:
            run.set_engines(draw.sample(urls, draw.randint(1, len(urls))))
        elif (cap := caps[key]) is not None and tokens >= cap:
            run.break_off(key, cap)
        else:
            run.end(key, tokens, ending=draw.choice(["finished"] * 9 + ["failed"]))
            done[key] += 1
        if draw.random() < 0.2:
            run.set_engines(urls)
    assert not run.num_to_submit
    expected = {(name, number) for name in names if name not in closed for number in range(size)}
    assert {key for key in done if key[0] not in closed} == expected
    assert set(done.values()) == {1}
