"""The files of a trace: of each process its own, whole after a kill, within a budget; what metrics tell of them."""

import asyncio
import subprocess
import threading
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
    Open,
    ProcessChange,
    Read,
    RolloutSummary,
    Span,
)
from tests.conftest import MakeServer
from tests.kit import (
    NativeRun,
    ServerProcess,
    assert_error,
    make_group,
    make_sample,
    metric,
    poll_until,
    write_generator,
)
from tests.server.trace_kit import first, of_kind, records, trace_lines

SPANS = """
from forebay.telemetry import span
TASK_TYPE = "spans"
def run_rollout(data):
    with span("parse", bytes=3):
        pass
"""


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


def test_the_budget_takes_the_oldest_spans_and_counts_them(make_server: MakeServer) -> None:
    server = make_server(max_trace_bytes=300_000)
    run = server.start_run(group_size=2)
    run.wait_for_state("running")
    assert trace_lines(run)
    path = server.data_dir / "runs" / run.run_id / "trace" / "run-1-99999.1.jsonl"
    span = msgspec.json.encode(Span(name="engine", t=1, d=1, id="0" * 16, at={"text": "x" * 100}))
    head = msgspec.json.encode(_head(run.run_id))
    written = b"\n".join([head, *[span] * 3_000, summary_line(engine=1)])
    assert len(written) > 500_000
    path.with_suffix(".draft").write_bytes(written)
    path.with_suffix(".draft").rename(path)
    poll_until(lambda: path.stat().st_size < 10_000)
    assert len(of_kind(run, RolloutSummary)) == 1
    assert of_kind(run, Dropped)[0].spans == 3_000
    poll_until(lambda: run.view()["trace"]["dropped"]["spans"] == 3_000)
    assert metric(server, 'forebay_trace_dropped_total{what="spans"}') == 3_000


def _head(run_id: str) -> Head:
    return Head(version=1, run_id=run_id, process="run", start=1, pid=99_999, wall_ns=1, mono_ns=1)


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
