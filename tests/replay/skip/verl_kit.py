"""As much of verl and tensordict as a dump sees: ``DataProto``, ``TensorDict``, and how both are pickled."""

import dataclasses
import importlib
import io
import pickle
import sys
from collections.abc import ItemsView
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


class TensorDict:
    """Tensors with a batch size."""

    def __init__(self, source: dict[str, Any], batch_size: Any) -> None:
        self.source, self.batch_size = dict(source), batch_size

    def items(self) -> ItemsView[str, Any]:
        return self.source.items()

    def __getitem__(self, key: str) -> Any:
        return self.source[key]

    def __reduce__(self) -> Any:
        return (_rebuild_tensordict_files_consolidated, (self.source, self.batch_size))


def _rebuild_tensordict_files_consolidated(metadata: Any, storage: Any) -> TensorDict:
    return TensorDict(metadata, storage)


class Unused:
    """Stands for the other classes of tensordict."""


class LazyStackedTensorDict(Unused):
    """Never made here."""


class NonTensorData(Unused):
    """Never made here."""


class NonTensorStack(Unused):
    """Never made here."""

    from_list = staticmethod(list)


@dataclasses.dataclass
class DataProto:
    """A batch, as verl pickles it."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = dataclasses.field(default_factory=dict)
    meta_info: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __getstate__(self) -> tuple[bytes, Any, Any]:
        import torch

        saved = io.BytesIO()
        torch.save(self.batch, saved)
        return saved.getvalue(), self.non_tensor_batch, self.meta_info

    def save_as_verl_does(self, folder: Path, step: int) -> None:
        """The dump that verl's own SkipManager writes for ``step``."""
        (folder / str(step)).mkdir(parents=True)
        (folder / str(step) / "gen_batch.dp").write_bytes(pickle.dumps(self))
        (folder / str(step) / "meta.json").write_text(f'{{"global_steps": {step}}}')


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``forebay.replay.skip.verl`` be imported over these classes."""
    pytest.importorskip("torch")
    modules = {
        "verl.protocol": [DataProto],
        "tensordict": [TensorDict, LazyStackedTensorDict, NonTensorData, NonTensorStack],
        "tensordict._reductions": [_rebuild_tensordict_files_consolidated],
    }
    for name, content in modules.items():
        module = ModuleType(name)
        for each in content:
            monkeypatch.setattr(each, "__module__", name)
            setattr(module, each.__name__, each)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "verl", ModuleType("verl"))
    monkeypatch.delitem(sys.modules, "forebay.replay.skip.verl", raising=False)
    importlib.import_module("forebay.replay.skip.verl")
    monkeypatch.delitem(sys.modules, "forebay.replay.skip.verl")
