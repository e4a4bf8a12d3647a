"""A full buffer: generation waits until the trainer has read, and nothing is lost, failed or timed out by it."""

import re
from typing import Any

import httpx
import pytest

from forebay.engines.scripted import Reply, ScriptedCall, ThreadedEngine
from tests.e2e.conftest import GROUP_SIZE, numbered_rows
from tests.e2e.engines import GatedScript, scripted
from tests.e2e.reading import Reader, check_account, start_as_slime
from tests.kit import ServerProcess, SlimeRun, poll_until

NUM_ROWS = 8
ROOM = 2 * GROUP_SIZE
LIMIT_S = 60.0


def start_small(server: ServerProcess, engine: ThreadedEngine, make_payload: Any, **changes: Any) -> SlimeRun:
    payload = make_payload(engine.url, numbered_rows(NUM_ROWS), num_process=str(GROUP_SIZE), max_buffer_size=ROOM)
    return start_as_slime(server, payload | changes)


def refusal_of_another_group(run: SlimeRun) -> httpx.Response | None:
    """What the run process is answered that announces a group now; None as long as it is let in."""
    lines = run.client.get(f"{run.path}/log", params={"lines": 10_000}).json()["lines"]
    (url,) = {found[1] for line in lines if (found := re.match(r"buffer: (\S+)$", line))}
    reply = run.client.post(f"{url}/progress", json={"opened": [["row-7", 0]]})
    return reply if reply.is_error else None


def test_generation_waits_for_room_and_goes_on_when_there_is_some(server: ServerProcess, make_payload: Any) -> None:
    script = GatedScript()
    with scripted(script) as engine:
        run = start_small(server, engine, make_payload)
        poll_until(lambda: run.view()["samples"]["buffered"] >= ROOM)
        refused = poll_until(lambda: refusal_of_another_group(run))
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) > 0
        engine.wait_in_flight(0)
        # Two groups fill the buffer; the third may have been let in before their last samples were there.
        poll_until(lambda: run.view()["samples"]["buffered"] == script.num_answered)
        assert ROOM <= script.num_answered <= ROOM + GROUP_SIZE
        reader = Reader(server)
        reader.read_to_the_end(LIMIT_S)
    view = check_account(run, reader, NUM_ROWS)
    assert view["groups"]["acked"] == NUM_ROWS
    assert script.answered == {f"row-{n}": GROUP_SIZE for n in range(NUM_ROWS)}


class OutageWhileFull(GatedScript):
    """Its last open answer comes once the gate is open, and is that of an engine which goes away."""

    def __init__(self) -> None:
        super().__init__(ROOM - 1)

    async def __call__(self, call: ScriptedCall) -> Reply:
        reply = await super().__call__(call)
        return reply
