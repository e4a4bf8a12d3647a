"""Steps of verl's trainers: batches as they are, fresh uids, other prompts, and dumps that verl wrote."""

import collections
import dataclasses
import enum
import json
import os
import uuid
from pathlib import Path
from typing import Any

import numpy
import pytest
from omegaconf import OmegaConf

from forebay.core.errors import InvalidInput
from forebay.replay.skip import SkipManager
from tests.replay.skip.skip_kit import config, folder, warnings_of
from tests.replay.skip.verl_kit import DataProto, TensorDict, install


@pytest.fixture(autouse=True)
def _verl(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


class Mode(enum.Enum):
    """As users have them in ``meta_info``."""

    TRAIN = "train"


@dataclasses.dataclass
class Settings:
    """The same."""

    top_p: float


def objects(*items: Any) -> Any:
    made = numpy.empty(len(items), dtype=object)
    made[:] = items
    return made


def prompts(*texts: str, **more: Any) -> DataProto:
    import torch

    uids = objects(*(str(uuid.uuid4()) for _ in texts))
    ids = torch.tensor([[len(text)] for text in texts])
    return DataProto(TensorDict({"ids": ids}, (len(texts),)), {"uid": uids, "raw": objects(*texts)}, more)


class Trainer:
    """One of verl, as far as it is decorated."""

    def __init__(self, result: DataProto | None = None) -> None:
        self.result = result
        self.calls = 0

    @SkipManager.annotate(role="rollout")
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        self.calls += 1
        return DataProto(prompts.batch, {}, {"call": self.calls}) if self.result is None else self.result

    def run(self, given: DataProto | None = None, step: int = 1) -> DataProto:
        SkipManager.set_step(step)
        return self.generate_sequences(given or prompts("a", "b"))


def test_fresh_uids_are_no_other_prompts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    SkipManager.init(config(tmp_path))
    trainer = Trainer()
    assert [trainer.run(prompts("a", "b")).meta_info["call"] for _ in range(2)] == [1, 1]
    assert warnings_of(caplog) == []


def test_other_prompts_are_named_by_their_keys_once_a_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    SkipManager.init(config(tmp_path))
    trainer = Trainer()
    trainer.run(prompts("a", "b", temperature=1.0))
    for _ in range(2):
        assert trainer.run(prompts("a", "c", temperature=0.5)).meta_info["call"] == 1
    (told,) = warnings_of(caplog)
    assert "this call has: prompts/meta_info/temperature, prompts/non_tensor_batch/raw (on_mismatch: warn)" in told
    assert trainer.run(prompts("a", "b", n=1)).meta_info["call"] == 1
    assert len(warnings_of(caplog)) == 1


def test_a_key_more_is_another_argument(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    SkipManager.init(config(tmp_path))
    trainer = Trainer()
    for given in (prompts("a"), prompts("a", n=1)):
        trainer.run(given)
    assert "this call has: prompts/meta_info (on_mismatch: warn)" in warnings_of(caplog)[0]


def test_a_mismatch_may_call_the_function(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    SkipManager.init(config(tmp_path, on_mismatch="run"))
    trainer = Trainer()
    calls = [trainer.run(prompts(*texts)).meta_info["call"] for texts in ("ab", "ac", "ab", "ac")]
    assert calls == [1, 2, 1, 3]
    (told,) = warnings_of(caplog)
    assert "prompts/non_tensor_batch/raw (on_mismatch: run)" in told


def test_a_mismatch_may_be_an_error(tmp_path: Path) -> None:
    SkipManager.init(config(tmp_path, on_mismatch="raise"))
    trainer = Trainer()
    trainer.run(prompts("a"))
    with pytest.raises(InvalidInput, match=r"step 1: .*: prompts/non_tensor_batch/raw$") as caught:
        trainer.run(prompts("b"))
    assert str(folder(tmp_path) / "1") in caught.value.hint
    assert (trainer.run(prompts("a")).meta_info["call"], trainer.calls) == (1, 1)


def test_repeat_expects_other_arguments(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    SkipManager.init(config(tmp_path, action="repeat"))
    trainer = Trainer()
    assert [trainer.run(prompts(text)).meta_info["call"] for text in "ab"] == [1, 1]
    assert warnings_of(caplog) == []


def test_a_sample_is_still_found_by_its_uid(tmp_path: Path) -> None:
    SkipManager.init(config(tmp_path, "async_rollout"))
    calls = []

    @SkipManager.annotate(role="async_rollout")
    def generate(prompts: DataProto) -> int:
        calls.append(prompts)
        return len(calls)

    for number in (1, 2, 1):
        generate(DataProto(None, {"uid": objects(f"uid_sample_0_{number}")}))
    assert len(calls) == 2


def test_values_of_real_batches_come_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import torch
    from PIL import Image

    image = Image.fromarray(numpy.arange(48, dtype=numpy.uint8).reshape(4, 4, 3))
    nested = torch.nested.as_nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
    kept = {"order": collections.OrderedDict(b=1, a=2), "tags": (1, None)}
    meta = {**kept, "settings": Settings(0.5), "mode": Mode.TRAIN, "config": OmegaConf.create({"n": [1, "${n.0}"]})}
    inner = TensorDict({"rows": nested}, (2,))
    result = DataProto(TensorDict({"inner": inner}, (2,)), {"images": objects({"image": [image]}, None)}, meta)
    SkipManager.init(config(tmp_path))
    trainer = Trainer(result)
    trainer.run()
    back = trainer.run()
    assert (trainer.calls, type(back)) == (1, DataProto)
    assert back.meta_info == {**kept, "settings": {"top_p": 0.5}, "mode": "train", "config": {"n": [1, 1]}}
    assert list(back.meta_info["order"]) == ["b", "a"]
    assert back.non_tensor_batch["images"][0]["image"][0] == image
    assert back.batch is not None
    rows = back.batch["inner"]["rows"]
    assert (rows.layout, [row.tolist() for row in rows.unbind()]) == (torch.jagged, [[0, 1], [0, 1, 2]])
    (told,) = warnings_of(caplog)
    for words in ("settings: {}.Settings loads as dict", "mode: {}.Mode loads as its value"):
        assert f"result/meta_info/{words.format(__name__)}" in told
    Trainer(DataProto(batch=None)).run(step=2)
    assert Trainer().run(step=2) == DataProto(batch=None)


def test_what_cannot_be_stored_costs_its_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import torch

    batch = TensorDict({"ids": torch.arange(2), "sparse": torch.eye(2).to_sparse()}, (2,))
    result = DataProto(batch, {"locks": objects(print, 1), "raw": objects("a", "b")}, {"x": 1, "fn": [[0], print]})
    SkipManager.init(config(tmp_path))
    Trainer(result).run()
    for _ in range(2):
        SkipManager.init(config(tmp_path))
        back = Trainer().run()
    assert back.batch is not None
    assert (list(back.batch.source), list(back.non_tensor_batch), back.meta_info) == (["ids"], ["raw"], {"x": 1})
    first, *others = warnings_of(caplog)
    assert others == [first, first]  # each run is told
    for key in ("batch/tensors/sparse", "non_tensor_batch/locks", "meta_info/fn"):
        assert f"result/{key} is left out: result/{key}" in first


def test_a_dump_of_verl_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = prompts("a", "b", temperature=numpy.float32(0.5), nested={"rows": [numpy.asfortranarray([[1.5], [2.5]])]})
    given.save_as_verl_does(folder(tmp_path), 1)
    SkipManager.init(config(tmp_path))
    trainer = Trainer()
    back = trainer.run()
    assert (trainer.calls, type(back), warnings_of(caplog)) == (0, DataProto, [])
    assert back.batch is not None
    assert back.batch["ids"].tolist() == [[1], [1]]
    assert list(back.non_tensor_batch["uid"]) == list(given.non_tensor_batch["uid"])
    assert back.meta_info["temperature"] == numpy.float32(0.5)
    numpy.testing.assert_array_equal(back.meta_info["nested"]["rows"][0], [[1.5], [2.5]], strict=True)
    SkipManager.init(config(tmp_path, action="repeat"))
    assert trainer.run(step=3).meta_info["temperature"] == numpy.float32(0.5)


class Bomb:
    """A pickle of it makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


class Pointers:
    """Its pickle is an array of objects whose bytes are addresses: NumPy would follow them."""

    def __reduce__(self) -> Any:
        make, arguments, _ = numpy.empty(1, dtype=object).__reduce__()
        return (make, arguments, (1, (1,), numpy.dtype(object), False, b"\x08" * 8))


def with_pointers(path: Path) -> DataProto:
    return DataProto(None, {}, {"x": Pointers()})


def with_a_bomb_in_meta_info(path: Path) -> DataProto:
    return DataProto(None, {}, {"x": Bomb(path)})


def with_a_bomb_in_the_batch(path: Path) -> DataProto:
    return DataProto(Bomb(path))  # type: ignore[arg-type]


def cut_short(path: Path) -> DataProto:
    return DataProto()


@pytest.mark.parametrize("make", [with_a_bomb_in_meta_info, with_a_bomb_in_the_batch, with_pointers, cut_short])
def test_a_dump_of_verl_that_cannot_be_read_stays_and_runs_nothing(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path / "exploded").save_as_verl_does(folder(tmp_path), 1)
    step = folder(tmp_path) / "1"
    if make is cut_short:
        os.truncate(step / "gen_batch.dp", 100)
        (step / "meta.json").unlink()
    before = {path.name: path.read_bytes() for path in step.iterdir()}
    SkipManager.init(config(tmp_path))
    trainer = Trainer()
    assert [trainer.run().meta_info["call"] for _ in range(2)] == [1, 2]
    assert {path.name: path.read_bytes() for path in step.iterdir()} == before
    assert sorted(path.name for path in folder(tmp_path).glob("1*")) == ["1"]
    assert not (tmp_path / "exploded").exists()
    assert str(step) in warnings_of(caplog)[0]


def test_the_notes_of_a_dump_are_in_its_meta(tmp_path: Path) -> None:
    SkipManager.init(config(tmp_path))
    Trainer(DataProto(None, {}, {"fn": print})).run()
    meta = json.loads((folder(tmp_path) / "1" / "meta.json").read_text())
    assert [note.split(":")[0] for note in meta["notes"]] == ["result/meta_info/fn is left out"]
