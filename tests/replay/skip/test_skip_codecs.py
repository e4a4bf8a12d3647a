"""Classes with codecs, and dumps whose codec or package is not there."""

from pathlib import Path
from typing import Any

import numpy
import pytest

from forebay.core.errors import InvalidInput
from forebay.replay.skip import SkipManager, register_codec, values
from tests.replay.skip.skip_kit import Rollouts, config, folder, run_python


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
