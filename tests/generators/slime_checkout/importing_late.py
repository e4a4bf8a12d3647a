"""Functions that import slime's ``post`` once they are called, and work on lists of samples."""

from typing import Any

from slime.utils.types import Sample


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    from searching import generate

    assert sample.session_id
    assert sample.label == ["4"], "no other rollout has changed it"
    sample.label.append("5")
    return [await generate(args, sample, sampling_params, evaluation=False)]


async def reward(args: Any, samples: list[Sample]) -> list[float]:
    return [float(sample.label[0] in sample.response) for sample in samples]
