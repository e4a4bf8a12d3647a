"""``forebay trace export`` of a run on a real server, with a real run process, an engine, tools and a trainer."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from tests.cli.conftest import Forebay
from tests.conftest import MakeServer
from tests.kit import NativeRun, ServerProcess, poll_until
from tests.telemetry.otlp_receiver import Receiver, attributes, receiver
from tests.telemetry.test_perfetto_export import begun, check_pairs, processes

__all__ = ["receiver"]

CANARY = "canary-7f3a"


@pytest.fixture(autouse=True)
def _in_a_fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def server(module_servers: MakeServer) -> ServerProcess:
    return module_servers()


class Reckons:
    """One call of a tool, then the answer; a wrong one every other time, since a group whose rewards agree is none."""

    def __init__(self) -> None:
        self._answers = itertools.cycle("45")

    def __call__(self, call: ScriptedCall) -> Reply:
        if call.messages[-1]["role"] == "tool":
            return Reply(text=f"It is \\boxed{{{next(self._answers)}}}.", queue_s=0.001, prefill_s=0.001)
        function = {"name": "calculator", "arguments": json.dumps({"expression": "2 + 2"})}
        return Reply(tool_calls=[{"id": "c1", "type": "function", "function": function}])


def start(server: ServerProcess, engine_url: str, folder: Path, name: str) -> NativeRun:
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": f"What is 2 + 2? {CANARY}", "label": "4"}) + "\n")
    fields: dict[str, Any] = {"name": name, "remote_engine_url": engine_url, "input_file": str(rows)}
    return server.start_run("tool", group_size=2, **fields)


def test_a_run_is_sent_from_its_server_to_a_collector_and_drawn(
    forebay: Forebay, server: ServerProcess, receiver: Receiver, tmp_path: Path
) -> None:
    with ScriptedEngine(Reckons()).in_thread() as engine:
        run = start(server, engine.url, tmp_path, "exported")
        run.take(num_groups=1, step=3, wait_s=20)
        poll_until(lambda: run.view()["has_ended"])
    done = forebay("trace", "export", "exported", "--to", "otlp", "--url", server.url)
    assert done.code == 0, done.err
    check_spans(receiver, run.run_id, engine.url)
    receiver.requests.clear()
    assert forebay("trace", "export", "exported", "--to", "otlp", "--content", "--url", server.url).code == 0
    check_content([attributes(each.attributes) for each in receiver.spans])
    drawn = forebay("trace", "export", "exported", "--to", "perfetto", "--url", server.url)
    assert drawn.out == f"{run.run_id}.perfetto.json\n", drawn.err
    text = Path(drawn.out.strip()).read_text()
    elsewhere = ("--data-dir", tmp_path, "--output", "again.json", "--url", server.url)  # it is not there
    assert forebay("trace", "export", "exported", "--to", "perfetto", *elsewhere).code == 0
    assert CANARY not in text
    check_drawing(json.loads(text), engine.url)


def check_spans(receiver: Receiver, run_id: str, engine_url: str) -> None:
    """Two attempts, each with two turns, two calls and a tool; one read."""
    by_id = {each.span_id: each for each in receiver.spans}
    assert len(by_id) == len(receiver.spans)
    for each in receiver.spans:
        assert each.parent_span_id == b"" or by_id[each.parent_span_id].trace_id == each.trace_id
        assert attributes(each.attributes)["rl.run_id"] == run_id
    names = [each.name for each in receiver.spans]
    assert names.count("attempt") == 2
    assert names.count("turn") == names.count("chat") == 4
    assert names.count("execute_tool calculator") == 2
    assert names.count("read") == 1
    assert {"prefill", "decode", "reward", "write"} <= set(names)
    roots = [attributes(each.attributes) for each in receiver.spans if each.name == "attempt"]
    assert [(root["rl.slot"], root["rl.ending"]) for root in sorted(roots, key=lambda root: root["rl.slot"])] == [
        (0, "finished"),
        (1, "finished"),
    ]
    assert {root["rl.reward"] for root in roots} == {0.0, 1.0}
    call = attributes(next(each for each in receiver.spans if each.name == "chat").attributes)
    assert call["rl.engine"] == engine_url
    assert call["gen_ai.usage.output_tokens"] > 0
    assert CANARY not in str(receiver.requests)


def check_content(spans: list[dict[str, Any]]) -> None:
    """The roots, and they alone, have the prompt, the call, its result and the answer."""
    told = [span for span in spans if any(name.endswith(".messages") for name in span)]
    assert [span["rl.slot"] for span in sorted(told, key=lambda span: span["rl.slot"])] == [0, 1]
    prompt, *rest = json.loads(told[0]["gen_ai.input.messages"]) + json.loads(told[0]["gen_ai.output.messages"])
    assert prompt["role"] == "user"
    assert CANARY in prompt["parts"][0]["content"]
    assert [(each["role"], each["parts"][0]["type"]) for each in rest] == [
        ("assistant", "tool_call"),
        ("tool", "tool_call_response"),
        ("assistant", "text"),
    ]
    assert rest[0]["parts"][0]["name"] == "calculator"


def check_drawing(events: list[dict[str, Any]], engine_url: str) -> None:
    check_pairs(events)
    (group,) = [name for name in processes(events) if name.startswith("group ")]
    assert {"slot 0", "slot 1", "turn 0", "turn 1", "tool", "reward", "ready", "leased"} <= set(begun(events, group))
    calls = [event for event in events if event["name"] == "call" and event["ph"] == "b"]
    assert {event["pid"] for event in calls} == {processes(events)[f"engine {engine_url}"]}
    assert len(calls) == 4
    assert begun(events, "trainer")["read"]["args"]["trainer_step"] == 3
    assert not [event for event in events if event["name"].endswith("(open)")]


def test_a_run_that_the_server_does_not_know_is_told_in_one_line(forebay: Forebay, server: ServerProcess) -> None:
    done = forebay("trace", "export", "nobody", "--to", "perfetto", "--url", server.url)
    assert done.code == 2
    assert [line.partition(":")[0] for line in done.err.splitlines()] == ["error", "hint"]
    assert f"the server at {server.url} has no such run" in done.err
