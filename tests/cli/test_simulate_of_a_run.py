"""Runs of a real server, simulated again from the traces that it hands out."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from forebay.workers.simulator.cost import EngineCost
from tests.cli.conftest import Forebay
from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, poll_until, write_generator
from tests.simulator.recorded_kit import SMALL, STEPS, recorded_run, small_scenario

LENGTHS = {f"i{instance} {slot}": 10 + 4 * instance + slot for instance in range(8) for slot in range(4)}
"""Tokens of the answer to each prompt, which names the rollout; one of them ends it."""


def answer(call: ScriptedCall) -> Reply:
    prompt = call.messages[-1]["content"]
    return Reply(text="x" * (LENGTHS[prompt] - 1), tokens_per_s=1_000)


def simulated(forebay: Forebay, run: NativeRun, *options: object) -> Json:
    """What ``forebay simulate RUN --json`` says."""
    outcome = forebay("simulate", run.run_id, "--url", run.server.url, *options, "--seeds", 1, "--json")
    assert outcome.code == 0, outcome.err
    stated: dict[str, Any] = json.loads(outcome.out)
    return stated


def test_what_a_run_process_records_is_simulated(forebay: Forebay, make_server: MakeServer, tmp_path: Path) -> None:
    write_generator(tmp_path / "tasks", STEPS, "steps_generator.py")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps({'instance_id': f'i{n}', 'prompt': f'i{n}'})}\n" for n in range(8)))
    server = make_server(generators=tmp_path / "tasks")
    with (
        ScriptedEngine(answer, has_metrics=False).in_thread() as first,
        ScriptedEngine(answer, has_metrics=False).in_thread() as second,
    ):
        urls = [first.url, second.url]
        began_s = time.monotonic()
        run = server.start_run("steps", group_size=4, remote_engine_url=urls, input_file=str(rows), num_process=4)
        poll_until(lambda: run.view()["state"] in ("finished", "failed"), 60)
        took_s = time.monotonic() - began_s
    stated = simulated(forebay, run, "--policy", "pull,static")
    answers = stated["answers"]
    assert (answers["num_answers"], answers["num_groups"], answers["group_size"]) == (len(LENGTHS), 8, 4)
    assert answers["longest"] == max(LENGTHS.values())
    assert (stated["run"]["num_engines"], stated["run"]["num_process"]) == (2, 4)
    assert sorted(stated["fit"]["costs"]) == sorted(urls)
    assert 0 < stated["self_check"]["recorded_s"] <= took_s
    assert [row["policy"] for row in stated["rows"]] == ["pull", "static"]
    assert all(row["measures"]["makespan_s"]["mean"] > 0 for row in stated["rows"])


def test_a_simulation_takes_as_long_as_the_trace_of_a_run_says_that_it_took(
    forebay: Forebay, make_server: MakeServer, tmp_path: Path
) -> None:
    """The trace is that of a run in virtual time: its moments do not hang on this machine."""
    slow, fast = EngineCost(places=64), EngineCost(places=64, speed=2.0)
    path, planted = recorded_run(tmp_path, small_scenario((slow, fast), prompts=SMALL.prompts(32, 1), num_process=8))
    server = make_server()
    run = server.start_run(group_size=4)
    run.stop()
    run.wait_for_state("stopped")
    trace = server.data_dir / "runs" / run.run_id / "trace"
    trace.mkdir(exist_ok=True)  # the server's own records may be in it, which are of no rollout
    shutil.copy(path, trace / f"{run.run_id}-1.1.jsonl")
    stated = simulated(forebay, run, "--policy", "pull,static")
    assert stated["answers"]["num_answers"] == 128
    assert stated["self_check"]["recorded_s"] == pytest.approx(planted.makespan_s, rel=0.001)
    assert abs(stated["self_check"]["error"]) <= 0.01
    speeds = {url: cost["speed"] for url, cost in stated["fit"]["costs"].items()}
    assert speeds["http://engine-1"] / speeds["http://engine-0"] == pytest.approx(2, rel=0.03)
    pull, static = (row["measures"]["makespan_s"]["mean"] for row in stated["rows"])
    assert static > 1.1 * pull  # it deals them out evenly, to engines that are not equal
