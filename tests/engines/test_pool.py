"""Which of several engines is asked next: rest after a failure, balance."""

from forebay.core.clock import ManualClock
from forebay.engines.detect import DetectedEngine
from forebay.engines.dialect import SGLANG
from forebay.engines.pool import EnginePool, Member, Target, least_loaded
from forebay.engines.scripted import ScriptedEngine


def target(name: str) -> Target:
    return Target(name, "m", SGLANG, DetectedEngine(f"http://{name}"))


def test_rest_doubles_up_to_its_cap_and_one_burst_counts_once() -> None:
    clock = ManualClock()
    member = Member(target("a"), clock)
    rests_s = []
    for _ in range(9):
        member.failed()
        member.failed()
        began_s = clock.monotonic()
        while member.resting:
            clock.advance(0.25)
        rests_s.append(clock.monotonic() - began_s)
    assert rests_s == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    member.failed()
    member.recovered()
    assert (member.resting, member.failures) == (False, 0)


def test_next_is_awake_then_least_loaded_then_not_asked_for_longest() -> None:
    clock = ManualClock()
    resting, busy, used, fresh = (Member(target(name), clock) for name in ("resting", "busy", "used", "fresh"))
    resting.failed()
    busy.in_flight, used.last_asked_ns = 1, 5
    order = []
    left = [resting, busy, used, fresh]
    while left:
        order.append(least_loaded(left).server.url)
        left.remove(least_loaded(left))
    assert order == ["fresh", "used", "busy", "resting"]


async def test_what_one_ring_finds_out_another_is_told() -> None:
    async with ScriptedEngine(lambda _: "x") as first, ScriptedEngine(lambda _: "x") as second:
        urls = [first.url, second.url]
        told: list[tuple[str, bool]] = []
        async with pool_of(urls) as asking, pool_of(urls) as hearing:
            asking.on_server = lambda url, is_failing: told.append((url, is_failing))
            member = await asking.take(first.url)
            assert set(await hearing.when_up()) == set(urls)
            asking.failed(member)
            asking.failed(member)
            member.recovered()
            assert told == [(first.url, True), (first.url, False)]
            hearing.note_server(first.url, is_failing=True)
            assert await hearing.when_up() == (second.url,)
            hearing.note_server(first.url, is_failing=False)
            assert set(await hearing.when_up()) == set(urls)
            hearing.note_server("http://nobody.invalid", is_failing=True)


def pool_of(urls: list[str]) -> EnginePool:
    return EnginePool(urls, api_key=None, model=None, on_waiting=lambda _: None)
