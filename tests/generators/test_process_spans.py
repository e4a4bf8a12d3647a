"""Spans of processes that a rollout starts by itself: real run processes, with children of every kind."""

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from forebay.engines.scripted import ScriptedEngine
from forebay.telemetry.tracing.records import Head, RolloutSummary, Span
from tests.generators.run_trace_kit import RUN_ID, run_traced

STARTS_PROCESSES = """
import multiprocessing
import os
import random
import subprocess
import sys
from forebay.generators.base import BaseGenerator, query_single_turn
from forebay.telemetry import span

TASK_TYPE = "traced"
CHILD = "import random; random.seed(1)\\nfrom forebay.telemetry import span\\nwith span('command'): pass"

def work(number):
    random.seed(number)
    with span("worker", number=number):
        with span("inside"):
            pass

def rollout(client, messages, params):
    random.seed(1)
    result = query_single_turn(client, messages, params)
    with span("parallel"):
        children = [multiprocessing.get_context("fork").Process(target=work, args=(n,)) for n in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join()
    subprocess.run([sys.executable, "-P", "-c", CHILD], check=True)
    return result

async def reward(item):
    return 1.0

def run_rollout(data):
    BaseGenerator.from_payload(data).entry(data["input_file"], rollout, reward)
"""


async def test_children_of_a_rollout_add_spans_to_it_and_no_ids_clash(buffer: Any, tmp_path: Path) -> None:
    async with ScriptedEngine(lambda _: "4") as engine:
        run = await run_traced(buffer, tmp_path, STARTS_PROCESSES, engine.url, ["a", "b"])
    spans = run.of(Span)
    assert max(Counter(span.id for span in spans).values()) == 1
    by_id = {span.id: span for span in spans}
    for summary in run.of(RolloutSummary):
        workers = run.spans(summary, "worker")
        assert sorted(span.at["number"] for span in workers) == [0, 1]
        assert {(by_id[span.up].name, span.turn) for span in workers} == {("parallel", 0)}
        assert {by_id[span.up].name for span in run.spans(summary, "inside")} == {"worker"}
    commands = [span for span in spans if span.name == "command"]
    assert [(span.uid, span.up) for span in commands] == [("", ""), ("", "")]  # it was told of the run alone
    heads = [record for record in run.records() if isinstance(record, Head)]
    assert {head.run_id for head in heads} == {RUN_ID}
    assert len({head.pid for head in heads}) == len(heads) == 1 + 4 + 2


def test_a_generator_elsewhere_without_a_trace_runs_untraced(tmp_path: Path) -> None:
    """As one that writes to the buffer from another machine."""
    program = "from forebay.telemetry import span, traceparent\nwith span('x'): assert traceparent() is None"
    subprocess.run([sys.executable, "-P", "-c", program], cwd=tmp_path, check=True, timeout=60)
    assert not list(tmp_path.iterdir())
