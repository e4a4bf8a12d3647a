"""Traces of calls to the real SGLang: it gets the ``traceparent``, and tells its queue, prefill and decode."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from forebay.telemetry.tracing.records import Record, RolloutSummary, Span
from forebay.telemetry.tracing.trace_ids import read_traceparent, trace_id
from tests.conftest import MakeServer
from tests.e2e.conftest import TASKS
from tests.e2e.payloads import make_payload, numbered_rows
from tests.e2e.reading import start_as_slime
from tests.gateway.gateway_kit import RUN_ID, USER, gateway_before
from tests.kit import NativeRun, ServerProcess, poll_until
from tests.sglang.conftest import engine_with
from tests.telemetry.trace_kit import records_in

pytestmark = pytest.mark.sglang

PARTS = ("engine_queue", "prefill", "decode")
SHELL_AGENT = Path(__file__).parents[2] / "examples" / "shell_agent"
LIMIT_S = 180.0
CLOCKS_NS = 50_000_000


class LoggingEngine(NamedTuple):
    """A real engine that logs the ``traceparent`` of each request under its ``rid``."""

    url: str
    traceparents: Callable[[], dict[str, str]]


@pytest.fixture(scope="module")
def engine(sglang_python: str, sglang_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoggingEngine]:
    folder = tmp_path_factory.mktemp("sglang")
    flags = ["--log-requests", "--log-requests-level", "0", "--log-requests-format", "json"]
    flags += ["--log-requests-target", str(folder / "requests")]

    def traceparents() -> dict[str, str]:
        lines = "".join(path.read_text() for path in (folder / "requests").glob("*.log")).splitlines()
        found = [json.loads(line[line.index("{") :]) for line in lines if "request.received" in line]
        return {each["rid"]: each.get("headers", {}).get("traceparent", "") for each in found}

    log, environ = folder / "engine.log", {"SGLANG_LOG_REQUEST_HEADERS": "traceparent"}
    with engine_with(sglang_python, sglang_model, log, *flags, **environ) as url:
        yield LoggingEngine(url, traceparents)


def assert_parts(spans: list[Span], call: Span, names: tuple[str, ...] = PARTS) -> None:
    """The engine's parts of a call follow each other up to its end."""
    parts = sorted((span for span in spans if span.up == call.id), key=lambda span: span.t)
    # A wait of nothing is no span.
    assert [part.name for part in parts] in ([*names], [name for name in names if name != "engine_queue"])
    end = call.t + call.d
    for part in reversed(parts):
        assert abs(part.t + part.d - end) <= CLOCKS_NS
        end = part.t
    assert call.t <= end
    total_s = call.at["total_s"]
    assert isinstance(total_s, float)
    assert 0 < sum(part.d for part in parts) <= 1e9 * total_s + CLOCKS_NS, "they are of what the engine says it took"


def assert_arrived(engine: LoggingEngine, run_id: str, calls: list[Span]) -> None:
    """The engine had the id of each call's span, and the trace of its rollout."""
    arrived = engine.traceparents()
    assert calls
    for call in calls:
        parent = read_traceparent(arrived[call.at["rid"]])
        assert parent is not None
        assert (parent.trace_id, parent.span_id) == (trace_id(run_id, call.uid), call.id)


async def test_calls_through_the_gateway_have_the_engines_parts_and_the_engine_their_traceparent(
    engine: LoggingEngine, tmp_path: Path
) -> None:
    trace = {"folder": str(tmp_path), "run_id": RUN_ID}
    fields: dict[str, Any] = {"model": "tiny", "messages": [USER], "max_tokens": 30, "ignore_eos": True}
    async with gateway_before(engine.url, trace=trace) as gateway:
        rollout = await gateway.open(deadline_s=LIMIT_S)
        for stream in (False, True):
            await rollout.post("chat/completions", {**fields, "stream": stream})
        await rollout.close()
        await gateway.forget()
    spans = [record for record in records_in(tmp_path) if isinstance(record, Span)]
    whole, streamed = [span for span in spans if span.name == "engine"]
    assert_arrived(engine, RUN_ID, [whole, streamed])
    assert_parts(spans, whole)
    assert [span.name for span in spans if span.up == streamed.id] == ["decode"]
    for call in (whole, streamed):
        assert (call.at["sampled"], call.at["finish_reason"]) == (30, "length")


@pytest.fixture(scope="module")
def server(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    folder = shutil.copytree(TASKS, tmp_path_factory.mktemp("tasks") / "tasks")
    for path in SHELL_AGENT.glob("*.py"):
        shutil.copy(path, folder)
    return module_servers(generators=Path(folder), start_wait_s=60)


@pytest.mark.parametrize("kind", ["base generator", "gateway agent"])
def test_a_rollout_is_traced_into_the_engine(
    server: ServerProcess, engine: LoggingEngine, tmp_path: Path, kind: str
) -> None:
    changes: dict[str, Any] = {"num_repeat_per_sample": "2"}
    if kind == "gateway agent":
        changes |= {"task_type": re.sub("_generator$", "", next(SHELL_AGENT.glob("*_generator.py")).stem)}
    run = start_as_slime(server, make_payload(tmp_path, engine.url, numbered_rows(2)) | changes)
    wait_for_samples(run, 4)
    run.stop()
    records = poll_until(lambda: whole_trace(server.data_dir / "runs" / run.run_id / "trace", 4), LIMIT_S)
    spans = [record for record in records if isinstance(record, Span)]
    calls = [span for span in spans if span.name == "engine" and "sampled" in span.at]
    assert_arrived(engine, run.run_id, calls)
    for call in calls:
        if call.at["finish_reason"] != "abort":
            assert_parts(spans, call)
    summaries = [record for record in records if isinstance(record, RolloutSummary)]
    assert {summary.uid for summary in summaries} == {call.uid for call in calls}
    for summary in summaries:
        assert summary.phases["decode"] > 0
        assert abs(sum(summary.phases.values()) - summary.d) <= summary.d // 100


def wait_for_samples(run: NativeRun, number: int) -> None:
    poll_until(lambda: sum(run.view()["outcomes"].values()) >= number, LIMIT_S)


def whole_trace(folder: Path, num_rollouts: int) -> list[Record]:
    """All records, once so many rollouts have their summaries and nobody writes any more."""
    records = records_in(folder) if folder.is_dir() else []
    ended = {record.uid for record in records if isinstance(record, RolloutSummary) and record.is_last}
    return records if len(ended) >= num_rollouts else []
