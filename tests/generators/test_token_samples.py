"""Samples with token ids on their way from a run process to its buffer."""

from typing import Any

import numpy as np
import pytest

from forebay.client import Rows
from forebay.client.sample_writer.writer import AsyncWriter
from forebay.core.binary_sample import SAMPLES_TYPE
from forebay.generators.buffer_link.abc import Link
from forebay.generators.buffer_link.forebay import ServerLink
from forebay.generators.buffer_link.slime import SlimeLink
from tests.generators.conftest import FakeBuffer
from tests.kit import make_sample

TOKENS: dict[str, Any] = {"tokens": [5, 6, 7], "loss_mask": [0, 1, 1], "logprobs": [0.0, -0.5, -0.25]}


async def deliver(link: Link, *samples: dict[str, Any]) -> AsyncWriter:
    writer = link.writer(max_waiting=10)
    for sample in samples:
        await writer.write(sample)
    await writer.close()
    await link.close()
    return writer


async def test_token_ids_go_out_as_arrays_and_arrive_as_they_were(buffer: FakeBuffer) -> None:
    samples = [make_sample(**TOKENS), make_sample(), make_sample(**TOKENS | {"tokens": [1, 2, 2**31 - 1]})]
    writer = await deliver(ServerLink(buffer.url), *samples)
    assert buffer.samples == samples
    assert buffer.content_types == [SAMPLES_TYPE]
    assert writer.num_acknowledged == 3


async def test_without_token_ids_it_is_json(buffer: FakeBuffer) -> None:
    await deliver(ServerLink(buffer.url), make_sample())
    assert buffer.content_types == ["application/json"]


async def test_slimes_own_buffer_gets_lists(buffer: FakeBuffer) -> None:
    samples = [make_sample(**TOKENS), make_sample()]
    await deliver(SlimeLink(buffer.root_url), *samples)
    assert buffer.samples == samples


async def test_slimes_own_buffer_gets_images_in_the_messages_and_no_arrays(buffer: FakeBuffer) -> None:
    url = "data:image/png;base64," + "iVBORw0K" * 1_000
    shown = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    sample = make_sample(**TOKENS, messages=shown)
    await deliver(SlimeLink(buffer.root_url), sample | {"arrays": {"ids": Rows(np.zeros((3, 2), "u1"), [(0, 3)])}})
    assert buffer.samples == [sample]


@pytest.mark.parametrize("name", ["loss_mask", "logprobs"])
async def test_arrays_that_are_refused_make_a_failed_sample(buffer: FakeBuffer, name: str) -> None:
    def refuse(sample: dict[str, Any]) -> dict[str, Any] | None:
        is_short = name in sample and len(sample[name]) < 3
        return {"code": "invalid_input", "message": f"{name}: 1 values for 3 tokens"} if is_short else None

    buffer.refused = refuse
    fields = {"epoch": 0, "slot": 0, "attempt": 0, "rollout_id": "r"}
    await deliver(ServerLink(buffer.url), make_sample(**TOKENS | {name: [1]}, **fields))
    (failed,) = buffer.samples
    assert failed["status"] == "failed"
    assert failed["error"]["type"] == "SampleRefused"
    assert "tokens" not in failed
