"""A step that one fault held up: whoever asks for its profile reads the cause in the first sentence."""

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, ServerProcess, poll_until
from tests.profile.planting import TASKS, profile

pytestmark = pytest.mark.profile

NUM_GROUPS, GROUP_SIZE = 12, 2
FAULT_S = 6.0
LATE_S = 12.0
"""Longer: until the trainer here knows that all are ready, some time has passed already."""
TOKENS = 40
USUAL_S = 0.2
LONG = 1_200
"""Tokens of the long answer: as fast as the others, it takes ``FAULT_S``."""


@pytest.fixture(scope="module")
def server(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    tasks = tmp_path_factory.mktemp("planted") / "tasks"
    return module_servers(generators=Path(shutil.copytree(TASKS, tasks)), start_wait_s=60)


async def script(call: ScriptedCall) -> Reply:
    """The first turn looks something up, the second one answers; the prompt says what is wrong."""
    told = json.loads(call.messages[0]["content"])
    fault, seconds = told.get("fault"), told.get("seconds", 0.0)
    if call.messages[-1]["role"] == "user":
        arguments = json.dumps({"seconds": seconds if fault == "tool" else 0.1})
        call_of_look = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": arguments}}
        return Reply(tool_calls=[call_of_look])  # at once: nobody could go on with half a call
    text = "a " * ((LONG if fault == "long_answer" else TOKENS) // 2)
    # Between two steps calls are ended, and gone on with.
    rest = text[len(call.said) :]
    takes_s = seconds if fault in ("stalled_engine", "long_answer") else USUAL_S
    return Reply(text=rest, delay_s=takes_s * len(rest) / len(text))


def run_two_steps(server: ServerProcess, folder: Path, task_type: str, fault: str) -> NativeRun:
    """A step in which everything is as it should be, and warms up; and one with the fault.

    The fault's row is the last one: it gets a place when the last rollout of the first step has ended. A loop is
    blocked once the second step has begun, so that the first step's samples are written.
    """
    begun = folder / f"{task_type}.begun"
    rows: list[Json] = [{"instance_id": f"row-{n}"} for n in range(2 * NUM_GROUPS)]
    if fault != "late_trainer":
        rows[-1] |= {"fault": fault, "seconds": FAULT_S, "begun": str(begun)}
    for row in rows:
        row["prompt"] = json.dumps({name: row[name] for name in ("fault", "seconds") if name in row})
    input_file = folder / f"{task_type}.jsonl"
    input_file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with ExitStack() as stack:
        engines = [stack.enter_context(ScriptedEngine(script).in_thread()) for _ in range(2)]
        run = server.start_run(
            task_type,
            group_size=GROUP_SIZE,
            input_file=str(input_file),
            remote_engine_url=",".join(engine.url for engine in engines),
            num_process=GROUP_SIZE * NUM_GROUPS,
            num_reward_workers=4,
            oversampling={"groups_per_step": NUM_GROUPS},
            sampling_params={"max_tokens": 4 * LONG},
        )
        for step in range(2):
            run.client.put(f"{run.path}/weight_version", json={"weight_version": step}).raise_for_status()
            if step:
                begun.touch()
            if fault == "late_trainer" and step:
                # By its samples: nobody reads, so that its groups are only looked at now and then.
                poll_until(lambda: run.view()["samples"].get("member") == 2 * NUM_GROUPS * GROUP_SIZE)
                time.sleep(LATE_S)  # the trainer is busy: that is the fault
            batch = run.read(num_groups=NUM_GROUPS, wait_s=60, step=step)
            run.ack(batch)
        run.wait_for_state("finished")
    return run


FAULTS = ("tool", "stalled_engine", "long_answer", "reward", "blocked_loop", "late_trainer")


@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_sentence_names_what_held_a_run_up(server: ServerProcess, tmp_path: Path, fault: str) -> None:
    """A run of the base generator, and one of an agent."""
    with ThreadPoolExecutor() as threads:
        task_types = ("planted", "planted_agent")
        runs = list(threads.map(lambda task_type: run_two_steps(server, tmp_path, task_type, fault), task_types))
    for run in runs:
        check(profile(run), fault)


def check(report: Json, fault: str) -> None:
    first = next(finding for finding in report["findings"] if finding["path"].get("step") == "1")
    assert first["cause"] == fault, [finding["sentence"] for finding in report["findings"]]
    planted_s = LATE_S if fault == "late_trainer" else FAULT_S
    whole_s = next(step["seconds"] for step in report["steps"] if step["name"] == "1")
    # On a busy machine, what is usual takes longer too, and all of it is in the step.
    assert 0.7 * planted_s <= first["seconds"] <= whole_s, first["sentence"]
    for step in report["steps"]:
        path_s = sum(part["seconds"] for part in step["critical_path"])
        assert path_s == pytest.approx(step["wait_s"], rel=0.01, abs=0.001)
