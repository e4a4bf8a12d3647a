"""Dumps on a disk: what one is, what cannot be written, and what was made with other arguments."""

import errno
import fcntl
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.numpy import load_file

from forebay.core import files
from forebay.replay.skip import SkipManager
from forebay.replay.skip.dumps import DumpFolder
from tests.replay.skip.skip_kit import Rollouts, config, folder, run_python, warnings_of


def test_what_a_dump_is(tmp_path: Path) -> None:
    dumps = DumpFolder(tmp_path / "a" / "b")
    value = {"tokens": numpy.arange(6, dtype=numpy.int32).reshape(2, 3), "mask": numpy.ones(3, dtype=bool), "x": 0.5}
    dumps.write(57, value, {"prompts": "ab"})
    lasting = tmp_path / "a" / "b" / "57"
    assert sorted(os.listdir(lasting)) == ["gen_batch.json", "gen_batch.safetensors", "meta.json"]
    meta = json.loads((lasting / "meta.json").read_text())
    assert list(meta) == ["global_steps", "num_bytes", "arguments", "created_at_s"]
    assert (meta["global_steps"], meta["arguments"]) == (57, {"prompts": "ab"})
    names = ("gen_batch.json", "gen_batch.safetensors")
    assert meta["num_bytes"] == {name: (lasting / name).stat().st_size for name in names}
    tree = json.loads((lasting / "gen_batch.json").read_text())
    assert tree == {
        "tokens": {"$array": "result/tokens", "as": "numpy"},
        "mask": {"$array": "result/mask", "as": "numpy"},
        "x": 0.5,
    }
    for name, array in load_file(lasting / "gen_batch.safetensors").items():
        numpy.testing.assert_array_equal(array, value[name.removeprefix("result/")], strict=True)
    for path in (tmp_path / "a", tmp_path / "a" / "b", lasting, *lasting.iterdir()):
        assert path.stat().st_mode & 0o077 == 0


class Opaque:
    """No codec knows it."""


def test_a_value_that_cannot_be_stored_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    SkipManager.init(config(tmp_path))
    calls: list[int] = []

    @SkipManager.annotate(role="rollout")
    def generate() -> dict[str, Any]:
        calls.append(1)
        return {"batch": [Opaque()] if len(calls) < 4 else []}

    for step in (1, 2, 3, 3, 3):
        SkipManager.set_step(step)
        generate()
    told = warnings_of(caplog)
    assert len(told) == 1
    assert "step 1 is not dumped: result/batch/0: a tests" in told[0].replace(__name__, "tests")
    assert "register_codec" in told[0]
    assert len(calls) == 4


NO_ROOM = """
import logging, resource, sys
from forebay.replay.skip import SkipManager
logging.basicConfig(level="WARNING", stream=sys.stdout, format="%(message)s")
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
SkipManager.init({"skip": {"rollout": {"enable": True, "dump_dir": sys.argv[1], "steps": [1, 2, 3]}}})
@SkipManager.annotate(role="rollout")
def generate(prompts):
    return prompts
for step in (1, 2, 3):
    SkipManager.set_step(step)
    assert generate("x" * (200_000 if step < 3 else 10))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
SkipManager.set_step(1)
assert generate("x" * 200_000) and generate("") == "x" * 200_000
"""


def test_a_full_disk_is_one_warning_and_training_goes_on(tmp_path: Path) -> None:
    printed = run_python(NO_ROOM, tmp_path).splitlines()
    assert len([line for line in printed if "training continues" in line]) == 1
    dumps = next(tmp_path.glob("*/*"))
    assert sorted(path.name for path in dumps.iterdir() if path.is_dir()) == ["1", "3"]


def test_a_place_that_cannot_be_written_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    for action in ("cache", "repeat"):
        caplog.clear()
        SkipManager.init(config(tmp_path / "file" / action, action=action))
        rollouts = Rollouts()
        assert [rollouts.at(step)["call"] for step in (1, 2, 3)] == [1, 2, 3]
        told = warnings_of(caplog)
        assert len(told) == 1
        assert "is not dumped" in told[0]


@pytest.mark.parametrize("action", ["cache", "repeat"])
def test_where_there_are_no_locks_dumps_are_used_all_the_same(
    action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    SkipManager.init(config(tmp_path, action=action))
    rollouts = Rollouts()
    assert [rollouts.at(1)["call"] for _ in range(2)] == [1, 1]
    assert [each for each in warnings_of(caplog) if "no locks here" not in each] == []
    assert len(warnings_of(caplog)) == 1


def test_what_was_killed_in_a_dump_is_cleared_away(tmp_path: Path) -> None:
    left = folder(tmp_path) / ".1.99-abcd.partial"
    left.mkdir(parents=True)
    (left / "gen_batch.json.partial").write_text("half")
    other = folder(tmp_path) / ".11.99-abcd.partial"
    other.mkdir()
    SkipManager.init(config(tmp_path))
    Rollouts().at(1)
    assert (left.exists(), other.exists()) == (False, True)


def test_an_interrupt_in_a_dump_leaves_nothing_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, number = os.fsync, 0

    def interrupted(fd: int) -> None:
        nonlocal number
        number -= 1
        if number == 0:
            raise KeyboardInterrupt
        real(fd)

    monkeypatch.setattr(files.os, "fsync", interrupted)
    rollouts = Rollouts()
    num_interrupts = 0
    for at in range(1, 50):
        SkipManager.init(config(tmp_path / str(at)))
        number = at
        try:
            rollouts.at(1)
        except KeyboardInterrupt:
            num_interrupts += 1
        else:
            break
        finally:
            number = 0
        names = {path.name for path in folder(tmp_path / str(at)).glob("*")}
        assert names <= {".1.lock", "1"}
        again = rollouts.at(1)
        assert rollouts.at(1) == again
    assert num_interrupts > 5


def test_a_dump_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    dumps = DumpFolder(tmp_path)
    dumps.write(1, "first", {})
    dumps.write(1, "second", {})
    found = dumps.load(1)
    assert found is not None
    assert (found.value, os.listdir(tmp_path)) == ("first", ["1"])


def test_dumps_that_are_made_at_once_without_a_lock_are_one(tmp_path: Path) -> None:
    dumps = DumpFolder(tmp_path)
    barrier = threading.Barrier(8)

    def write(number: int) -> None:
        barrier.wait(30)
        dumps.write(1, [number] * 10_000, {})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    found = dumps.load(1)
    assert found is not None
    assert found.value == [found.value[0]] * 10_000
    assert os.listdir(tmp_path) == ["1"]


@SkipManager.annotate(role="rollout")
def generate(prompts: list[str], trainer: object = None) -> list[str]:
    """Changes what it was given."""
    prompts.append("answer")
    return prompts


def test_a_dump_of_other_arguments_is_used_and_reported_once_a_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    SkipManager.init(config(tmp_path))
    for step in (1, 2):
        SkipManager.set_step(step)
        generate(["a"], object())
    for step in (1, 2, 1):
        SkipManager.set_step(step)
        assert generate(["a"], object()) == ["a", "answer"]
    assert warnings_of(caplog) == []
    for step in (1, 1, 2):
        SkipManager.set_step(step)
        assert generate(["b"], object()) == ["a", "answer"]
        assert generate(prompts=["b"]) == ["a", "answer"]
    told = warnings_of(caplog)
    assert [each[:7] for each in told] == ["step 1:", "step 2:"]
    assert "different arguments than this call has: prompts" in told[0]


def test_another_steps_dump_is_meant_to_be_of_other_arguments(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    SkipManager.init(config(tmp_path, action="repeat"))
    for step, prompt in ((1, "a"), (2, "b"), (3, "c")):
        SkipManager.set_step(step)
        assert generate([prompt]) == ["a", "answer"]
    assert warnings_of(caplog) == []


ONE_COPY = """
import re, sys
from pathlib import Path
import numpy
from forebay.replay.skip import SkipManager
SkipManager.init({"skip": {"rollout": {"enable": True, "dump_dir": sys.argv[1], "steps": [1]}}})
SkipManager.set_step(1)
@SkipManager.annotate(role="rollout")
def generate(is_first):
    assert is_first
    return {"logits": numpy.arange(3_000_000, dtype=numpy.float64)}
def peak():
    return int(re.search("VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
before = peak()
loaded = generate(sys.argv[2] == "first")["logits"]
print((peak() - before) / loaded.nbytes)
assert loaded[-1] == 2_999_999 and loaded.flags.writeable
"""


def test_a_dump_and_a_load_hold_one_copy(tmp_path: Path) -> None:
    for which in ("first", "second"):
        assert 0.9 < float(run_python(ONE_COPY, tmp_path, which)) < 1.3
