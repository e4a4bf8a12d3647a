"""What SGLang 0.5.23 needs before it can be imported on a machine without a GPU. Our programs import it first."""

import importlib.machinery
import os
import sys
import types
from functools import cache
from typing import Any


def put_in_place() -> None:
    """Set the environment and put the stand-ins in place. Processes started by SGLang do it again at their start."""
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    declare_torchvision_operators()
    for name in ("sgl_kernel", "sgl_kernel.mamba"):
        sys.modules.setdefault(name, _AbsentKernels(name))


@cache
def declare_torchvision_operators() -> Any:
    """Declare the two operators whose compiled half does not load beside CPU torch. They live as long as the result."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


class _AbsentKernels(types.ModuleType):
    """A kernel package without kernels: importing names works, calling one raises, and SGLang takes torch's own."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*_: Any, **__: Any) -> None:
            raise NotImplementedError(f"{self.__name__}.{name}")

        absent.__name__ = name
        return absent
