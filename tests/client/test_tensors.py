"""Batches as padded tensors, however their samples came."""

import asyncio
import builtins
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.client.model import Batch
from forebay.client.sample_writer.encode import encode_sample
from forebay.client.tensors import collate, numpy_arrays
from forebay.core.errors import InvalidInput, MissingExtra
from forebay.core.safetensors_format import blob_json, is_blob
from forebay.engines.tiny.model import build_tokenizer
from forebay.engines.tiny.recipe import Recipe
from forebay.server.routes.tensor_replies import tensor_blob
from tests.kit import Json, make_sample

PAD = 999
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "6 of course"},
]


def blob_of(samples: Sequence[Json], group_sizes: Sequence[int], *, as_lists: bool = False) -> bytes:
    """The reply of a server that has these samples, written as binary ones or as JSON."""
    rows = [(json.dumps(sample).encode() if as_lists else encode_sample(sample),) for sample in samples]
    blob = asyncio.run(tensor_blob(rows, group_sizes, b'{"batch_id":"b","data":[', b'],"meta_info":{}}'))
    return b"".join(blob.pieces)


def batch_of(samples: Sequence[Json], group_sizes: Sequence[int], **options: Any) -> Batch:
    content = blob_of(samples, group_sizes, **options)
    told = json.loads(blob_json(content))
    return Batch("b", told["data"], told["meta_info"], 600.0, group_sizes, content=content)


def token_sample(num_tokens: int, start: int = 0, **changes: Any) -> Json:
    tokens = list(range(start, start + num_tokens))
    arrays = {"tokens": tokens, "logprobs": [-token / 4 for token in tokens], "loss_mask": [n % 2 for n in tokens]}
    return make_sample(**(arrays | changes))


SAMPLES = st.lists(
    st.builds(
        token_sample,
        st.integers(1, 9),
        st.integers(0, 1_000),
        reward=st.floats(-1, 1, width=32),
        weight_version=st.integers(0, 5) | st.just(...),
        logprobs=st.just(...),
    )
    | st.builds(token_sample, st.integers(1, 9), st.integers(0, 1_000)),
    min_size=1,
    max_size=6,
)
SIDES = st.sampled_from(["left", "right"])


@given(SAMPLES, SIDES, SIDES, st.none() | st.integers(1, 12), st.sampled_from(["blob", "json blob", "rows"]))
def test_every_way_of_a_batch_gives_what_padding_by_hand_gives(
    samples: list[Json], padding: Any, truncate: Any, max_length: int | None, way: str
) -> None:
    given_ = samples if way == "rows" else batch_of(samples, [1] * len(samples), as_lists=way == "json blob")
    out = collate(given_, PAD, padding_side=padding, truncate=truncate, max_length=max_length)
    limit = max_length or 99
    width = min(limit, max(len(sample["tokens"]) for sample in samples))
    for number, sample in enumerate(samples):
        length = len(sample["tokens"])
        kept = slice(max(0, length - limit), length) if truncate == "left" else slice(0, limit)
        logprobs = sample.get("logprobs") or [math.nan if mask else 0.0 for mask in sample["loss_mask"]]

        def padded(values: list[Any], fill: Any, kept: slice = kept) -> list[Any]:
            gap = [fill] * (width - len(values[kept]))
            return gap + values[kept] if padding == "left" else values[kept] + gap

        assert out["tokens"][number].tolist() == padded(sample["tokens"], PAD)
        assert out["attention_mask"][number].tolist() == padded([True] * length, False)
        assert out["loss_mask"][number].tolist() == padded([bool(mask) for mask in sample["loss_mask"]], False)
        np.testing.assert_array_equal(out["logprobs"][number].numpy(), np.float32(padded(logprobs, 0.0)))
    assert out["rewards"].tolist() == [sample["reward"] for sample in samples]
    assert out["weight_version"].tolist() == [sample.get("weight_version", -1) for sample in samples]
    assert not out["retokenized"].any()


def test_shapes_and_dtypes_are_those_of_the_docstring() -> None:
    out = collate([token_sample(3), token_sample(5)], PAD)
    told = {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in out.items()}
    assert told == {
        "tokens": ("int64", (2, 5)),
        "attention_mask": ("bool", (2, 5)),
        "loss_mask": ("bool", (2, 5)),
        "logprobs": ("float32", (2, 5)),
        "rewards": ("float32", (2,)),
        "group_index": ("int64", (2,)),
        "weight_version": ("int64", (2,)),
        "retokenized": ("bool", (2,)),
    }
    for name, (dtype, shape) in told.items():
        line = next(line for line in (collate.__doc__ or "").splitlines() if f"``{name}``" in line)
        assert dtype in line
        assert ("[B, T]" if len(shape) == 2 else "[B]") in line


def test_groups_are_those_of_the_batch_and_else_told_by_instance_and_epoch() -> None:
    samples = [token_sample(2, instance_id=1), token_sample(2, instance_id=1), token_sample(2, instance_id="1")]
    assert collate(batch_of(samples, [1, 2]), PAD)["group_index"].tolist() == [0, 1, 1]
    assert collate(samples, PAD)["group_index"].tolist() == [0, 0, 1]
    twice = [token_sample(2, instance_id=1, epoch=epoch) for epoch in (0, 0, 1)]
    assert collate(twice, PAD)["group_index"].tolist() == [0, 0, 1]


@pytest.mark.parametrize("way", ["blob", "json blob", "rows"])
def test_arrays_of_the_response_alone_belong_to_the_last_tokens(way: str) -> None:
    sample = token_sample(5, logprobs=[-1.0, -2.0], loss_mask=[1, 0], response_length=2)
    out = collate([sample] if way == "rows" else batch_of([sample], [1], as_lists=way == "json blob"), PAD)
    assert out["logprobs"].tolist() == [[0.0, 0.0, 0.0, -1.0, -2.0]]
    assert out["loss_mask"].tolist() == [[False, False, False, True, False]]


def test_without_a_loss_mask_the_response_is_trained_on_or_everything() -> None:
    out = collate([token_sample(3, loss_mask=..., response_length=1), token_sample(3, loss_mask=...)], PAD)
    assert out["loss_mask"].tolist() == [[False, False, True], [True, True, True]]


def test_the_oldest_of_several_weight_versions_counts() -> None:
    samples = [token_sample(1, weight_versions=[7, 4, 9], weight_version=5), token_sample(1, weight_version="v1")]
    assert collate(samples, PAD)["weight_version"].tolist() == [4, -1]


@pytest.mark.parametrize("way", ["blob", "rows"])
def test_samples_without_tokens_are_tokenised_and_marked_and_others_left_alone(way: str) -> None:
    tokenizer = build_tokenizer(Recipe())
    samples = [make_sample(messages=MESSAGES), token_sample(3, 7, messages=MESSAGES)]
    out = collate(samples if way == "rows" else batch_of(samples, [2]), PAD, tokenizer=tokenizer)
    assert out["retokenized"].tolist() == [True, False]
    tokens = out["tokens"][0][out["attention_mask"][0]]
    assert tokenizer.decode(tokens) == tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert tokenizer.decode(tokens[out["loss_mask"][0]]) == "4<|im_end|>6 of course<|im_end|>"
    assert out["logprobs"][0][out["loss_mask"][0]].isnan().all()
    assert not out["logprobs"][0][~out["loss_mask"][0]].any()
    assert out["tokens"][1][:3].tolist() == [7, 8, 9]


def test_a_chat_template_may_be_given() -> None:
    tokenizer = build_tokenizer(Recipe())
    turns = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    template = turns + "{% if add_generation_prompt %}[assistant]{% endif %}"
    out = collate([make_sample(messages=MESSAGES[1:])], PAD, tokenizer=tokenizer, chat_template=template)
    assert tokenizer.decode(out["tokens"][0]) == "[user]2+2?[assistant]4[user]3+3?[assistant]6 of course"
    assert tokenizer.decode(out["tokens"][0][out["loss_mask"][0]]) == "46 of course"


@pytest.mark.parametrize("said", ["", "4", "4\n"])
def test_a_line_break_that_ends_the_prompt_is_there_once(said: str) -> None:
    tokenizer = build_tokenizer(Recipe())
    turns = "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n{% endfor %}"
    template = turns + "{% if add_generation_prompt %}assistant:\n{% endif %}"
    messages = [MESSAGES[1], {"role": "assistant", "content": said}, *MESSAGES[3:]]
    out = collate([make_sample(messages=messages)], PAD, tokenizer=tokenizer, chat_template=template)
    assert tokenizer.decode(out["tokens"][0]) == tokenizer.apply_chat_template(
        messages, tokenize=False, chat_template=template
    )
    assert tokenizer.decode(out["tokens"][0][out["loss_mask"][0]]) == said.strip() + "6 of course"


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    template = "{% for m in messages %}{% if loop.last %}{{ m.content }}{% else %}x{% endif %}{% endfor %}"
    with pytest.raises(InvalidInput, match="differently when more messages follow") as refused:
        collate([make_sample(messages=MESSAGES)], PAD, tokenizer=build_tokenizer(Recipe()), chat_template=template)
    assert refused.value.field == "chat_template"


@pytest.mark.parametrize("way", ["blob", "rows"])
def test_a_tokenizer_that_is_needed_and_missing_is_an_error_that_says_so(way: str) -> None:
    samples = [token_sample(2), make_sample(uid="bare")]
    with pytest.raises(InvalidInput, match="'bare' has no tokens") as refused:
        collate(samples if way == "rows" else batch_of(samples, [2]), PAD)
    assert "tokenizer" in refused.value.hint


@pytest.mark.parametrize("way", ["json blob", "rows"])
def test_ids_that_cannot_be_used_are_never_made_anew_from_text(way: str) -> None:
    samples = [make_sample(uid="odd", tokens=["a", "b"])]
    with pytest.raises(InvalidInput, match="'odd' are invalid"):
        collate(
            samples if way == "rows" else batch_of(samples, [1], as_lists=True),
            PAD,
            tokenizer=build_tokenizer(Recipe()),
        )


def test_arrays_of_different_lengths_are_an_error() -> None:
    wrong = token_sample(3, logprobs=[-1.0])
    with pytest.raises(InvalidInput, match="logprobs: 1 values for 3 tokens"):
        collate([wrong], PAD)
    with pytest.raises(InvalidInput, match="are invalid"):
        collate(batch_of([wrong], [1], as_lists=True), PAD)


@pytest.mark.parametrize("wrong", [{"padding_side": "top"}, {"truncate": "middle"}, {"max_length": 0}])
def test_a_wrong_argument_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as refused:
        collate([token_sample(2)], PAD, **wrong)
    assert refused.value.field == next(iter(wrong))


def test_a_sample_with_nothing_in_it_is_an_empty_row() -> None:
    out = collate([make_sample(messages=[]), token_sample(2)], PAD)
    assert out["tokens"].tolist() == [[PAD, PAD], [0, 1]]
    assert collate([], PAD)["tokens"].shape == (0, 0)


def test_the_reply_is_what_the_safetensors_package_reads() -> None:
    import safetensors.torch

    samples = [token_sample(2), make_sample(), token_sample(3, 10, loss_mask=..., logprobs=...)]
    blob = blob_of(samples, [1, 2])
    tensors = safetensors.torch.load(blob)
    assert tensors["offsets"].tolist() == [0, 2, 2, 5]
    assert tensors["tokens"].tolist() == [0, 1, 10, 11, 12]
    assert tensors["has_logprobs"].tolist() == [1, 0, 0]
    assert tensors["group_index"].tolist() == [0, 1, 1]
    rest = json.loads(bytes(tensors["rest"].tolist()))
    left_out = ("tokens", "loss_mask", "logprobs")
    assert rest["data"] == [{k: v for k, v in sample.items() if k not in left_out} for sample in samples]
    assert is_blob(blob)
    assert not is_blob(json.dumps(rest).encode())


def test_numpy_arrays_are_views_of_the_reply() -> None:
    batch = batch_of([token_sample(2), token_sample(3, 10)], [2])
    arrays = numpy_arrays(batch)
    assert {name: str(array.dtype) for name, array in arrays.items()} == {
        "offsets": "int64",
        "group_index": "int64",
        "weight_version": "int64",
        "response_length": "int64",
        "rewards": "float64",
        "raw_rewards": "float64",
        "tokens": "int32",
        "logprobs": "float32",
        "loss_mask": "uint8",
        "has_logprobs": "uint8",
    }
    assert arrays["tokens"].tolist() == [0, 1, 10, 11, 12]
    assert np.shares_memory(arrays["tokens"], np.frombuffer(batch.content, np.uint8))
    with pytest.raises(InvalidInput, match="not a batch of tensors"):
        numpy_arrays(Batch("b", [], {}, 600.0, []))


@given(st.data())
def test_a_reply_that_is_cut_off_is_refused(data: st.DataObject) -> None:
    blob = blob_of([token_sample(2)], [1])
    cut = blob[: data.draw(st.integers(0, len(blob) - 1))]
    with pytest.raises(InvalidInput):
        numpy_arrays(Batch("b", [], {}, 600.0, [], content=cut))


def test_the_tensors_are_the_callers_own() -> None:
    batch = batch_of([token_sample(4), token_sample(4)], [2])
    before = bytes(batch.content)
    for tensor in collate(batch, PAD).values():
        tensor.zero_()
    assert batch.content == before
    assert collate(batch, PAD)["tokens"][0].tolist() == [0, 1, 2, 3]


def test_without_torch_the_error_has_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def refuse(name: str, *args: Any) -> Any:
        if name == "torch":
            raise ImportError(name)
        return real_import(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtra) as missing:
        collate([token_sample(1)], PAD)
    assert missing.value.hint == "pip install 'forebay[torch]'"
