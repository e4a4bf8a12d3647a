"""What becomes of a run that waits for its trainer when something is killed: it is held again, and loses nothing."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.engines import GatedScript, scripted
from tests.e2e.payloads import GROUP_SIZE, numbered_rows
from tests.e2e.reading import run_process_of
from tests.kit import Json, NativeRun, ServerProcess, poll_until

NUM_ROWS = 3


def kill_run_process(server: ServerProcess) -> None:
    run_process_of(server).kill()


def kill_server(server: ServerProcess) -> None:
    server.kill9()
    server.restart()


def num_holds(run: NativeRun) -> int:
    """How often its processes have said that they are held."""
    lines: list[str] = run.client.get(f"{run.path}/log").json()["lines"]
    return sum("paused: the step has" in line for line in lines)


def num_full(run: NativeRun) -> int:
    return sum(group["num_samples"] == GROUP_SIZE for group in run.groups())


@pytest.mark.soak
def test_a_run_killed_while_it_is_held_is_held_again_and_then_goes_on(
    server: ServerProcess, make_payload: Callable[..., Json]
) -> None:
    rows: list[Any] = []
    with scripted(GatedScript()) as engine:
        payload = make_payload(engine.url, numbered_rows(NUM_ROWS), oversampling={"groups_per_step": 1})
        run = server.start_run(group_size=GROUP_SIZE, **payload)
        poll_until(lambda: num_holds(run) == 1)
        num_told = poll_until(lambda: run.view()["counts"].get("steps_held"))
        for number, kill in enumerate([kill_run_process, kill_server], 1):
            kill(server)
            engine.wait_in_flight(0, timeout_s=60)
            num_calls = len(engine.calls)
            poll_until(lambda number=number: num_holds(run) == 1 + number)  # type: ignore[misc]
            assert len(engine.calls) == num_calls
        for version in range(NUM_ROWS):
            batch = run.take(num_groups=1, wait_s=20)
            assert num_full(run) == version + 1
            rows += batch["data"]
            run.client.put(f"{run.path}/weight_version", json={"weight_version": version})
        view = run.wait_for_state("finished")
    held = {(row["instance_id"], row["slot"]) for row in rows}
    assert held == {(f"row-{row}", slot) for row in range(NUM_ROWS) for slot in range(GROUP_SIZE)}
    assert len(rows) == len(held)
    assert view["counts"]["steps_held"] > num_told
    assert view["counts"]["rollouts_finished"] >= len(rows)
