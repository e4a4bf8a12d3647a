"""Runs on a real server whose calls go through the gateway: one trace, written by all of their processes."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.core.ids import group_id
from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine, ThreadedEngine
from forebay.telemetry.tracing.read_trace import decode_line, trace_files
from forebay.telemetry.tracing.records import Head, Open, Record, RolloutSummary, Span
from forebay.telemetry.tracing.trace_ids import trace_id
from tests.conftest import MakeServer
from tests.generators.agent_kit import LIMIT_S
from tests.kit import NativeRun, ServerProcess, children_with, poll_until, write_generator
from tests.lent import lend_runs, lent_url

HANGING = "hang"
PLAIN = Path(__file__).parents[1] / "slime" / "tasks" / "plain_generator.py"
TOOL = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
AGENT = """
import asyncio, json, urllib.request

from forebay.generators.agent import AgentGenerator

TASK_TYPE = "spanned"
OWN = "00f067aa0ba902b7"


async def agent(task):
    trace = task.traceparent.split("-")[1]
    for said in ("first", "second"):
        body = {"model": task.model, "messages": [{"role": "user", "content": said}]}
        headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
        headers["traceparent"] = f"00-{trace}-{OWN}-01"
        request = urllib.request.Request(f"{task.base_url}/chat/completions", json.dumps(body).encode(), headers)
        await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=60).read())
        await asyncio.sleep(0.2)


async def reward(item):
    return 1.0


def run_rollout(data):
    AgentGenerator.from_payload(data).run_agent(data["input_file"], agent, reward, 1)
"""


def script(call: ScriptedCall) -> Reply:
    calls = [TOOL] if call.prompt == "first" else []
    text = "" if calls else str(call.number)
    return Reply(text=text, tool_calls=calls, hang=call.prompt == HANGING, queue_s=0.05, prefill_s=0.05, delay_s=0.1)


@pytest.fixture(scope="module")
def engine() -> Iterator[ThreadedEngine]:
    with ScriptedEngine(script).in_thread() as engine:
        yield engine


@pytest.fixture(scope="module")
def server(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    folder = tmp_path_factory.mktemp("tasks")
    write_generator(folder, PLAIN.read_text(), PLAIN.name)
    write_generator(folder, AGENT, "spanned_generator.py")
    server = module_servers(generators=folder, start_wait_s=60)
    lend_runs(server)
    return server


def records_of(server: ServerProcess, run: NativeRun) -> list[Record]:
    """Every record of a run's trace. No line is broken, but perhaps the last of a process that was killed."""
    files = [path.read_bytes() for path in trace_files(trace_folder(server, run))]
    records = [decode_line(line) for file in files for line in file.rpartition(b"\n")[0].splitlines()]
    assert [record for record in records if isinstance(record, str)] == []
    return [record for record in records if not isinstance(record, str)]


def trace_folder(server: ServerProcess, run: NativeRun) -> Path:
    return server.data_dir / "runs" / run.run_id / "trace"


def summaries_of(server: ServerProcess, run: NativeRun, number: int) -> list[RolloutSummary]:
    """The summaries of a run, once there are so many."""

    def found() -> list[RolloutSummary]:
        records = records_of(server, run) if trace_folder(server, run).exists() else []
        return [record for record in records if isinstance(record, RolloutSummary)]

    return poll_until(lambda: summaries if len(summaries := found()) >= number else [], LIMIT_S)


def spans_of(server: ServerProcess, run: NativeRun, num_turns: int) -> list[Span]:
    """The spans of a run, once the gateway, which writes by itself, has written so many turns."""

    def found() -> list[Span]:
        spans = [record for record in records_of(server, run) if isinstance(record, Span)]
        return spans if sum(span.name == "turn" for span in spans) >= num_turns else []

    return poll_until(found)


def rows_file(folder: Path, *names: str) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps({'instance_id': name, 'prompt': name})}\n" for name in names))
    return str(path)


def test_the_calls_of_an_agent_lie_below_its_own_span_and_its_rollout_has_their_times(
    server: ServerProcess, engine: ThreadedEngine, tmp_path: Path
) -> None:
    first = len(engine.calls)
    rows = rows_file(tmp_path, "row")
    run = server.start_run("spanned", 1, input_file=rows, remote_engine_url=engine.url)
    (summary,) = summaries_of(server, run, 1)
    spans = spans_of(server, run, 2)
    turns = [span for span in spans if span.name == "turn"]
    assert [(turn.turn, turn.up, turn.uid) for turn in turns] == [
        (number, "00f067aa0ba902b7", summary.uid) for number in (0, 1)
    ]
    engines = [span for span in spans if span.name == "engine"]
    assert [span.up for span in engines] == [turn.id for turn in turns]
    sent = [call.traceparent for call in engine.calls[first:]]
    assert sent == [f"00-{trace_id(run.run_id, summary.uid)}-{span.id}-01" for span in engines]
    assert {span.name for span in spans if span.up == engines[0].id} == {"engine_queue", "prefill", "decode"}
    attempt = next(span for span in spans if span.name == "attempt")
    assert (attempt.id, attempt.group) == (summary.id, turns[0].group)
    assert (len(summary.turns), summary.engine) == (2, engine.url)
    assert sum(summary.phases.values()) == summary.d
    for name, least_s in (("engine_queue", 0.1), ("prefill", 0.1), ("decode", 0.2), ("tool", 0.2)):
        assert summary.phases[name] >= (least_s - 0.02) * 1e9, summary.phases
    assert len({span.id for span in spans}) == len(spans)


def test_the_rollouts_of_a_captured_generator_are_in_the_groups_of_their_samples(
    server: ServerProcess, engine: ThreadedEngine, tmp_path: Path
) -> None:
    rows = rows_file(tmp_path, "1", "2")
    limits: dict[str, Any] = {"num_process": "4", "num_epoch": "2", "skip_instance_ids": []}
    run = server.start_run("plain", 2, capture=True, input_file=rows, remote_engine_url=engine.url, **limits)
    summaries = summaries_of(server, run, 8)
    groups = {group["group_id"]: group for group in run.groups()}
    assert {summary.group for summary in summaries} == set(groups)
    assert set(groups) == {group_id(row, epoch) for row in ("1", "2") for epoch in (0, 1)}
    for group in groups:
        samples = run.group(group)["samples"]
        mine = [summary for summary in summaries if summary.group == group]
        assert {(each.uid, each.slot, each.epoch) for each in mine} == {
            (sample["uid"], sample["slot"], groups[group]["epoch"]) for sample in samples
        }
    for summary in summaries:
        assert sum(summary.phases.values()) == summary.d
        assert summary.phases["prefill"] >= 0.03e9
        assert (summary.ending, len(summary.turns)) == ("finished", 1)
    spans = spans_of(server, run, 8)
    assert len({span.id for span in spans}) == len(spans) > 8 * 6
    run.stop()


@pytest.mark.soak
def test_a_gateway_that_is_killed_leaves_whole_lines_and_shows_what_hung(
    server: ServerProcess, engine: ThreadedEngine, tmp_path: Path
) -> None:
    run = server.start_run("lent", input_file=rows_file(tmp_path, "row"), remote_engine_url=engine.url)
    buffer_url = lent_url(server, run.run_id)
    admitted = httpx.post(f"{buffer_url}/gateway", timeout=30).json()

    def post(url: str, key: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(url, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)

    def opened(name: str) -> dict[str, Any]:
        body = {"rollout_id": name, "deadline_s": 120}
        rollout: dict[str, Any] = post(f"{admitted['url']}/gateway/rollouts", admitted["key"], body).json()
        return rollout

    def ask(rollout: dict[str, Any], said: str) -> httpx.Response:
        body = {"model": "m", "messages": [{"role": "user", "content": said}]}
        return post(f"{rollout['base_url']}/chat/completions", rollout["key"], body)

    first = opened("first")
    assert ask(first, "hello").status_code == 200
    with ThreadPoolExecutor(1) as pool:
        hung = pool.submit(ask, first, HANGING)

        def noted() -> list[Open]:
            found = [record for record in records_of(server, run) if isinstance(record, Open)]
            return [record for record in found if record.name == "engine"]

        (call,) = poll_until(noted, 60)
        (gateway,) = children_with(server.pid, "forebay.gateway")
        os.kill(gateway.pid, signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            hung.result()
    assert ask(opened("second"), "hello").status_code == 200
    run.stop()
    assert call.at["load"] == {"running": 1, "waiting": 0}
    summaries_of(server, run, 1)
    records = records_of(server, run)
    assert call.id not in {record.id for record in records if isinstance(record, Span)}, "it is open for good"
    heads = [record for record in records if isinstance(record, Head) and record.process == "gateway"]
    assert len({head.pid for head in heads}) == 2
    spans = [record for record in records if isinstance(record, Span)]
    assert len({span.id for span in spans}) == len(spans)
    assert len(trace_files(trace_folder(server, run))) >= 2
