"""Arrays per token and images for slime: routed experts, the tokens that top-p kept, pictures."""

import base64
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.client import Rows
from forebay.core.errors import InvalidInput
from tests.client.slime.kit import generate, group
from tests.engines.moe_engine import MoEEngine, kept_ids
from tests.kit import Json, NativeRun

LAYERS, EXPERTS = 3, 2
ROUTES = np.arange(3 * LAYERS * EXPERTS, dtype=np.uint8).reshape(3, LAYERS * EXPERTS)
KEPT, COUNTS = np.array([7, 9, 8], np.int32), np.array([2, 1], np.int32)


@pytest.fixture(autouse=True)
def model(args: Any) -> None:
    args.num_layers, args.moe_router_topk = LAYERS, EXPERTS


def routed(*stretches: tuple[int, int]) -> Json:
    data = np.concatenate([ROUTES[first:end] for first, end in stretches])
    return {"arrays": {"routed_experts": Rows(data, list(stretches))}}


def test_a_sample_has_a_row_of_experts_for_each_token_but_the_last(run: NativeRun, args: Any) -> None:
    args.use_rollout_routing_replay = True
    run.send([*group("a", **routed((0, 3))), *group("b", **routed((0, 1), (1, 3)))])
    for sample in (each for siblings in generate(args, 0) for each in siblings):
        experts = sample.rollout_routed_experts
        assert (experts.dtype, experts.shape) == (np.int32, (3, LAYERS, EXPERTS))
        assert experts.tolist() == ROUTES.reshape(3, LAYERS, EXPERTS).tolist()


def test_groups_that_lack_a_row_are_skipped_with_the_reason(
    run: NativeRun, args: Any, caplog: pytest.LogCaptureFixture
) -> None:
    args.use_rollout_routing_replay = True
    run.send([*group("none"), *group("gap", **routed((0, 1), (2, 3)))])
    run.send([*group("a", **routed((0, 3))), *group("b", **routed((0, 3)))])
    assert [siblings[0].metadata["instance_id"] for siblings in generate(args, 0)] == ["a", "b"]
    assert "sample 'none/0': it has no array routed_experts" in caplog.text
    assert "sample 'gap/0': 1 of its 4 tokens have no routed experts" in caplog.text


def test_another_model_than_the_engines_is_told(run: NativeRun, args: Any) -> None:
    args.use_rollout_routing_replay, args.num_layers = True, 48
    for number in range(12):
        run.send([*group(f"wrong-{number}", **routed((0, 3)))])
    with pytest.raises(InvalidInput, match=r"--num-layers times --moe-router-topk must be 6"):
        generate(args, 0)


def test_the_tokens_that_an_engine_kept_reach_slime(args: Any, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps({'instance_id': name, 'prompt': name})}\n" for name in "ab"))
    args.rollout_task_type, args.prompt_data = "alternating", str(rows)
    args.rollout_top_p, args.rollout_top_k = 0.9, 5
    with MoEEngine(lambda call: f"answer {call.number}").in_thread() as engine:
        args.sglang_router_port = int(engine.url.rpartition(":")[2])
        samples = [sample for siblings in generate(args, 0) for sample in siblings]
    assert len(samples) == 4
    for sample in samples:
        sampled, ids = sample.tokens[-sample.response_length :], sample.rollout_top_p_token_ids
        assert ids.tolist() == [kept for token in sampled for kept in kept_ids(token, 5)]
        assert sample.rollout_top_p_token_offsets.tolist() == [5 * at for at in range(len(sampled) + 1)]
        assert sample.rollout_top_p_token_offsets.dtype == ids.dtype == np.int32
        assert sample.rollout_log_probs == pytest.approx([-np.log(5)] * len(sampled))


def test_a_group_with_a_trained_token_without_a_mask_is_skipped(run: NativeRun, args: Any) -> None:
    args.rollout_top_p, args.rollout_top_k = 0.9, 100
    whole = {"sampling_mask": Rows(KEPT, [(2, 4)], COUNTS)}
    missing = {"sampling_mask": Rows(KEPT[:2], [(2, 3)], COUNTS[:1])}
    run.send([*group("missing", arrays=missing), *group("a", arrays=whole), *group("b", arrays=whole)])
    assert [siblings[0].metadata["instance_id"] for siblings in generate(args, 0)] == ["a", "b"]


def test_images_are_pillows_in_the_order_of_the_messages(run: NativeRun, args: Any) -> None:
    from PIL import Image

    web, pixels = "https://example.com/a.png", os.urandom(3 * 64 * 64)
    Image.frombytes("RGB", (64, 64), pixels).save(file := io.BytesIO(), "PNG")
    data = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in (data, web)]
    messages = [{"role": "user", "content": shown}, {"role": "assistant", "content": "4"}]
    drawing = {"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64,PHN2Zy8+"}}  # <svg/>
    unknown = [{"role": "user", "content": [drawing]}]
    run.send([*group("c", messages=unknown), *group("a", messages=messages), *group("b")])
    pictured, plain = generate(args, 0)
    for sample in pictured:
        image, address = sample.multimodal_inputs["images"]
        assert (image.size, image.tobytes(), address) == ((64, 64), pixels, web)
    assert plain[0].multimodal_inputs is None


def test_top_p_alone_is_refused(args: Any) -> None:
    args.rollout_top_p = 0.9
    with pytest.raises(InvalidInput, match="--rollout-top-k must be from 2 to 4096") as caught:
        generate(args, 0)
    assert caught.value.field == "--rollout-top-k"
