"""From record files with planted truth to requests: their phases, turns, events and failed attempts."""

from pathlib import Path

import pytest

from forebay.telemetry.analysis import load
from forebay.telemetry.analysis.timeline import Event, Request
from forebay.telemetry.tracing.records import ProcessChange
from tests.telemetry.planted_trace import PlantedTrace, one_group, seconds, window


@pytest.fixture
def trace(tmp_path: Path) -> PlantedTrace:
    return PlantedTrace(tmp_path / "trace")


def times(events: list[Event]) -> list[tuple[str, float, float]]:
    return [(event.name, round(seconds(event.begin_s), 6), round(seconds(event.end_s), 6)) for event in events]


def test_a_request_has_its_leaves_and_what_nobody_measured(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    turns = [
        (2, 5, {"decode": 2.0, "engine": 1.0}, {"engine": "http://e2", "sampled": 20, "has_tools": True}),
        (5 + 2, 3, {"decode": 2.0, "agent": 1.0}, {"engine": "http://e1", "sampled": 5, "finish_reason": "stop"}),
    ]
    attempt = run.rollout(
        "a/0",
        0,
        12,
        turns=[(begin, begin + d, phases, fields) for begin, d, phases, fields in turns],
        phases={"queue": 2.0, "engine": 1.0, "decode": 4.0, "tool": 2.0, "agent": 1.0, "reward": 2.0},
        engine="http://e2",
        sampled=25,
        prompt=100,
        cached=40,
        reward=0.5,
    )
    run.span("attempt", 0, 12, "a/0", id=attempt, group="a")
    run.span("queue", 0, 2, "a/0", up=attempt, group="a")
    turn = run.span("turn", 2, 5, "a/0", up=attempt, turn=0, group="a")
    call = run.span("engine", 2, 5, "a/0", up=turn, turn=0, group="a", engine="http://e2")
    run.span("decode", 3, 5, "a/0", up=call, turn=0, group="a")
    turn = run.span("turn", 7, 9, "a/0", up=attempt, turn=1, group="a")
    run.span("decode", 7, 9, "a/0", up=turn, turn=1, group="a")
    run.span("reward", 10, 12, "a/0", up=attempt, group="a", cpu_s=1.5)
    server.group("a", "ready", 12, last="a/0")
    server.read(1, 12, 13, ["a"], step=0)
    (step,) = trace.steps()
    (request,) = step.requests
    assert times(request.events) == [
        ("queue", 0, 2),
        ("engine", 2, 3),
        ("decode", 3, 5),
        ("tool", 5, 7),
        ("decode", 7, 9),
        ("agent", 9, 10),
        ("reward", 10, 12),
    ]
    assert sum(request.phases.values()) == pytest.approx(request.duration_s, rel=0.01)
    assert request.phases == pytest.approx(
        {"queue": 2, "engine": 1, "decode": 4, "tool": 2, "agent": 1, "reward": 2}, rel=1e-6
    )
    assert (request.worker, request.sampled_tokens, request.reward) == ("http://e2", 25, 0.5)
    assert (request.prompt_tokens, request.cached_tokens) == (100, 40)
    assert [turn.engine for turn in request.turns] == ["http://e2", "http://e1"]
    assert [turn.has_tools for turn in request.turns] == [True, False]
    assert request.events[1].info == {"engine": "http://e2"}


def test_a_group_without_spans_has_its_summary(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    run.rollout("a/0", 0, 10, phases={"tool": 7.0, "decode": 3.0})
    server.read(1, 10, 11, ["a"], step=0)
    (step,) = trace.steps()
    assert step.requests[0].phases == pytest.approx({"tool": 7, "decode": 3})
    assert step.requests[0].events == []


@pytest.mark.parametrize("by", ["parent", "attempt"])
def test_what_the_gateway_measured_stands_below_the_attempt(trace: PlantedTrace, by: str) -> None:
    """The run knows only that its agent's process ran; an agent's own span between has no line."""
    gateway, run, server = trace.file("gateway", pid=8), trace.file("run"), trace.file("server", pid=9)
    first = run.rollout("a/0", 0, 4, phases={"environment": 4.0}, attempt=0, is_last=False, ending="retried", engine="")
    attempt = run.rollout("a/0", 5, 20, phases={"environment": 15.0}, attempt=1, engine="")
    environment = run.span("environment", 5, 20, "a/0", up=attempt, group="a", attempt=1)
    up = {"parent": environment, "attempt": "dead00000000beef"}[by]
    turn = gateway.span("turn", 6, 16, "a/0", up=up, turn=0, group="a", attempt=1, has_tools=True, sampled=9)
    gateway.span("decode", 6, 16, "a/0", up=turn, turn=0, group="a", attempt=1, engine="http://e3")
    gateway.span("decode", 1, 3, "a/0", up=first if by == "parent" else up, group="a", attempt=0, engine="http://e2")
    server.read(1, 20, 21, ["a"], step=0)
    (step,) = trace.steps()
    (request,) = step.requests
    assert request.num_attempts == 2
    assert request.worker == "http://e2"
    assert request.phases["retry"] == pytest.approx(1)
    if by == "parent":
        assert request.phases == pytest.approx({"decode": 12, "environment": 5, "retry": 1, "agent": 2}, rel=1e-6)
    assert sum(request.phases.values()) == pytest.approx(20)
    assert [(turn.number, turn.sampled_tokens, turn.has_tools) for turn in request.turns] == [(0, 9, True)]


def test_a_foreign_generator_has_what_the_gateway_wrote(trace: PlantedTrace) -> None:
    gateway, server = trace.file("gateway", pid=8), trace.file("server", pid=9)
    attempt = gateway.rollout("thing-7", 0, 9, group="a", phases={"decode": 6.0, "agent": 3.0})
    gateway.span("decode", 0, 6, "thing-7", up=attempt, turn=0)
    server.read(1, 9, 10, ["a"], step=0)
    (step,) = trace.steps()
    (request,) = step.requests
    assert (request.request_id, request.group, request.is_used) == ("thing-7", "a", True)
    assert times(request.events) == [("decode", 0, 6), ("agent", 6, 9)]
    assert request.phases == pytest.approx({"decode": 6, "agent": 3})


def test_what_hung_when_everything_was_killed_is_open(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    one_group(run, server, "a", 0, 10)
    server.read(1, 10, 11, ["a"], step=0)
    server.open("read", 12, "", id="read2")
    attempt = run.open("attempt", 5, "b/0", group="b")
    call = run.open("engine", 14, "b/0", up=attempt, turn=0, group="b", engine="http://e1", load={"num_running": 4})
    run.span("queue", 5, 14, "b/0", up=attempt, group="b")
    one_group(run, server, "c", 11, 60)
    _, step = trace.steps()
    assert (step.name, step.is_open, window(step)) == ("1", True, (11, 60))
    assert step.asked_s is not None
    assert seconds(step.asked_s) == pytest.approx(12)
    hung = next(request for request in step.requests if request.request_id == "b/0")
    assert (hung.ending, hung.is_used) == ("open", False)
    assert times(hung.events) == [("queue", 5, 14), ("engine", 14, 60)]
    assert [event.is_open for event in hung.events] == [False, True]
    assert hung.events[1].info["load"] == {"num_running": 4}
    assert hung.phases == pytest.approx({"queue": 9, "engine": 46})
    assert call != attempt


def test_a_rollout_of_which_only_the_first_seconds_are_known_is_open(trace: PlantedTrace) -> None:
    run = trace.file("run")
    run.span("queue", 0, 2, "b/0", up="feed00000000beef", group="b")
    run.rollout("a/0", 0, 5)
    (step,) = trace.steps()
    endings = {request.request_id: request.ending for request in step.requests}
    assert endings == {"a/0": "finished", "b/0": "open"}


def test_what_a_killed_process_had_under_way_ends_with_it(trace: PlantedTrace) -> None:
    first, second = trace.file("run", pid=7), trace.file("run", pid=70, begun=20)
    server = trace.file("server", pid=9)
    first.span("queue", 0, 2, "a/0", up="feed00000000beef", group="a")
    for what, at in (("failed", 10), ("restarted", 12)):
        server.write(ProcessChange(t=server.at(at), what=what, process="run"))
    second.rollout("b/0", 20, 60)
    timeline = load(trace.folder)
    (step,) = timeline.steps()
    killed = next(request for request in step.requests if request.request_id == "a/0")
    assert (killed.ending, killed.duration_s) == ("open", pytest.approx(10))
    assert "The run process failed once: its unfinished work is shown as open until then." in timeline.notes


def test_a_restart_goes_on_with_the_same_rollout(trace: PlantedTrace) -> None:
    first, second = trace.file("run", start=1, pid=7), trace.file("run", start=2, pid=70, begun=20)
    server = trace.file("server", pid=9)
    killed = first.open("attempt", 0, "a/0", group="a")
    first.open("decode", 1, "a/0", up=killed, group="a")
    first.rollout("z/0", 0, 15)
    second.rollout("a/0", 21, 30)
    server.read(1, 30, 31, ["a", "z"], step=0)
    (step,) = trace.steps()
    request = next(each for each in step.requests if each.request_id == "a/0")
    assert (request.ending, request.num_attempts) == ("finished", 2)
    assert request.phases == pytest.approx({"agent": 1, "decode": 14 + 9, "retry": 6})
    assert sum(request.phases.values()) == pytest.approx(request.duration_s)


def test_a_span_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    trace = PlantedTrace(tmp_path)
    run = trace.file("run")
    attempt = run.rollout("a/0", 0, 10)
    run.open("decode", 0, "a/0", up=attempt, group="a", id="0000000000000001")
    run.span("decode", 0, 10, "a/0", up=attempt, group="a", id="0000000000000001")
    (step,) = load(tmp_path, tmp_path).steps()
    assert [(event.name, event.is_open) for event in step.requests[0].events] == [("decode", False)]
    assert step.requests[0].num_attempts == 1


def test_a_span_whose_parent_was_lost_is_of_the_attempt_in_whose_time_it_lies(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    run.rollout("a/0", 0, 10, attempt=0, is_last=False, ending="retried")
    run.rollout("a/0", 11, 20, attempt=1)
    run.span("decode", 12, 15, "a/0", up="00000000000105t0", turn=0, group="a", attempt=1)
    server.read(1, 20, 21, ["a"], step=0)
    (step,) = trace.steps()
    (request,) = step.requests
    assert (request.num_attempts, request.ending) == (2, "finished")
    assert ("decode", 12, 15) in times(request.events)


def failures(request: Request) -> list[tuple[str, float, float, int, str]]:
    return [
        (each.kind, round(seconds(each.begin_s), 6), round(seconds(each.end_s), 6), each.tokens, each.tool)
        for each in request.failed
    ]


def only_request(trace: PlantedTrace) -> Request:
    (step,) = trace.steps()
    (request,) = step.requests
    return request


def test_attempts_that_failed_are_named_with_their_kind_and_what_they_had_sampled(trace: PlantedTrace) -> None:
    run = trace.file("run")
    again = {"is_last": False, "ending": "retried"}
    run.rollout("a/0", 0, 10, attempt=0, **again, outcome="engine_failure", sampled=70)
    run.rollout("a/0", 10, 15, attempt=1, is_last=False, ending="lost")
    run.rollout("a/0", 15, 20, attempt=2, is_last=False, ending="broken", sampled=7)
    run.rollout("a/0", 20, 30, attempt=3, ending="failed", outcome="agent_failure", sampled=9)
    request = only_request(trace)
    assert failures(request) == [
        ("engine_failure", 0, 10, 70, ""),
        ("lost", 10, 15, 0, ""),
        ("agent_failure", 20, 30, 9, ""),
    ]
    assert (request.ending, request.num_attempts, request.num_broken, request.broken_tokens) == ("failed", 4, 1, 7)


@pytest.mark.parametrize(
    ("outcome", "error", "blamed"),
    [
        ("environment_failure", "TimeoutError", "search"),
        ("environment_failure", "ToolError", ""),  # the model was told, and something else failed later
        ("environment_failure", "", ""),
        ("engine_failure", "TimeoutError", ""),
    ],
)
def test_the_tool_that_raised_is_named(trace: PlantedTrace, outcome: str, error: str, blamed: str) -> None:
    run = trace.file("run")
    up = run.rollout("a/0", 0, 10, ending="failed", outcome=outcome)
    told = {"error": error} if error else {}
    run.span("tool", 1, 2, "a/0", up=up, group="a", tool="calculator", error="KeyError")
    run.span("tool", 3, 5, "a/0", up=up, group="a", tool="search", **told)
    run.span("tool", 3, 5.1, "a/0", up=up, group="a", tool="python", error="CancelledError")
    assert [each.tool for each in only_request(trace).failed] == [blamed]


def test_what_finished_or_was_not_needed_did_not_fail(trace: PlantedTrace) -> None:
    run = trace.file("run")
    run.rollout("a/0", 0, 10)
    run.rollout("a/1", 0, 10, ending="aborted")
    (step,) = trace.steps()
    assert [request.failed for request in step.requests] == [[], []]


def test_a_turn_has_its_tools_and_the_time_that_its_engine_reports(trace: PlantedTrace) -> None:
    run = trace.file("run")
    run.rollout(
        "a/0", 0, 10, turns=[(0, 6, {}, {"tools": ["search", "python"], "engine_ns": 2_500_000_000}), (6, 10, {}, {})]
    )
    turns = [(turn.tools, turn.engine_s) for turn in only_request(trace).turns]
    assert turns == [(("search", "python"), 2.5), ((), None)]
