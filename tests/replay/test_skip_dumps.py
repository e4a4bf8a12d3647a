"""Dumps on a disk: what is damaged or foreign, what cannot be written, and what was made with other arguments."""

import errno
import json
import logging
import os
import pickle
import random
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.numpy import load_file

from forebay.core import durable
from forebay.core.errors import InvalidInput
from forebay.replay.skip import SkipManager, register_codec, step_locks, values
from forebay.replay.skip.dumps import DumpFolder, DumpUnusable, _sealed
from tests.replay.skip_kit import Rollouts, config, folder, run_python


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_a_dump_is(tmp_path: Path) -> None:
    dumps = DumpFolder(tmp_path / "a" / "b")
    value = {"tokens": numpy.arange(6, dtype=numpy.int32).reshape(2, 3), "mask": numpy.ones(3, dtype=bool), "x": 0.5}
    dumps.write(57, value, {"prompts": "ab"})
    lasting = tmp_path / "a" / "b" / "57"
    assert sorted(os.listdir(lasting)) == ["gen_batch.json", "gen_batch.safetensors", "meta.json"]
    meta = json.loads((lasting / "meta.json").read_text())
    assert list(meta) == ["global_steps", "format", "files", "arguments", "created_at_s", "blake2b"]
    assert (meta["global_steps"], meta["format"], meta["arguments"]) == (57, 1, {"prompts": "ab"})
    for name, proof in meta["files"].items():
        assert (proof["num_bytes"], len(proof["blake2b"])) == ((lasting / name).stat().st_size, 64)
    tree = json.loads((lasting / "gen_batch.json").read_text())
    assert tree == {
        "tokens": {"$tensor": "result/tokens", "as": "numpy"},
        "mask": {"$tensor": "result/mask", "as": "numpy"},
        "x": 0.5,
    }
    for name, array in load_file(lasting / "gen_batch.safetensors").items():
        numpy.testing.assert_array_equal(array, value[name.removeprefix("result/")], strict=True)
    for path in (tmp_path / "a", tmp_path / "a" / "b", lasting, *lasting.iterdir()):
        assert path.stat().st_mode & 0o077 == 0


def flipped(path: Path, at: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def test_any_flipped_bit_is_seen(tmp_path: Path) -> None:
    dumps = DumpFolder(tmp_path)
    dumps.write(1, {"tokens": numpy.arange(4), "text": "x" * 20}, {"prompts": "ab"})
    rng = random.Random(1)
    for path in (tmp_path / "1").iterdir():
        whole = path.read_bytes()
        for at in range(rng.randrange(3), len(whole), 3):
            flipped(path, at, rng.randrange(8))
            with pytest.raises(DumpUnusable):
                dumps.load(1)
            path.write_bytes(whole)
    found = dumps.load(1)
    assert found is not None
    assert found.value["text"] == "x" * 20


def damaged_value(step: Path) -> None:
    flipped(step / "gen_batch.json", 5, 1)


def damaged_meta(step: Path) -> None:
    flipped(step / "meta.json", 20, 1)


def shorter(step: Path) -> None:
    path = step / "gen_batch.json"
    path.write_bytes(path.read_bytes()[:-1])


def longer(step: Path) -> None:
    with (step / "gen_batch.json").open("ab") as file:
        file.write(b" ")


def without_value(step: Path) -> None:
    (step / "gen_batch.json").unlink()


def without_meta(step: Path) -> None:
    (step / "meta.json").unlink()


def pipe_for_meta(step: Path) -> None:
    (step / "meta.json").unlink()
    os.mkfifo(step / "meta.json")


def pipe_for_value(step: Path) -> None:
    (step / "gen_batch.json").unlink()
    os.mkfifo(step / "gen_batch.json")


def folder_for_value(step: Path) -> None:
    (step / "gen_batch.json").unlink()
    (step / "gen_batch.json").mkdir()


def a_file(step: Path) -> None:
    shutil.rmtree(step)
    step.write_text("mine")


def dangling(step: Path) -> None:
    shutil.rmtree(step)
    step.symlink_to("nowhere")


def of_another_step(step: Path) -> None:
    shutil.rmtree(step)
    shutil.copytree(step.with_name("1"), step)


def of_verl(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()
    (step / "meta.json").write_text('{"global_steps": 2}')
    (step / "gen_batch.dp").write_bytes(pickle.dumps(Bomb(step.with_name("exploded"))))


def names_of_other_folders(step: Path) -> None:
    body = json.loads((step / "meta.json").read_text())
    del body["blake2b"]
    body["files"] = {"../1/gen_batch.json": body["files"]["gen_batch.json"]}
    (step / "meta.json").write_bytes(_sealed(json.dumps(body).encode()))


def sealed_nonsense(step: Path) -> None:
    (step / "meta.json").write_bytes(_sealed(b"nonsense}"))


class Bomb:
    """A pickle of it makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (os.mkdir, (str(self.path),))


DAMAGE = [
    damaged_value, damaged_meta, shorter, longer, without_value, without_meta, pipe_for_meta, pipe_for_value,
    folder_for_value, a_file, dangling, of_another_step, of_verl, names_of_other_folders, sealed_nonsense,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_or_foreign_is_put_aside_and_made_again(
    damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    SkipManager.init(config(tmp_path))
    rollouts = Rollouts()
    for step in (1, 2, 3):
        rollouts.at(step)
    damage(folder(tmp_path) / "2")
    SkipManager.init(config(tmp_path))
    assert [rollouts.at(step)["call"] for step in (1, 2, 3, 1, 2, 3)] == [1, 4, 3, 1, 4, 3]
    assert os.path.lexists(folder(tmp_path) / "2.damaged-1")
    assert "2.damaged-1" in warnings_of(caplog)[-1]
    assert not (folder(tmp_path) / "exploded").exists()
    damage(folder(tmp_path) / "2")
    assert [rollouts.at(step)["call"] for step in (2, 2)] == [5, 5]
    assert os.path.lexists(folder(tmp_path) / "2.damaged-2")


@pytest.mark.parametrize("damage", DAMAGE)
def test_repeat_takes_another_dump_in_place_of_a_damaged_one(
    damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    SkipManager.init(config(tmp_path))
    rollouts = Rollouts()
    for step in (1, 2):
        rollouts.at(step)
    damage(folder(tmp_path) / "2")
    SkipManager.init(config(tmp_path, action="repeat"))
    assert [rollouts.at(step)["call"] for step in (2, 3, 2, 3)] == [1, 1, 1, 1]
    assert len(warnings_of(caplog)) in (1, 2)
    assert str(folder(tmp_path) / "2") in caplog.text


def test_what_is_no_folder_of_a_step_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("not_int", "-1", "007", "1.5", "2", "٣"):
        (folder(tmp_path) / name).mkdir(parents=True)
    (folder(tmp_path) / "not_int" / "gen_batch.dp").touch()
    SkipManager.init(config(tmp_path, action="repeat"))
    rollouts = Rollouts()
    assert [rollouts.at(step)["call"] for step in (1, 2, 3)] == [1, 1, 1]
    assert (warnings_of(caplog), (folder(tmp_path) / "not_int" / "gen_batch.dp").exists()) == ([], True)
    SkipManager.init(config(tmp_path))
    assert [rollouts.at(2)["call"] for _ in range(2)] == [2, 2]
    assert warnings_of(caplog) == []


def test_a_dump_of_a_newer_format_stays_where_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    SkipManager.init(config(tmp_path))
    rollouts = Rollouts()
    rollouts.at(1)
    path = folder(tmp_path) / "1" / "meta.json"
    newer = _sealed(b'{"format":2,"parts":["gen_batch.json"]}')
    path.write_bytes(newer)
    SkipManager.init(config(tmp_path))
    assert [rollouts.at(1)["call"] for _ in range(2)] == [2, 3]
    assert path.read_bytes() == newer
    assert "it is of format 2, and this Forebay knows 1" in caplog.text
    assert len(warnings_of(caplog)) == 2  # that it is not used, and that nothing is dumped in its place


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
    assert len([line for line in printed if "training goes on" in line]) == 1
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

    monkeypatch.setattr(step_locks.fcntl, "flock", no_locks)
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

    monkeypatch.setattr(durable.os, "fsync", interrupted)
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
    assert "another prompts than the call has now" in told[0]


def test_another_steps_dump_is_meant_to_be_of_other_arguments(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    SkipManager.init(config(tmp_path, action="repeat"))
    for step, prompt in ((1, "a"), (2, "b"), (3, "c")):
        SkipManager.set_step(step)
        assert generate([prompt]) == ["a", "answer"]
    assert warnings_of(caplog) == []


class Batch:
    """What a trainer's own class may look like."""

    def __init__(self, tensors: dict[str, Any], meta_info: dict[str, Any]) -> None:
        self.tensors = tensors
        self.meta_info = meta_info


def test_a_class_with_a_codec_is_dumped_and_loaded(tmp_path: Path) -> None:
    register_codec(
        Batch, lambda batch: (batch.tensors, batch.meta_info), lambda tree: Batch(tensors=tree[0], meta_info=tree[1])
    )
    SkipManager.init(config(tmp_path))
    SkipManager.set_step(1)

    @SkipManager.annotate(role="rollout")
    def make(prompts: Batch) -> list[Batch]:
        return [Batch({"ids": prompts.tensors["ids"] * 2}, {"n": 1})]

    made, loaded = [make(Batch({"ids": numpy.arange(3)}, {})) for _ in range(2)]
    assert made[0] is not loaded[0]
    assert isinstance(loaded[0], Batch)
    numpy.testing.assert_array_equal(loaded[0].tensors["ids"], [0, 2, 4])
    assert loaded[0].meta_info == {"n": 1}


def test_a_dump_whose_codec_is_missing_says_so_and_is_not_damaged(tmp_path: Path) -> None:
    register_codec(Batch, lambda batch: batch.tensors, lambda tree: Batch(tree, {}))
    SkipManager.init(config(tmp_path))
    rollouts = Rollouts()
    rollouts.at(1, Batch({}, {}))
    values._codecs_by_name.clear()
    for _ in range(2):
        with pytest.raises(InvalidInput, match=r"\.Batch, for which no codec is registered"):
            rollouts.at(1)
    assert [path.name for path in folder(tmp_path).glob("1*")] == ["1"]


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
from forebay.replay.skip import SkipManager
SkipManager.init({"skip": {"rollout": {"enable": True, "dump_dir": sys.argv[1], "steps": [1]}}})
SkipManager.set_step(1)
@SkipManager.annotate(role="rollout")
def generate():
    raise AssertionError("there is a dump")
try:
    generate()
except ImportError as error:
    print(error, "|", error.hint)
"""


def test_a_dump_whose_package_is_missing_says_which(tmp_path: Path) -> None:
    SkipManager.init({"skip": config(tmp_path)["skip"]})
    Rollouts().at(1, numpy.arange(3))
    assert run_python(WITHOUT_NUMPY, tmp_path) == "numpy is not installed | pip install 'forebay[torch]'\n"
    assert [path.name for path in tmp_path.glob("*/*/1*")] == ["1"]


def test_a_codec_that_fails_costs_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: object) -> Any:
        raise ZeroDivisionError

    register_codec(Batch, fail, fail)
    SkipManager.init(config(tmp_path))
    SkipManager.set_step(1)

    @SkipManager.annotate(role="rollout")
    def make() -> Batch:
        return Batch({}, {})

    assert isinstance(make(), Batch)
    register_codec(Batch, lambda batch: batch.meta_info, fail)
    assert isinstance(make(), Batch)
    assert isinstance(make(), Batch)
    assert "ZeroDivisionError" in caplog.text
    assert [path.name for path in folder(tmp_path).glob("1*")] == ["1"]


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
