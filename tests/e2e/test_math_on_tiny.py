"""The whole machine: the server, a run of the built-in math task, the embedded engine, and a reader like slime's."""

from collections.abc import Iterator

import pytest

from forebay.engines.tiny.recipe import question
from tests.e2e.engines import TinyProcess
from tests.e2e.payloads import GROUP_SIZE
from tests.e2e.reading import Reader, check_account, processes_below, run_process_of, start_as_slime
from tests.kit import ServerProcess, poll_until

NUM_ROWS = 24
LIMIT_S = 240.0
"""For what takes 10 s on an idle machine."""
SUMS = [
    {"instance_id": n, "prompt": question(n % 9 + 1, n // 9 + 1), "label": str(n % 9 + n // 9 + 2)}
    for n in range(NUM_ROWS)
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyProcess]:
    with TinyProcess(tmp_path_factory.mktemp("engine") / "engine.log") as engine:
        yield engine


def test_every_group_of_a_math_run_is_accounted_for(server: ServerProcess, engine: TinyProcess, make_payload) -> None:
    run = start_as_slime(server, make_payload(engine.url, SUMS, task_type="math"))
    monitor_and_run = poll_until(lambda: found if len(found := processes_below(server.pid)) >= 2 else [])
    reader = Reader(server)
    reader.read_to_the_end(LIMIT_S)
    view = check_account(run, reader, NUM_ROWS)
    assert view["state"] == "finished"
    assert set(view["discarded"]) <= {"invalid"}, "rewards that are all equal are the only reason to discard here"
    assert view["groups"]["acked"] > 0
    assert view["samples"]["member"] == NUM_ROWS * GROUP_SIZE
    assert reader.finished.keys() <= set(range(NUM_ROWS))
    assert set(reader.delivered) <= reader.finished.keys()
    assert max(reader.finished.values()) == 1
    assert {row["raw_reward"] for row in reader.rows} == {0.0, 1.0}
    poll_until(lambda: not processes_below(server.pid))
    assert server.stop() == 0
    assert not any(process.is_running() for process in monitor_and_run)


@pytest.mark.soak
def test_a_run_outlives_its_engine(server: ServerProcess, engine: TinyProcess, make_payload) -> None:
    run = start_as_slime(server, make_payload(engine.url, SUMS, task_type="math"))
    reader = Reader(server)
    poll_until(lambda: run.view()["samples"].get("member", 0) > 2 * GROUP_SIZE, LIMIT_S)
    engine.kill9()
    waiting = poll_until(lambda: view if (view := run.view())["is_waiting_for_engine"] else {})
    process = run_process_of(server)
    assert sum(waiting["groups"].values()) < NUM_ROWS, "the run was over before its engine was killed"
    num_closed = waiting["groups"]["acked"] + waiting["groups"]["discarded"] + waiting["groups"]["ready"]
    # A long poll lets a second pass in which nothing may happen.
    assert not server.client.get(f"{run.path}/closed_groups", params={"after": num_closed, "wait_s": 1}).json()[
        "groups"
    ]
    assert run.view()["active_s"] == waiting["active_s"], "deadlines counted while no engine answered"
    engine.start()
    poll_until(lambda: not run.view()["is_waiting_for_engine"])
    assert process.is_running(), "the run process was restarted"
    reader.read_to_the_end(LIMIT_S)
    view = check_account(run, reader, NUM_ROWS)
    assert view["samples"]["member"] == NUM_ROWS * GROUP_SIZE
    assert "failed" not in view["samples"]
    assert set(view["discarded"]) <= {"invalid"}
