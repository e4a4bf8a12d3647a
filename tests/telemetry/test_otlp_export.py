"""Traces at a collector: by the official SDK, decoded with the official protobufs."""

from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as PbSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from forebay.core.errors import ForebayError, InvalidInput, MissingExtra
from forebay.telemetry.export.otlp import OtlpExport
from forebay.telemetry.tracing.records import TurnSummary
from forebay.telemetry.tracing.trace_ids import trace_id
from tests.telemetry.log_kit import (
    ENGINE,
    RUN_ID,
    ZERO,
    S,
    make_log,
    rollout,
    span,
    span_id,
    still_open,
    summary,
    write_log,
)
from tests.telemetry.otlp_receiver import Receiver, attributes, receiver
from tests.telemetry.trace_kit import read_whole

__all__ = ["receiver"]


def send(folder: Path) -> OtlpExport:
    export = OtlpExport()
    try:
        export.send(read_whole(folder))
    finally:
        export.close()
    return export


def test_a_rollout_is_a_tree_under_the_ids_that_were_recorded(tmp_path: Path, receiver: Receiver) -> None:
    write_log(tmp_path, "run", *rollout())
    assert send(tmp_path).num_sent == 12
    trace = bytes.fromhex(trace_id(RUN_ID, "u-0"))
    assert {each.trace_id for each in receiver.spans} == {trace}
    parents = {int.from_bytes(each.span_id): int.from_bytes(each.parent_span_id) for each in receiver.spans}
    assert parents == {1: 0, 2: 1, 3: 1, 4: 3, 5: 4, 6: 4, 7: 3, 8: 3, 9: 1, 10: 9, 11: 9, 12: 1}
    turn = next(each for each in receiver.spans if each.span_id == bytes.fromhex(span_id(3)))
    assert (turn.start_time_unix_nano, turn.end_time_unix_nano) == (ZERO + S, ZERO + 4 * S)


def test_the_attempt_is_the_root_with_what_training_wants_to_know(tmp_path: Path, receiver: Receiver) -> None:
    write_log(tmp_path, "run", *rollout())
    send(tmp_path)
    root = receiver.named("attempt")
    assert root.kind == PbSpan.SPAN_KIND_INTERNAL
    assert root.parent_span_id == b""
    told = attributes(root.attributes)
    assert told == {
        **told,
        "rl.run_id": RUN_ID,
        "rl.group_id": "g",
        "rl.uid": "u-0",
        "rl.instance_id": "task",
        "rl.slot": 3,
        "rl.attempt": 0,
        "rl.step": 2,
        "rl.reward": 0.5,
        "rl.ending": "finished",
        "rl.weight_versions": ["4", "5"],
        "rl.num_turns": 2,
        "rl.phase.engine_s": 3.0,
    }
    assert "error.type" not in told
    assert root.status.code == Status.STATUS_CODE_UNSET


def test_calls_and_tools_have_the_names_of_the_conventions(tmp_path: Path, receiver: Receiver) -> None:
    write_log(tmp_path, "run", *rollout())
    send(tmp_path)
    first = min((each for each in receiver.spans if each.name == "chat"), key=lambda each: each.start_time_unix_nano)
    assert first.kind == PbSpan.SPAN_KIND_CLIENT
    assert attributes(first.attributes) == {
        "rl.run_id": RUN_ID,
        "rl.group_id": "g",
        "rl.uid": "u-0",
        "rl.attempt": 0,
        "rl.turn": 0,
        "rl.phase": "engine",
        "rl.engine": ENGINE,
        "rl.weight_versions": ["4"],
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.usage.input_tokens": 30,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 10,
        "gen_ai.response.finish_reasons": ["tool_calls"],
        "server.address": "engine.example",
        "server.port": 30000,
    }
    tool = receiver.named("execute_tool calculator")
    assert tool.kind == PbSpan.SPAN_KIND_INTERNAL
    told = attributes(tool.attributes)
    assert (told["gen_ai.operation.name"], told["gen_ai.tool.name"]) == ("execute_tool", "calculator")
    failed = receiver.named("execute_tool python")
    assert attributes(failed.attributes)["error.type"] == "ValueError"
    assert failed.status.code == Status.STATUS_CODE_ERROR
    assert attributes(receiver.named("parse").attributes)["bytes"] == 12


def test_the_pinned_names_are_of_the_version_that_is_named(tmp_path: Path, receiver: Receiver) -> None:
    write_log(tmp_path, "run", *rollout())
    send(tmp_path)
    (resource,) = receiver.resources
    (scope,) = resource.scope_spans
    assert scope.scope.name == "forebay"
    assert scope.schema_url == "https://opentelemetry.io/schemas/1.41.0"
    known = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    sent = {name for each in receiver.spans for name in attributes(each.attributes)}
    ours = {name for name in sent if name.startswith("gen_ai.")}
    assert len(ours) == 7
    assert ours <= {value for value in vars(known).values() if isinstance(value, str)}


def test_what_failed_is_an_error(tmp_path: Path, receiver: Receiver) -> None:
    write_log(tmp_path, "run", summary(0, 1, ending="failed", outcome="engine_failure"))
    send(tmp_path)
    root = receiver.named("attempt")
    assert root.status.code == Status.STATUS_CODE_ERROR
    assert attributes(root.attributes)["error.type"] == "engine_failure"


def test_without_spans_the_turns_of_a_rollout_are_those_of_its_summary(tmp_path: Path, receiver: Receiver) -> None:
    write_log(tmp_path, "run", summary(0, 1, turns=[TurnSummary(t=ZERO, d=S, sampled=3, phases={"engine": S})]))
    send(tmp_path)
    turn = receiver.named("turn")
    assert turn.parent_span_id == receiver.named("attempt").span_id
    told = attributes(turn.attributes)
    assert (told["gen_ai.usage.output_tokens"], told["rl.phase.engine_s"]) == (3, 1.0)


def test_an_agents_own_span_is_a_child_of_ours(tmp_path: Path, receiver: Receiver) -> None:
    """It is recorded by the SDK in the agent, which was told our ``traceparent``, and sent to the same collector."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    from forebay.telemetry.tracing.tracer import TraceSettings, start_tracing

    tracer = start_tracing(TraceSettings(folder=str(tmp_path), run_id=RUN_ID), "run")
    attempt = tracer.attempt("u-9", "g", 0)
    with attempt.begin("environment") as ours:
        carrier = {"traceparent": ours.traceparent}
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
        context = TraceContextTextMapPropagator().extract(carrier)
        with provider.get_tracer("agent").start_as_current_span("think", context=context):
            pass
        provider.shutdown()
    attempt.summary(instance="task", ending="finished")
    tracer.close()
    send(tmp_path)
    think, around = receiver.named("think"), receiver.named("environment")
    assert think.trace_id == around.trace_id == receiver.named("attempt").trace_id
    assert think.parent_span_id == around.span_id
    assert around.parent_span_id == receiver.named("attempt").span_id


def test_a_foreign_traceparent_is_a_link(tmp_path: Path, receiver: Receiver) -> None:
    link = f"00-{'ab' * 16}-{'cd' * 8}-01"
    write_log(tmp_path, "run", span("engine", 0, 1, 2, at={"link": link}), span("tool", 0, 1, 3, at={"link": "junk"}))
    send(tmp_path)
    (linked,) = receiver.named("chat").links
    assert (linked.trace_id, linked.span_id) == (b"\xab" * 16, b"\xcd" * 8)
    assert list(receiver.named("execute_tool").links) == []


def test_reads_weights_and_standstills_are_in_the_trace_of_the_run(tmp_path: Path, receiver: Receiver) -> None:
    make_log(tmp_path)
    send(tmp_path)
    read = receiver.named("read")
    assert read.trace_id == bytes.fromhex(trace_id(RUN_ID, ""))
    assert attributes(read.attributes)["rl.trainer_step"] == 67
    parts = {each.name: each for each in receiver.spans if each.parent_span_id == read.span_id}
    assert set(parts) == {"wait", "hooks", "delivery"}
    assert parts["wait"].end_time_unix_nano - parts["wait"].start_time_unix_nano == 4 * S
    assert attributes(receiver.named("weights announced").attributes)["rl.weight_version"] == 5
    pause = receiver.named("engines paused")
    assert pause.end_time_unix_nano - pause.start_time_unix_nano == S
    group = receiver.named("group")
    states = [each.name for each in receiver.spans if each.parent_span_id == group.span_id]
    assert states == ["open", "ready", "leased"]
    assert attributes(group.attributes)["rl.ended"] == "acked"
    stall = receiver.named("event loop stood still")
    assert attributes(stall.attributes)["rl.stack"] == ["file.py:1 sleep"]


def test_what_never_ended_goes_out_as_open(tmp_path: Path, receiver: Receiver) -> None:
    write_log(
        tmp_path, "run", still_open(1, 2, at={"engine": ENGINE}), span("tool", 0, 9, 3), span("attempt", 0, 9, 1, 0)
    )
    send(tmp_path)
    sent = receiver.named("chat")
    assert attributes(sent.attributes)["rl.is_open"] is True
    assert sent.end_time_unix_nano == ZERO + 9 * S
    assert receiver.named("attempt").parent_span_id == b""  # its process was killed before it could sum up


def test_an_open_span_that_ended_goes_out_once(tmp_path: Path, receiver: Receiver) -> None:
    write_log(tmp_path, "run", still_open(1, 2), span("engine", 1, 12, 2))
    send(tmp_path)
    assert "rl.is_open" not in attributes(receiver.named("chat").attributes)


def test_each_process_is_a_resource_and_the_usual_variables_name_it(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_log(tmp_path)
    send(tmp_path)
    told = [attributes(each.resource.attributes) for each in receiver.resources]
    assert {each["service.name"] for each in told} == {"forebay"}
    assert {(each["rl.process"], each["process.pid"]) for each in told} == {("run", 7), ("server", 7)}
    receiver.requests.clear()
    monkeypatch.setenv("OTEL_SERVICE_NAME", "trainer-7")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    send(tmp_path)
    told = [attributes(each.resource.attributes) for each in receiver.resources]
    assert {(each["service.name"], each["deployment.environment.name"]) for each in told} == {("trainer-7", "lab")}
    assert {each["x-key"] for each in receiver.headers[1:]} == {"secret"}


def test_the_same_log_has_the_same_ids_each_time(tmp_path: Path, receiver: Receiver) -> None:
    make_log(tmp_path)
    send(tmp_path)
    first = sorted(each.SerializeToString() for each in receiver.spans)
    receiver.requests.clear()
    send(tmp_path)
    assert sorted(each.SerializeToString() for each in receiver.spans) == first


@pytest.mark.parametrize("status", [429, 503])
def test_a_collector_that_is_busy_is_asked_again(tmp_path: Path, receiver: Receiver, status: int) -> None:
    write_log(tmp_path, "run", *rollout())
    receiver.statuses = [status]
    assert send(tmp_path).num_sent == len(receiver.spans) == 12
    assert receiver.num_asked == 2


@pytest.mark.parametrize("status", [400, 401, 404])
def test_what_a_collector_refuses_for_good_ends_the_export(
    tmp_path: Path, receiver: Receiver, capfd: pytest.CaptureFixture[str], status: int
) -> None:
    write_log(tmp_path, "run", *rollout())
    receiver.statuses = [status]
    with pytest.raises(ForebayError, match=f"failed after 0 spans: .*{status}"):
        send(tmp_path)
    assert receiver.num_asked == 1
    assert capfd.readouterr().err == ""  # the SDK's own complaint is in the error


def test_many_spans_go_in_batches(tmp_path: Path, receiver: Receiver) -> None:
    write_log(tmp_path, "run", *(span("tool", n, 1, n + 1) for n in range(1_200)))
    assert send(tmp_path).num_sent == len(receiver.spans) == 1_200
    assert len(receiver.requests) == 3


def test_without_the_extra_the_install_line_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(MissingExtra) as missing:
        OtlpExport()
    assert missing.value.hint == "pip install 'forebay[otel]'"


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"), ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317")]
)
def test_variables_that_cannot_be_followed_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInput, match=name):
        OtlpExport()
