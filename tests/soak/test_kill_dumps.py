"""``kill -9`` of processes in the middle of their dumps, again and again over the same folder."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forebay.replay.skip.dumps import DumpFolder, DumpUnusable

pytestmark = pytest.mark.soak

ROUNDS = int(os.environ.get("ROUNDS", "10"))
"""By hand, `ROUNDS=50`."""
NUM_STEPS = 4
LIMIT_S = 60.0

TRAINER = """
import sys
import numpy
from pathlib import Path
from forebay.replay.skip import SkipManager
dump_dir, num_steps = sys.argv[1], int(sys.argv[2])
steps = list(range(num_steps))
SkipManager.init({"skip": {"rollout": {"enable": True, "dump_dir": dump_dir, "steps": steps}}})
executed = 0
@SkipManager.annotate(role="rollout")
def generate(step):
    global executed
    executed += 1
    return {"step": step, "tokens": numpy.full(2_000_000, step), "texts": [str(step)] * 20_000}
print("begin", flush=True)
for step in steps:
    SkipManager.set_step(step)
    result = generate(step)
    assert result["step"] == step and (result["tokens"] == step).all() and set(result["texts"]) == {str(step)}
    print("done", step, flush=True)
print("executed", executed, flush=True)
"""


def start(dump_dir: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-P", "-c", TRAINER, str(dump_dir), str(NUM_STEPS)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def dumped(dump_dir: Path) -> set[int]:
    """The steps that have a dump: whole, and of that step."""
    found = set()
    for path in dump_dir.glob("*/*"):
        dumps = DumpFolder(path)
        for step in dumps.steps():
            dump = dumps.load(step)
            assert dump is not None
            assert dump.value["step"] == step
            found.add(step)
    return found


def wait_for_a_dump(dump_dir: Path, processes: "list[subprocess.Popen[str]]") -> None:
    """Return when one of them writes one, or all have what they need."""
    deadline = time.monotonic() + LIMIT_S
    while not any(dump_dir.glob("*/*/.*.partial")) and any(each.poll() is None for each in processes):
        assert time.monotonic() < deadline


def test_a_dump_survives_kills_wholly_or_not_at_all(tmp_path: Path) -> None:
    """A dump that was acknowledged is there; what a kill has left is no dump, and is cleared away."""
    rng = random.Random(ROUNDS)
    num_in_a_dump = 0
    for number in range(10 * ROUNDS):
        if number >= ROUNDS and num_in_a_dump:  # on a machine that is busy elsewhere, it takes more of them
            break
        dump_dir = tmp_path / str(number // 2)
        two = [start(dump_dir) for _ in range(2)]
        for process in two:
            assert process.stdout is not None
            assert process.stdout.readline() == "begin\n"
        wait_for_a_dump(dump_dir, two)
        # At once, or when the dump may be done: first both, then one of those who find what these have left.
        time.sleep(rng.choice([0, rng.uniform(0, 0.03)]))
        for process in two[number % 2 :]:
            process.kill()
        acknowledged: set[int] = set()
        for process in two:
            printed, errors = process.communicate(timeout=LIMIT_S)
            assert process.returncode in (0, -9), errors
            assert errors == ""
            acknowledged |= {int(line.split()[1]) for line in printed.splitlines() if line.startswith("done ")}
        num_in_a_dump += any(dump_dir.glob("*/*/.*.partial"))
        try:
            assert acknowledged <= dumped(dump_dir)
        except DumpUnusable as unusable:
            pytest.fail(f"round {number}: {unusable}")
        assert not list(dump_dir.glob("*/*/*.damaged-*"))
    assert num_in_a_dump > 0
    for dump_dir in tmp_path.iterdir():
        for expected in (NUM_STEPS - len(dumped(dump_dir)), 0):
            printed, errors = start(dump_dir).communicate(timeout=LIMIT_S)
            assert (printed.splitlines()[-1], errors) == (f"executed {expected}", "")
        assert not list(dump_dir.glob("*/*/.*.partial"))
