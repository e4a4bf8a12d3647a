"""What the server records of groups, reads, weights and processes, read back over its own route."""

import asyncio
import os
import signal
import threading
import time

import httpx
import pytest

from forebay.telemetry.tracing.records import (
    BatchChange,
    GroupChange,
    LoopStall,
    ProcessChange,
    Read,
    SharedEngines,
    Span,
    Weights,
)
from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, ServerProcess, make_group, make_sample, poll_until, write_generator
from tests.server.trace_kit import first, of_kind, trace_lines
from tests.server.worker_kit import Worker

HOOKED = """
import threading, time
TASK_TYPE = "hooked"
def run_rollout(data):
    threading.Event().wait()
def is_valid_group(group_data, min_valid_group_size, task_type="x"):
    time.sleep(0.3)
    return len(group_data[1]) >= 2
"""
CRASHES = """
import os
TASK_TYPE = "crashes"
def run_rollout(data):
    os._exit(3)
"""


def now_ns() -> int:
    return time.time_ns()


def test_runs_that_use_the_same_engine_are_recorded_in_each_of_them(server: ServerProcess) -> None:
    engine, other = "http://127.0.0.1:9", "http://127.0.0.1:10"
    one = server.start_run(remote_engine_url=f"http://user:canary@127.0.0.1:9/v1,{other}")
    alone = server.start_run(remote_engine_url="http://127.0.0.1:11")
    one.wait_for_state("running")
    assert [(each.engines, each.runs) for each in of_kind(one, SharedEngines)] == [([], [])]
    two = server.start_run(remote_engine_url=engine)
    shared = poll_until(lambda: of_kind(one, SharedEngines)[1:])
    assert [(each.engines, each.runs) for each in shared] == [([engine], [two.run_id])]
    assert [(each.engines, each.runs) for each in of_kind(two, SharedEngines)] == [([engine], [one.run_id])]
    server.client.post(f"{two.path}/stop").raise_for_status()
    last = poll_until(lambda: of_kind(one, SharedEngines)[2:])
    assert [(each.engines, each.runs) for each in last] == [([], [])]
    assert len(of_kind(two, SharedEngines)) == 2
    assert not any(each.engines for each in of_kind(alone, SharedEngines))


def test_a_group_is_recorded_in_each_of_its_states(server: ServerProcess) -> None:
    run = server.start_run(group_size=2)
    began = now_ns()
    run.write(*make_group("a", [0.0, 1.0]))
    batch = run.take(num_groups=1, step=7)
    changes = of_kind(run, GroupChange)
    assert [change.state for change in changes] == ["open", "ready", "leased", "acked"]
    [group_id] = {change.group for change in changes}
    assert group_id == run.groups()[0]["group_id"]
    assert changes[1].last == "a/1"
    assert [change.batch for change in changes] == ["", "", batch["batch_id"], batch["batch_id"]]
    assert began <= changes[0].t <= changes[1].t <= changes[1].judged <= changes[2].t <= changes[3].t <= now_ns()
    assert of_kind(run, BatchChange)[0].state == "acked"


def test_a_group_is_ready_when_its_last_sample_came_however_late_it_is_asked_for(server: ServerProcess) -> None:
    run = server.start_run(group_size=2)
    run.write(*make_group("a", [0.0, 1.0]))
    written = now_ns()
    asked = poll_until(lambda: now_ns() if now_ns() > written + 300_000_000 else 0)
    run.read(num_groups=1)
    ready, read = first(run, GroupChange, state="ready"), first(run, Read)
    assert ready.t <= written
    assert ready.judged >= asked
    assert read.t >= asked
    assert read.by == ""
    assert read.satisfied == read.t


def test_a_discarded_group_says_why(server: ServerProcess) -> None:
    run = server.start_run(group_size=2)
    run.write(*make_group("same", [1.0, 1.0]))
    run.read(num_groups=1)
    assert first(run, GroupChange, state="discarded").reason == "invalid"


def test_a_salvaged_group_is_ready_when_its_time_is_up(server: ServerProcess) -> None:
    run = server.start_run(group_size=4, group_timeout_seconds=1, min_timeout_group_size_ratio=0.5)
    began = now_ns()
    run.write(*make_group("a", [0.0, 1.0, 0.5]))
    run.closed(1)
    ready = first(run, GroupChange, state="ready")
    assert ready.reason == "salvaged"
    assert ready.t - began > 900_000_000


def test_a_read_is_recorded_with_the_group_that_it_waited_for(server: ServerProcess) -> None:
    run = server.start_run(group_size=2)
    run.write(*make_group("early", [0.0, 1.0]))
    run.client.put(f"{run.path}/weight_version", json={"weight_version": 3})
    reply: list[dict[str, object]] = []
    reader = threading.Thread(target=lambda: reply.append(run.read(num_groups=2, wait_s=20, step=7)))
    reader.start()
    poll_until(lambda: of_kind(run, GroupChange, state="ready"))
    run.write(make_sample(uid="late/0", instance_id="late", reward=0.0))
    run.write(make_sample(uid="late/1", instance_id="late", reward=1.0))
    reader.join()
    read = first(run, Read)
    ready = {change.group: change for change in of_kind(run, GroupChange, state="ready")}
    late = next(change for change in ready.values() if change.last == "late/1")
    assert read.by == late.group
    assert read.satisfied == late.t
    assert read.t < read.satisfied <= read.judged <= read.first_byte <= read.sent
    assert (read.step, read.weights, read.num_rows, read.num_polls) == (7, 3, 4, 1)
    assert set(read.groups) == set(ready)
    assert read.batch == reply[0]["batch_id"]
    assert read.num_bytes > 100
    assert read.worst == ""


def test_polls_in_vain_are_one_wait_with_the_one_that_brings_groups(server: ServerProcess) -> None:
    run = server.start_slime("polling", group_size=2)
    began = now_ns()
    for _ in range(3):
        assert run.fetch(batch_size=2)["success"] is False
    first_answered = now_ns()
    run.send(make_sample(uid="u0", instance_id="a", reward=0.0))
    run.send(make_sample(uid="u1", instance_id="a", reward=1.0))
    assert run.fetch(batch_size=2)["success"] is True
    [read] = of_kind(run, Read)
    assert read.num_polls == 4
    assert began <= read.t < first_answered
    ready = first(run, GroupChange, state="ready")
    assert read.by == ready.group
    assert read.satisfied == ready.t > first_answered
    assert read.satisfied <= read.last_asked <= read.judged
    assert read.t < read.satisfied <= read.judged <= read.first_byte <= read.sent
    first(run, BatchChange, state="acked", batch=read.batch)


def test_long_polls_that_run_out_are_of_the_same_wait(server: ServerProcess) -> None:
    run = server.start_run(group_size=2)
    assert run.read(num_groups=1, wait_s=0.1)["batch_id"] is None
    run.write(*make_group("a", [0.0, 1.0]))
    run.read(num_groups=1, wait_s=5)
    [read] = of_kind(run, Read)
    assert read.num_polls == 2
    assert read.by == first(run, GroupChange, state="ready").group


def test_a_client_that_goes_away_leaves_a_read_without_a_last_byte(server: ServerProcess) -> None:
    run = server.start_run(group_size=2)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{server.url}{run.path}/batches", json={"num_groups": 1, "wait_s": 20}, timeout=httpx.Timeout(30, read=0.3)
        )
    read = first(run, Read)
    assert (read.sent, read.satisfied, read.worst) == (0, 0, "client_gone")


def test_batches_that_come_back_are_recorded(server: ServerProcess) -> None:
    run = server.start_run(group_size=2)
    run.write(*make_group("a", [0.0, 1.0]))
    released = run.read(num_groups=1)
    run.release(released)
    expired = run.read(num_groups=1, lease_s=1)
    assert first(run, BatchChange, batch=expired["batch_id"]).state == "expired"
    kept = run.take(num_groups=1)
    run.checkpoint(5, kept)
    run.rewind(None)
    by_batch = [(change.batch, change.state, change.checkpoint) for change in of_kind(run, BatchChange)]
    assert by_batch == [
        (released["batch_id"], "released", None),
        (expired["batch_id"], "expired", None),
        (kept["batch_id"], "acked", None),
        (kept["batch_id"], "checkpoint", 5),
        (expired["batch_id"], "revoked", None),
        (kept["batch_id"], "revoked", None),
    ]
    ready = of_kind(run, GroupChange, state="ready")
    assert [change.batch for change in ready] == ["", released["batch_id"], expired["batch_id"], kept["batch_id"]]


def test_hooks_of_a_user_are_timed(make_server: MakeServer) -> None:
    server = make_server()
    write_generator(server.generators, HOOKED, "hooked_generator.py")
    run = server.start_run("hooked", group_size=2)
    run.wait_for_state("running")
    run.write(*make_group("a", [0.0, 1.0]))
    run.read(num_groups=1, wait_s=20)
    spans = of_kind(run, Span, name="hooks")
    [judged] = [span for span in spans if span.at["stage"] == "judge"]
    assert judged.d >= 300_000_000
    assert judged.group == run.groups()[0]["group_id"]
    read = first(run, Read)
    assert read.judged - read.satisfied >= judged.d


def test_built_in_hooks_are_not(server: ServerProcess) -> None:
    run = server.start_run(group_size=2)
    run.write(*make_group("a", [0.0, 1.0]))
    run.take(num_groups=1)
    assert first(run, Read).num_rows == 2
    assert of_kind(run, Span, name="hooks") == []


@pytest.mark.parametrize(("of_server", "of_run"), [({}, {"trace_rate": 0}), ({"max_trace_bytes": 0}, {})])
def test_spans_are_recorded_as_run_and_server_say(make_server: MakeServer, of_server: Json, of_run: Json) -> None:
    server = make_server(**of_server)
    write_generator(server.generators, HOOKED, "hooked_generator.py")
    run = server.start_run("hooked", group_size=2, **of_run)
    run.wait_for_state("running")
    run.write(*make_group("a", [0.0, 1.0]))
    run.read(num_groups=1, wait_s=20)
    assert [change.state for change in of_kind(run, GroupChange)] == ["open", "ready", "leased"]
    assert of_kind(run, Span, name="hooks") == []


def test_announcements_of_weights_are_recorded(server: ServerProcess) -> None:
    run = server.start_run(group_size=2)
    for version in (1, 2):
        run.client.put(f"{run.path}/weight_version", json={"weight_version": version}).raise_for_status()
    assert [(each.what, each.version) for each in of_kind(run, Weights)] == [("announced", 1), ("announced", 2)]


async def test_pauses_of_the_engines_are_recorded(server: ServerProcess) -> None:
    async with Worker().serving() as worker, httpx.AsyncClient(base_url=server.url, timeout=30) as http:
        run = await asyncio.to_thread(server.start_run, group_size=2, remote_engine_url=worker.url)
        (await http.post(f"{run.path}/engines/pause", json={"mode": "retract"})).raise_for_status()
        (await http.post(f"{run.path}/engines/continue", json={"weight_version": 4})).raise_for_status()
        whats = await asyncio.to_thread(lambda: poll_until(lambda: _resumed(run)))
        await asyncio.to_thread(run.stop)
    assert whats == [("paused", None), ("announced", 4), ("resumed", None)]


def _resumed(run: NativeRun) -> list[tuple[str, int | None]]:
    whats = [(each.what, each.version) for each in of_kind(run, Weights)]
    return whats if ("resumed", None) in whats else []


def test_a_server_that_stands_still_says_so_in_the_traces_of_its_runs(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run(group_size=2)
    run.wait_for_state("running")
    before = now_ns()
    os.kill(server.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    poll_until(lambda: time.monotonic() - stopped > 1.6)
    os.kill(server.pid, signal.SIGCONT)
    stalls = poll_until(
        lambda: [each for each in of_kind(run, LoopStall, has_ended=True) if each.t + each.d > before + 1_500_000_000]
    )
    assert 1_400_000_000 <= stalls[0].d <= now_ns() - before + 200_000_000


def test_no_prompt_reply_or_key_is_in_the_trace(server: ServerProcess) -> None:
    run = server.start_run(group_size=2, api_key="canary-key")
    said = [{"role": "user", "content": "canary-prompt"}, {"role": "assistant", "content": "canary-reply"}]
    run.write(*make_group("a", [0.0, 1.0], messages=said, extra_info={"note": "canary-extra"}))
    run.take(num_groups=1)
    assert of_kind(run, Read)
    assert b"canary" not in b"\n".join(trace_lines(run))


def test_what_becomes_of_a_runs_process_is_recorded(make_server: MakeServer) -> None:
    server = make_server(max_restarts=1)
    write_generator(server.generators, CRASHES, "crashes_generator.py")
    run = server.start_run("crashes", group_size=2)
    run.wait_for_state("failed")
    whats = [each.what for each in of_kind(run, ProcessChange, process="run")]
    assert whats == ["started", "failed", "restarted", "failed"]
    idle = server.start_run(group_size=2)
    idle.wait_for_state("running")
    idle.stop()
    assert [each.what for each in of_kind(idle, ProcessChange, process="run")] == ["started", "ended"]
