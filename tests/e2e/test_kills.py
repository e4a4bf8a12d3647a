"""What is generated again after something was killed in the middle of a run: the missing slots and nothing else."""

from collections.abc import Iterator

import pytest

from forebay.core.ids import run_rid_prefix
from forebay.engines.scripted import ThreadedEngine
from tests.e2e.engines import GatedScript, scripted
from tests.e2e.payloads import GROUP_SIZE, numbered_rows
from tests.e2e.reading import Reader, check_account, run_process_of, start_as_slime
from tests.kit import ServerProcess, SlimeRun, poll_until

NUM_ROWS = 10
BUDGET = 3 * GROUP_SIZE + 5
NUM_PROCESS = 16
LIMIT_S = 180.0


@pytest.fixture
def script() -> GatedScript:
    return GatedScript(BUDGET)


@pytest.fixture
def engine(script: GatedScript) -> Iterator[ThreadedEngine]:
    with scripted(script) as engine:
        yield engine


def run_into_the_gate(server: ServerProcess, engine: ThreadedEngine, make_payload) -> SlimeRun:
    """A run whose engine has given all the answers that it gives for now, and the buffer has them all."""
    payload = make_payload(engine.url, numbered_rows(NUM_ROWS), num_process=str(NUM_PROCESS))
    run = start_as_slime(server, payload)
    poll_until(lambda: run.view()["samples"].get("member") == BUDGET)
    engine.wait_in_flight(NUM_PROCESS, timeout_s=60)
    assert len(engine.calls) == BUDGET + NUM_PROCESS
    return run


def finish(run: SlimeRun, script: GatedScript) -> None:
    """Let the engine answer, read to the end, and check that each slot was answered for once."""
    script.allow()
    reader = Reader(run.server)
    reader.read_to_the_end(LIMIT_S)
    view = check_account(run, reader, NUM_ROWS)
    assert view["groups"]["acked"] == NUM_ROWS
    assert script.answered == {f"row-{n}": GROUP_SIZE for n in range(NUM_ROWS)}
    assert reader.delivered == script.answered
    for instance_id in reader.delivered:
        slots = [row["slot"] for row in reader.rows if row["instance_id"] == instance_id]
        assert sorted(slots) == list(range(GROUP_SIZE))


@pytest.mark.soak
def test_a_killed_run_process_leaves_only_its_missing_slots_to_the_next(
    server: ServerProcess, engine: ThreadedEngine, script: GatedScript, make_payload
) -> None:
    run = run_into_the_gate(server, engine, make_payload)
    first = run_process_of(server)
    first.kill()
    engine.wait_in_flight(0, timeout_s=60)
    engine.wait_calls(BUDGET + 2 * NUM_PROCESS, timeout_s=60)
    assert run_rid_prefix(run.run_id) in engine.aborts
    assert run_process_of(server).pid != first.pid
    finish(run, script)
    asked_in_vain = NUM_PROCESS
    assert len(engine.calls) == NUM_ROWS * GROUP_SIZE + asked_in_vain


def test_a_killed_server_goes_on_with_the_missing_slots(
    server: ServerProcess, engine: ThreadedEngine, script: GatedScript, make_payload
) -> None:
    run = run_into_the_gate(server, engine, make_payload)
    server.kill9()
    engine.wait_in_flight(0, timeout_s=60)
    server.restart()
    engine.wait_calls(BUDGET + 2 * NUM_PROCESS, timeout_s=60)
    finish(run, script)
    asked_in_vain = NUM_PROCESS
    assert len(engine.calls) == NUM_ROWS * GROUP_SIZE + asked_in_vain


@pytest.mark.soak
def test_groups_read_before_the_server_was_killed_are_neither_made_nor_sent_again(
    server: ServerProcess, engine: ThreadedEngine, script: GatedScript, make_payload
) -> None:
    run = run_into_the_gate(server, engine, make_payload)
    before = Reader(server)
    poll_until(lambda: before.poll() and before.rows)
    poll_until(lambda: run.view()["groups"]["acked"])
    # The journal has one order: what was written before an acknowledged write is on the disk as well.
    server.start_run()
    server.kill9()
    server.restart()
    after = Reader(server)
    script.allow()
    after.read_to_the_end(LIMIT_S)
    assert not before.delivered.keys() & after.delivered.keys()
    assert before.delivered + after.delivered == dict.fromkeys(script.answered, GROUP_SIZE)
    assert run.view()["groups"]["acked"] == NUM_ROWS
    assert script.answered == {f"row-{n}": GROUP_SIZE for n in range(NUM_ROWS)}
