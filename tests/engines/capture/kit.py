"""Turns for tests."""

from collections.abc import Sequence
from typing import Any

from forebay.engines.capture.sample_fields import CapturedSample
from forebay.engines.capture.trajectory import Trajectory
from forebay.engines.capture.turn import Turn


def make_turn(prompt: Sequence[int] | None, sampled: Sequence[int] | None, **changes: Any) -> Turn:
    """A valid turn with logprobs -0.1, -0.2, …; ``changes`` replace or add fields."""
    told: dict[str, Any] = {
        "messages": [{"role": "user", "content": "go"}],
        "reply": {"role": "assistant", "content": "x"},
        "prompt_ids": None if prompt is None else list(prompt),
        "sampled_ids": None if sampled is None else list(sampled),
        "logprobs": None if sampled is None else [-(place + 1) / 10 for place in range(len(sampled))],
        "finish_reason": "stop",
    }
    return Turn(**told | changes)


def recorded(*turns: Turn) -> Trajectory:
    """A trajectory of these turns."""
    trajectory = Trajectory("r")
    for turn in turns:
        trajectory.add(turn)
    return trajectory


def trained(sample: CapturedSample) -> list[int]:
    """The tokens that a sample is trained on."""
    assert sample.tokens is not None
    assert sample.loss_mask is not None
    return [token for token, bit in zip(sample.tokens, sample.loss_mask, strict=True) if bit]


def assert_covered(sample: CapturedSample) -> None:
    """The spans cover the tokens, without gap and without overlap."""
    assert sample.tokens is not None
    ends = [0, *(span.end for span in sample.token_spans)]
    assert [span.start for span in sample.token_spans] == ends[:-1]
    assert ends[-1] == len(sample.tokens)
    assert all(span.start < span.end for span in sample.token_spans)
