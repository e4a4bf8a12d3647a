"""The policy ``probe`` in real runs: what four engines are asked for, and in which order."""

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine, ThreadedEngine
from tests.e2e.payloads import numbered_rows
from tests.e2e.reading import run_process_of
from tests.kit import Json, NativeRun, ServerProcess, poll_until

NUM_ROWS, GROUP_SIZE, NUM_PROCESS = 10, 4, 16
SHARE = NUM_PROCESS // 4
MAX_TOKENS = 4_096
HEAVY = 1
"""The engine for long rollouts, the second of four."""
LONG = {"row-8", "row-9"}
HELD = "row-9"
LENGTHS = {f"row-{number}": 20 * (number + 1) for number in range(NUM_ROWS)}
CAP = 242
"""1.5 times what the probe of row-7 samples: its 160 letters, and the end."""
SURPRISES = {("row-0", 1): 300, ("row-5", 3): 400}
"""Rollouts of which nobody would have thought that they are so long."""


@dataclass
class Asked:
    """One call: which rollout, where, and what it may sample."""

    row: str
    number: int
    attempt: int
    engine: int
    limit: int | None


class Four:
    """Four engines that answer as long as ``LENGTHS`` says, once the gate is open for what they are asked for."""

    def __init__(self, stack: ExitStack) -> None:
        self.asked: list[Asked] = []
        self.is_open: Callable[[Asked], bool] = lambda _: True
        self.engines: list[ThreadedEngine] = [
            stack.enter_context(ScriptedEngine(self._script(index)).in_thread()) for index in range(4)
        ]

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self.engines]

    @property
    def in_flight(self) -> list[int]:
        return [engine.in_flight for engine in self.engines]

    def of(self, *, probes: bool) -> list[Asked]:
        return [asked for asked in self.asked if (asked.number == 0) is probes]

    def _script(self, index: int) -> Callable[[ScriptedCall], Any]:
        async def answer(call: ScriptedCall) -> Reply:
            found = re.search(r"-(\d{4})-(\d\d)-", call.rid or "")
            assert found, call.rid
            asked = Asked(call.prompt, int(found[1]), int(found[2]), index, call.limit)
            self.asked.append(asked)
            while not self.is_open(asked):  # noqa: ASYNC110 - another thread opens it
                await asyncio.sleep(0.005)
            length = SURPRISES.get((asked.row, asked.number), LENGTHS[asked.row])
            # Rewards go by the parity of the bytes: they differ within each group.
            return Reply(text="b" * (length - 1) + "ab"[asked.number % 2])

        return answer


@pytest.fixture
def four() -> Iterator[Four]:
    with ExitStack() as stack:
        yield Four(stack)


Start = Callable[..., NativeRun]


@pytest.fixture
def start(server: ServerProcess, four: Four, make_payload: Callable[..., Json]) -> Start:
    def start(scheduler: Json | None = None, **changes: Any) -> NativeRun:
        given = {"policy": "probe", "window": NUM_ROWS, "heavy": [four.urls[HEAVY]], **(scheduler or {})}
        numbers = {"num_process": str(NUM_PROCESS), "num_repeat_per_sample": str(GROUP_SIZE), "max_tokens": MAX_TOKENS}
        payload = make_payload(",".join(four.urls), numbered_rows(NUM_ROWS), sampling_params={}, **numbers)
        return server.start_run(group_size=GROUP_SIZE, **payload, scheduler=given, **changes)

    return start


def reach_the_barrier(run: NativeRun, four: Four) -> None:
    """Every probe is there, but one that its engine holds back."""
    four.is_open = lambda _: False
    poll_until(lambda: len(four.asked) >= NUM_ROWS)  # before one is answered: then all engines have as many
    four.is_open = lambda asked: asked.number == 0 and asked.row != HELD
    poll_until(lambda: run.view()["samples"].get("member") == NUM_ROWS - 1)


def read_all(run: NativeRun) -> list[Json]:
    """Every batch of a run, each of whole groups."""
    rows: list[Json] = []
    while len(rows) < NUM_ROWS * GROUP_SIZE:
        batch = run.take(num_groups=1, wait_s=20)["data"]
        sizes = Counter(row["instance_id"] for row in batch)
        assert set(sizes.values()) == {GROUP_SIZE}, sizes
        rows += batch
    assert {(row["instance_id"], row["slot"]) for row in rows} == {
        (name, slot) for name in LENGTHS for slot in range(GROUP_SIZE)
    }
    return rows


def test_probes_come_first_then_long_groups_at_heavy_engines_and_the_others_in_place(start: Start, four: Four) -> None:
    run = start()
    reach_the_barrier(run, four)
    assert len(four.asked) == NUM_ROWS
    assert {(asked.number, asked.limit) for asked in four.asked} == {(0, MAX_TOKENS)}
    assert sorted(Counter(asked.engine for asked in four.asked).values()) == [2, 2, 3, 3]
    assert run.read(num_groups=1)["data"] == []
    assert not run.client.post("/get_rollout_data", json={}).json()["success"]
    four.is_open = lambda asked: asked.number == 0
    fast = [index for index in range(4) if index != HEAVY]
    # Eight groups are not long: one of the three fast engines has three or more, so more rollouts than it may run.
    poll_until(lambda: max(four.in_flight[index] for index in fast) >= 2 * SHARE)
    poll_until(lambda: four.in_flight[HEAVY] >= SHARE)
    four.is_open = lambda _: True
    rows = read_all(run)
    view = run.wait_for_state("finished")
    first, again = (
        [asked for asked in four.of(probes=False) if bool(asked.attempt) is is_again] for is_again in (False, True)
    )
    assert {(asked.engine, asked.limit) for asked in first if asked.row in LONG} == {(HEAVY, MAX_TOKENS)}
    assert {asked.limit for asked in first if asked.row not in LONG} == {CAP}
    assert {asked.engine for asked in first if asked.row not in LONG} == set(fast)
    check_in_place(four, first)
    assert sorted((asked.row, asked.number, asked.engine, asked.limit) for asked in again) == [
        (row, number, HEAVY, MAX_TOKENS) for row, number in sorted(SURPRISES)
    ]
    lengths = {(row["instance_id"], row["slot"]): len(row["messages"][-1]["content"]) for row in rows}
    assert all(lengths[slot] == length for slot, length in SURPRISES.items())
    most = [engine.engine.max_in_flight for engine in four.engines]
    assert max(most[index] for index in fast) == 2 * SHARE
    assert most[HEAVY] == SHARE
    assert (view["counts"]["rollouts_broken"], view["counts"]["tokens_broken"]) == (
        len(SURPRISES),
        CAP * len(SURPRISES),
    )
    assert view["counts"].get("rollouts_failed", 0) == 0


def check_in_place(four: Four, rest: list[Asked]) -> None:
    """Groups stay where their probe ran, or go from a heavy engine to one fast one."""
    probed_at = {asked.row: asked.engine for asked in four.of(probes=True)}
    engines = defaultdict(set)
    for asked in rest:
        engines[asked.row].add(asked.engine)
    for row, found in engines.items():
        assert len(found) == 1
        assert row in LONG or probed_at[row] == HEAVY or found == {probed_at[row]}, row


@pytest.mark.soak
def test_without_more_concurrency_and_cap_it_is_a_static_split(start: Start, four: Four) -> None:
    run = start({"cap": "none", "fast_concurrency": 1})
    read_all(run)
    run.wait_for_state("finished")
    assert {asked.limit for asked in four.asked} == {MAX_TOKENS}
    assert max(engine.engine.max_in_flight for engine in four.engines) <= SHARE
    assert len(four.asked) == NUM_ROWS * GROUP_SIZE


def num_recorded(run: NativeRun) -> int:
    """Rollouts in the run's trace."""
    return run.client.get(f"{run.path}/trace").text.count('{"kind":"rollout"')


def kill_run_process(server: ServerProcess) -> None:
    run_process_of(server).kill()


def kill_server(server: ServerProcess) -> None:
    server.kill9()
    server.restart()


@pytest.mark.soak
@pytest.mark.parametrize("kill", [kill_run_process, kill_server])
def test_no_probe_that_is_there_is_generated_again_after_a_kill_at_the_barrier(
    server: ServerProcess, start: Start, four: Four, kill: Callable[[ServerProcess], None]
) -> None:
    run = start()
    reach_the_barrier(run, four)
    poll_until(lambda: num_recorded(run) == NUM_ROWS - 1)  # every half second
    kill(server)
    poll_until(lambda: len(four.asked) > NUM_ROWS)
    assert [(asked.row, asked.number) for asked in four.asked[NUM_ROWS:]] == [(HELD, 0)]
    assert run.read(num_groups=1)["data"] == []
    four.is_open = lambda _: True
    read_all(run)
    run.wait_for_state("finished")
    probes = Counter(asked.row for asked in four.of(probes=True))
    assert probes == dict.fromkeys(LENGTHS, 1) | {HELD: 2}
    # How long the others were is known from the run's trace.
    first = [asked for asked in four.of(probes=False) if not asked.attempt]
    assert {asked.row for asked in first if asked.limit == MAX_TOKENS} == LONG
    assert {asked.limit for asked in first if asked.row not in LONG} == {CAP}


@pytest.mark.soak
def test_a_barrier_longer_than_the_time_out_of_groups_closes_none(start: Start, four: Four) -> None:
    limit_s = 1.0
    run = start(group_timeout_seconds=limit_s)
    reach_the_barrier(run, four)
    assert run.read(num_groups=1, wait_s=4 * limit_s)["data"] == []
    four.is_open = lambda _: True
    read_all(run)
    view = run.wait_for_state("finished")
    assert view["discarded"] == {}


def test_a_buffer_without_room_for_a_window_of_probes_does_not_stop_the_run(start: Start) -> None:
    run = start(max_buffer_size=4)
    read_all(run)
    run.wait_for_state("finished")
