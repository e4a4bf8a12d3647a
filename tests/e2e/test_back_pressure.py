"""A full buffer: generation waits until the trainer has read, and nothing is lost, failed or timed out by it."""

import re
from typing import Any

import httpx
import pytest

from tests.e2e.engines import GatedScript, scripted
from tests.e2e.payloads import GROUP_SIZE, numbered_rows
from tests.e2e.reading import Reader, check_account, start_as_slime
from tests.kit import ServerProcess, SlimeRun, poll_until

NUM_ROWS = 4
ROWS = numbered_rows(NUM_ROWS)
LIMIT_S = 180.0


def refusal_of_another_group(run: SlimeRun) -> httpx.Response | None:
    """What the run process is answered that announces a group now; None as long as it is let in."""
    lines = run.client.get(f"{run.path}/log", params={"lines": 10_000}).json()["lines"]
    (url,) = {found[1] for line in lines if (found := re.match(r"buffer: (\S+)$", line))}
    reply = run.client.post(f"{url}/progress", json={"opened": [["another", 0]]})
    return reply if reply.is_error else None


@pytest.mark.soak
def test_generation_waits_for_room_and_goes_on_when_there_is_some(server: ServerProcess, make_payload: Any) -> None:
    script = GatedScript()
    with scripted(script) as engine:
        payload = make_payload(engine.url, ROWS, num_process=str(GROUP_SIZE), max_buffer_size=2 * GROUP_SIZE)
        run = start_as_slime(server, payload)
        poll_until(lambda: run.view()["samples"]["buffered"] >= 2 * GROUP_SIZE)
        refused = poll_until(lambda: refusal_of_another_group(run))
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) > 0
        engine.wait_in_flight(0)
        # Two groups fill the buffer; the third may have been let in before their last samples were there.
        poll_until(lambda: run.view()["samples"]["buffered"] == script.answered.total())
        assert 2 * GROUP_SIZE <= script.answered.total() <= 3 * GROUP_SIZE
        reader = Reader(server)
        reader.read_to_the_end(LIMIT_S)
    view = check_account(run, reader, NUM_ROWS)
    assert view["groups"]["acked"] == NUM_ROWS
    assert script.answered == {f"row-{n}": GROUP_SIZE for n in range(NUM_ROWS)}


@pytest.mark.soak
def test_an_outage_is_told_while_there_is_no_room(server: ServerProcess, make_payload: Any) -> None:
    script = GatedScript(0)
    with scripted(script) as engine:
        payload = make_payload(engine.url, ROWS, num_process=str(12), max_buffer_size=4)
        run = start_as_slime(server, payload)
        # The first group and half of the second are asked for, and nothing is answered.
        engine.wait_in_flight(12, timeout_s=60)
        script.allow(4)
        poll_until(lambda: run.view()["samples"]["buffered"] == 4)
        engine.wait_in_flight(12)
        # The place that is free now could only go to a third group, for which there is no room.
        script.allow(1)
        engine.wait_in_flight(11)
        engine.engine.available = False
        script.is_down = True
        script.allow()
        poll_until(lambda: run.view()["is_waiting_for_engine"])
        assert run.view()["groups"]["open"] == 2
        script.is_down = False
        engine.engine.available = True
        poll_until(lambda: not run.view()["is_waiting_for_engine"])
        reader = Reader(server)
        reader.read_to_the_end(LIMIT_S)
    view = check_account(run, reader, NUM_ROWS)
    assert view["groups"]["acked"] == NUM_ROWS
    assert script.answered == {f"row-{n}": GROUP_SIZE for n in range(NUM_ROWS)}
