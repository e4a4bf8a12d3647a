"""What the server records of groups, reads, weights and processes, read back over its own route."""

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest

from forebay.engines.scripted import Reply, ScriptedEngine
from forebay.telemetry.tracing.records import (
    BatchChange,
    Dropped,
    GroupChange,
    Head,
    LoopStall,
    Open,
    ProcessChange,
    Read,
    RolloutSummary,
    Span,
    Weights,
)
from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, ServerProcess, assert_error, make_group, make_sample, poll_until, write_generator
from tests.server.trace_kit import first, of_kind, records, trace_lines
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
SPANS = """
from forebay.telemetry import span
TASK_TYPE = "spans"
def run_rollout(data):
    with span("parse", bytes=3):
        pass
"""
CRASHES = """
import os
TASK_TYPE = "crashes"
def run_rollout(data):
    os._exit(3)
"""


def now_ns() -> int:
    return time.time_ns()


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


def starts_of(run: NativeRun) -> set[tuple[str, int]]:
    """Which processes have written files, for which start of the run."""
    return {(each.process, each.start) for each in records(run) if isinstance(each, Head)}


def test_each_start_and_each_process_of_a_run_has_files_of_its_own(make_server: MakeServer) -> None:
    server = make_server()
    write_generator(server.generators, SPANS, "spans_generator.py")
    run = server.start_run("spans", group_size=2)
    first_span = first(run, Span, name="parse")
    assert first_span.at == {"bytes": 3}
    poll_until(lambda: run.view()["state"] == "finished")
    server.kill9()
    server.restart()
    server.start_run("spans", group_size=2, run_id=run.run_id)
    poll_until(lambda: len(of_kind(run, Span, name="parse")) >= 2 and ("run", 2) in starts_of(run))
    run.client.put(f"{run.path}/weight_version", json={"weight_version": 1}).raise_for_status()
    poll_until(lambda: ("server", 2) in starts_of(run))
    assert starts_of(run) == {("run", 1), ("run", 2), ("server", 1), ("server", 2)}
    ids = [span.id for span in of_kind(run, Span)]
    assert len(set(ids)) == len(ids)


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


def test_the_budget_takes_the_oldest_spans_and_counts_them(make_server: MakeServer) -> None:
    server = make_server(max_trace_bytes=300_000)
    run = server.start_run(group_size=2)
    run.wait_for_state("running")
    assert trace_lines(run)
    path = server.data_dir / "runs" / run.run_id / "trace" / "run-1-99999.1.jsonl"
    span = msgspec.json.encode(Span(name="engine", t=1, d=1, id="0" * 16, at={"text": "x" * 100}))
    head = msgspec.json.encode(_head(run.run_id))
    path.write_bytes(b"\n".join([head, *[span] * 3_000, summary_line(engine=1)]))
    assert path.stat().st_size > 500_000
    poll_until(lambda: path.stat().st_size < 10_000)
    assert len(of_kind(run, RolloutSummary)) == 1
    assert of_kind(run, Dropped)[0].spans == 3_000
    poll_until(lambda: run.view()["trace"]["dropped"]["spans"] == 3_000)
    assert metric(server, 'forebay_trace_dropped_total{what="spans"}') == 3_000


def _head(run_id: str) -> Head:
    return Head(version=1, run_id=run_id, process="run", start=1, pid=99_999, wall_ns=1, mono_ns=1)


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


def test_the_route_gives_every_file_with_its_head_in_front(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run(group_size=2)
    run.wait_for_state("running")
    run.write(*make_group("a", [0.0, 1.0]))
    assert of_kind(run, GroupChange)
    server.kill9()
    server.restart()
    run.wait_for_state("running")
    run.write(*make_group("b", [0.0, 1.0]))
    lines = records(run)
    heads = [place for place, each in enumerate(lines) if isinstance(each, Head)]
    assert heads[0] == 0
    servers = [each for each in lines if isinstance(each, Head) and each.process == "server"]
    assert len(servers) == 2
    assert {head.run_id for head in servers} == {run.run_id}
    assert len({head.pid for head in servers}) == 2
    files = list((server.data_dir / "runs" / run.run_id / "trace").glob("server-1-*.jsonl"))
    assert len(files) == 2


def test_the_files_are_their_owners_alone(server: ServerProcess) -> None:
    run = server.start_run(group_size=2)
    run.write(*make_group("a", [0.0, 1.0]))
    trace_lines(run)
    folder = server.data_dir / "runs" / run.run_id / "trace"
    assert folder.stat().st_mode & 0o077 == 0
    assert [path.name for path in folder.iterdir() if path.stat().st_mode & 0o077] == []


def test_an_unknown_run_has_no_trace(server: ServerProcess) -> None:
    assert_error(server.client.get("/v1/runs/run-none/trace"), 404, "run_not_found")


def test_half_a_line_is_left_out_until_its_other_half_comes(server: ServerProcess) -> None:
    run = server.start_run(group_size=2)
    run.write(*make_group("a", [0.0, 1.0]))
    trace_lines(run)
    path = server.data_dir / "runs" / run.run_id / "trace" / "run-1-99999.1.jsonl"
    path.write_bytes(b'{"kind":"process","t":1,"what":"started"}\n{"kind":"process","t":2,')
    assert len(of_kind(run, ProcessChange, t=1)) == 1
    assert b'"t":2' not in b"".join(trace_lines(run))


def test_what_was_recorded_survives_kill_9_and_ids_do_not_clash(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run(group_size=2)
    for number in range(20):
        run.write(*make_group(f"i{number}", [0.0, 1.0]))
        run.take(num_groups=1)
    assert len(of_kind(run, Read)) == 20
    server.kill9()
    server.restart()
    for number in range(20, 30):
        run.write(*make_group(f"i{number}", [0.0, 1.0]))
        run.take(num_groups=1)
    reads = of_kind(run, Read)
    assert len({read.id for read in reads}) == len(reads) == 30
    assert len(of_kind(run, GroupChange, state="acked")) == 30


@pytest.fixture
def small_runs(tmp_path: Path) -> Iterator[Path]:
    """A data directory whose ``runs/`` is a disk of its own, of a megabyte: the journal has another."""
    runs = tmp_path / "data" / "runs"
    runs.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", runs]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs privileges")
    yield runs
    subprocess.run(["umount", "-l", runs], check=True)


def fill_up(disk: Path) -> Path:
    ballast = disk / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size in (4096, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)
    return ballast


def test_a_full_disk_ends_the_trace_with_one_warning_and_costs_no_write(
    make_server: MakeServer, small_runs: Path
) -> None:
    server = make_server(data_dir=small_runs.parent)
    run = server.start_run(group_size=2)
    run.wait_for_state("running")
    run.write(*make_group("a", [0.0, 1.0]))
    assert len(of_kind(run, GroupChange, state="open")) == 1
    ballast = fill_up(small_runs)
    for number in range(200):
        verdicts = run.write(*make_group(f"b{number}", [0.0, 1.0]))
        assert [verdict["outcome"] for verdict in verdicts] == ["member", "member"]
    assert len(run.take(num_groups=200)["data"]) == 400
    poll_until(lambda: run.view()["trace"]["has_ended"])
    ballast.unlink()
    run.write(*make_group("c", [0.0, 1.0]))
    assert server.log().count(f"the trace of {run.run_id} ends here") == 1
    # What was written before is whole, and the next start is recorded again.
    assert len(of_kind(run, GroupChange, state="open")) >= 1
    server.stop()
    server.restart()
    run.write(*make_group("d", [0.0, 1.0]))
    assert run.view()["trace"]["has_ended"] is False
    assert of_kind(run, GroupChange, group=run.groups()[-1]["group_id"])


def test_metrics_tell_seconds_by_phase_and_the_oldest_open_group(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run(group_size=2)
    run.wait_for_state("running")
    folder = server.data_dir / "runs" / run.run_id / "trace"
    assert metric(server, "forebay_oldest_open_group_seconds") == 0
    run.write(make_sample(uid="a/0", instance_id="a", reward=0.0))
    poll_until(lambda: metric(server, "forebay_oldest_open_group_seconds") >= 0.3)
    path = folder / "run-1-99999.1.jsonl"
    poll_until(folder.is_dir)
    path.write_bytes(summary_line(engine=2_000_000_000, tool=500_000_000))
    assert metric(server, 'forebay_rollout_seconds_total{phase="engine"}') == 2.0
    with path.open("ab") as file:
        file.write(summary_line(engine=1_000_000_000)[:-9])
    assert metric(server, 'forebay_rollout_seconds_total{phase="engine"}') == 2.0
    with path.open("ab") as file:
        file.write(summary_line(engine=1_000_000_000)[-9:] + b'{"kind":"dropped","t":1,"spans":5,"summaries":1}\n')
    assert metric(server, 'forebay_rollout_seconds_total{phase="engine"}') == 3.0
    assert metric(server, 'forebay_rollout_seconds_total{phase="tool"}') == 0.5
    assert metric(server, 'forebay_trace_dropped_total{what="spans"}') == 5
    assert run.view()["trace"] == {"has_ended": False, "dropped": {"spans": 5, "summaries": 1}}
    server.stop()
    server.restart()
    assert metric(server, 'forebay_rollout_seconds_total{phase="engine"}') == 0


def summary_line(**phases: int) -> bytes:
    summary = RolloutSummary(t=1, d=1, id="1", uid="u", group="g", instance="i", phases=phases)
    return msgspec.json.encode(summary) + b"\n"


def metric(server: ServerProcess, name: str) -> float:
    page = server.client.get("/metrics").text
    return next((float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(f"{name} ")), 0.0)


@pytest.mark.soak
def test_a_read_that_waits_long_is_shown_as_open_after_kill_9(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run(group_size=2)
    reader = threading.Thread(target=_read_until_killed, args=(run,))
    reader.start()
    waiting = first(run, Open, name="read")
    server.kill9()
    reader.join()
    server.restart()
    assert [each.id for each in of_kind(run, Open)] == [waiting.id]
    assert of_kind(run, Read, id=waiting.id) == []


def _read_until_killed(run: NativeRun) -> None:
    with suppress(httpx.TransportError):
        httpx.post(f"{run.server.url}{run.path}/batches", json={"num_groups": 1, "wait_s": 60}, timeout=60)


@pytest.mark.soak
def test_a_run_that_has_ended_holds_no_file_open_until_something_is_recorded_again(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run(group_size=2)
    run.write(*make_group("a", [0.0, 1.0]))
    run.stop()
    batch = run.read(num_groups=1)
    assert of_kind(run, Read)
    assert len(_trace_files(server)) == 1
    poll_until(lambda: not _trace_files(server), timeout_s=60)
    run.ack(batch)
    poll_until(lambda: of_kind(run, BatchChange, state="acked"))
    assert len(_trace_files(server)) == 1


def _trace_files(server: ServerProcess) -> list[str]:
    return [file.path for file in psutil.Process(server.pid).open_files() if "/trace/" in file.path]


FOREIGN = """
import httpx
TASK_TYPE = "foreign"
def run_rollout(data):
    engine, buffer = data["remote_engine_url"], data["remote_buffer_url"]
    said = [{"role": "user", "content": "hi"}]
    body = {"model": "m", "messages": said, "max_tokens": 4}
    answer = httpx.post(f"{engine}/v1/chat/completions", json=body, timeout=60)
    message = answer.raise_for_status().json()["choices"][0]["message"]
    sample = {"uid": "u0", "instance_id": "a", "messages": [*said, message], "reward": 1.0}
    httpx.post(f"{buffer}/buffer/write", json=sample, timeout=60).raise_for_status()
"""


async def test_the_gateway_records_in_the_same_folder(make_server: MakeServer) -> None:
    server = await asyncio.to_thread(make_server)
    write_generator(server.generators, FOREIGN, "foreign_generator.py")
    async with ScriptedEngine(lambda _: Reply(text="well")) as engine:
        task = {"remote_engine_url": engine.url, "capture": True}
        run = await asyncio.to_thread(server.start_run, "foreign", group_size=2, **task)
        summary = await asyncio.to_thread(first, run, RolloutSummary)
    assert summary.group == run.groups()[0]["group_id"]
    await asyncio.to_thread(poll_until, lambda: len(starts_of(run)) >= 3)
    assert starts_of(run) == {(process, 1) for process in ("run", "server", "gateway")}
    assert metric(server, 'forebay_rollout_seconds_total{phase="write"}') > 0
