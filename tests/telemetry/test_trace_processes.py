"""Processes that trace one run: forked, started, killed."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

from tests.kit import poll_until
from tests.telemetry.trace_kit import RUN, environment, kinds, lines_of, of_kind, python, whole_lines

PARENT = f"""
import os, sys, time, random, multiprocessing, threading
from forebay.telemetry import span, traceparent
from forebay.telemetry.tracing.tracer import TraceSettings, start_tracing, trace_environment
tracer = start_tracing(TraceSettings(folder=os.environ["FOLDER"], run_id="{RUN}"), "run")
attempt = tracer.attempt("uid", "group", 1)
"""


def run(program: str, folder: Path) -> str:
    process = python(PARENT + program, env={**os.environ, "FOLDER": str(folder)})
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return output


def files_of(folder: Path) -> dict[int, list[dict[str, object]]]:
    found = {}
    for path in folder.glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[lines[0]["pid"]] = lines
    return found


def test_a_forked_child_has_a_file_a_thread_and_a_head_of_its_own(tmp_path: Path) -> None:
    run(
        """
open_before = attempt.begin("of the parent")
with attempt.activate(), span("before"):
    child = os.fork()
    for number in range(100):
        with span("after", child=child == 0):
            pass
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
open_before.end()
attempt.summary(instance=1)
""",
        tmp_path,
    )
    files = files_of(tmp_path)
    assert len(files) == 2
    assert all(lines[0]["kind"] == "head" for lines in files.values())
    child, parent = sorted(files.values(), key=len)
    assert {line["name"] for line in child[1:]} == {"after"}
    assert sorted({str(line["name"]) for line in parent if line["kind"] == "span"}) == [
        "after",
        "attempt",
        "before",
        "of the parent",
    ]
    ids = [line["id"] for line in lines_of(tmp_path) if line["kind"] == "span"]
    assert len(ids) == len(set(ids)) == 203
    assert {line["uid"] for lines in files.values() for line in lines if line["kind"] == "span"} == {"uid"}


def test_a_child_that_records_nothing_makes_no_file(tmp_path: Path) -> None:
    run(
        """
with attempt.begin("queue"):
    tracer.flush()
    if (child := os.fork()) == 0:
        sys.exit(0)
    os.waitpid(child, 0)
""",
        tmp_path,
    )
    assert len(files_of(tmp_path)) == 1
    assert kinds(tmp_path)["head"] == 1


POOLS = f"""
import multiprocessing
from forebay.telemetry import span
from forebay.telemetry.tracing.tracer import TraceSettings, start_tracing

def work(method):
    with span("work", method=method):
        pass

if __name__ == "__main__":
    tracer = start_tracing(TraceSettings(folder="trace", run_id="{RUN}"), "run")
    with span("parent"):
        for method in ("fork", "spawn", "forkserver"):
            children = [multiprocessing.get_context(method).Process(target=work, args=(method,)) for _ in range(2)]
            [child.start() for child in children]
            [child.join() for child in children]
"""


def test_a_child_of_a_process_whose_trace_rests_has_its_own_head(tmp_path: Path) -> None:
    run(
        """
with attempt.begin("queue"):
    pass
tracer.rest()
if (child := os.fork()) == 0:
    with span("child"):
        pass
    sys.exit(0)
os.waitpid(child, 0)
print(child)
""",
        tmp_path,
    )
    heads = of_kind(tmp_path, "head")
    assert len({head["pid"] for head in heads}) == 2
    assert {path.name.split("-")[2].split(".")[0] for path in tmp_path.iterdir()} == {str(h["pid"]) for h in heads}


def test_children_of_multiprocessing_lose_nothing_however_they_are_started(tmp_path: Path) -> None:
    (tmp_path / "pools.py").write_text(POOLS)
    subprocess.run([sys.executable, "-P", "pools.py"], cwd=tmp_path, check=True, timeout=60)
    works = [line["at"]["method"] for line in of_kind(tmp_path / "trace", "span") if line["name"] == "work"]
    assert sorted(works) == ["fork", "fork", "forkserver", "forkserver", "spawn", "spawn"]


def test_a_process_that_a_rollout_starts_adds_spans_to_it(tmp_path: Path) -> None:
    parent = "00-" + "ab" * 16 + "-00000000000000cd-01"
    place = {"folder": str(tmp_path), "run_id": RUN, "uid": "uid", "group": "group", "attempt": 2}
    program = """
from forebay.telemetry import span, traceparent
with span("compile", files=3):
    inside = traceparent()
print(traceparent(), inside)
"""
    process = python(program, env=environment(tmp_path, FOREBAY_TRACE=json.dumps(place), TRACEPARENT=parent))
    output = process.communicate(timeout=60)[0].split()
    [line] = of_kind(tmp_path, "span")
    assert (line["uid"], line["group"], line["attempt"], line["up"]) == ("uid", "group", 2, "00000000000000cd")
    assert output[0] == parent
    assert output[1].split("-")[2] == line["id"]


def test_what_a_rollout_hands_on_is_what_its_processes_understand(tmp_path: Path) -> None:
    run(
        """
import subprocess
code = "from forebay.telemetry import span\\nwith span('child'): pass"
with attempt.activate(), span("environment"):
    subprocess.run([sys.executable, "-P", "-c", code], env={**os.environ, **trace_environment()}, check=True)
subprocess.run([sys.executable, "-P", "-c", code.replace("child", "of the run")], check=True)
""",
        tmp_path,
    )
    spans = {line["name"]: line for line in of_kind(tmp_path, "span")}
    assert spans["child"]["up"] == spans["environment"]["id"]
    assert spans["child"]["uid"] == "uid"
    assert spans["child"]["attempt"] == 1
    assert "uid" not in spans["of the run"]


def test_a_rollout_that_is_not_kept_is_not_kept_in_its_processes(tmp_path: Path) -> None:
    place = {"folder": str(tmp_path), "run_id": RUN, "uid": "uid", "group": "group", "rate": 0.0}
    program = "from forebay.telemetry import span\nwith span('compile'): pass"
    python(program, env=environment(tmp_path, FOREBAY_TRACE=json.dumps(place))).communicate(timeout=60)
    assert not list(tmp_path.iterdir())


def test_nonsense_in_the_environment_traces_nothing(tmp_path: Path) -> None:
    program = "from forebay.telemetry import span, traceparent\nwith span('x'): print(traceparent())"
    for value in ("{", '{"folder": 3}'):
        process = python(program, env=environment(tmp_path, FOREBAY_TRACE=value, TRACEPARENT="x"), cwd=tmp_path)
        assert process.communicate(timeout=60)[0] == "None\n"
        assert process.returncode == 0
    assert not list(tmp_path.iterdir())


def test_users_seeds_make_no_ids_clash_and_ids_change_no_users_numbers(tmp_path: Path) -> None:
    program = """
import random
random.seed(42)
from forebay.telemetry import span
for _ in range(200):
    with span("x"): pass
print(random.random())
"""
    processes = [python(program, env=environment(tmp_path)) for _ in range(3)]
    outputs = {process.communicate(timeout=60)[0] for process in processes}
    assert outputs == {f"{random.Random(42).random()}\n"}
    ids = [line["id"] for line in of_kind(tmp_path, "span")]
    assert len(set(ids)) == len(ids) == 600


def test_after_kill_9_all_whole_lines_are_readable_and_what_hung_is_open(tmp_path: Path) -> None:
    program = (
        PARENT
        + """
hung = attempt.begin("engine", begun=tracer.now() - 11_000_000_000, engine="http://engine:1")
while True:
    for _ in range(100):
        with attempt.begin("tool"):
            pass
    time.sleep(0.001)
"""
    )
    process = python(program, env={**os.environ, "FOLDER": str(tmp_path)})

    def has_written() -> bool:
        written = b"".join(line for path in tmp_path.glob("*.jsonl") for line in whole_lines(path))
        return b'"kind":"open"' in written and written.count(b'"kind":"span"') > 200

    poll_until(has_written)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    [path] = tmp_path.glob("*.jsonl")
    whole = [json.loads(line) for line in whole_lines(path)]
    assert whole[0]["kind"] == "head"
    assert [line["name"] for line in whole if line["kind"] == "open"] == ["engine"]


def test_what_was_recorded_last_is_there_when_a_process_ends(tmp_path: Path) -> None:
    run("with attempt.begin('last'): pass", tmp_path)
    assert "last" in {line["name"] for line in of_kind(tmp_path, "span")}
