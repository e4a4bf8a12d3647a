"""Tokens of an older policy, left out of the loss."""

from typing import Any

import pytest

from forebay.client import BufferClient
from forebay.client.tensors import collate
from forebay.core.errors import InvalidInput
from forebay.engines.tiny.model import build_tokenizer
from forebay.engines.tiny.recipe import Recipe
from tests.kit import Json, ServerProcess, make_group, make_sample

SPANS = [
    {"source": "environment", "start": 0, "end": 2},
    {"source": "llm", "start": 2, "end": 4, "weight_version": 3},
    {"source": "tool", "start": 4, "end": 5},
    {"source": "llm", "start": 5, "end": 8, "weight_version": 4},
]
MASK = [0, 0, 1, 1, 0, 1, 1, 1]


def captured(**changes: Any) -> Json:
    fields = {"tokens": list(range(8)), "loss_mask": MASK, "token_spans": SPANS, "weight_versions": [3, 4]}
    return make_sample(**(fields | changes))


def masks(*samples: Json, version: int | None = 4, **options: Any) -> list[list[int]]:
    told: list[list[int]] = collate(samples, 0, min_weight_version=version, **options)["loss_mask"].int().tolist()
    return told


@pytest.mark.parametrize(
    ("version", "mask"),
    [
        (None, MASK),
        (3, MASK),
        (4, [0, 0, 0, 0, 0, 1, 1, 1]),
        (5, [0] * 8),
    ],
)
def test_spans_say_which_tokens_are_old(version: int | None, mask: list[int]) -> None:
    assert masks(captured(), version=version) == [mask]


def test_the_mask_moves_with_what_is_padded_and_cut() -> None:
    assert masks(captured(), captured(), max_length=4, truncate="left") == [[0, 1, 1, 1]] * 2
    assert masks(captured(), make_sample(tokens=list(range(10))), padding_side="left")[0] == [0] * 7 + [1, 1, 1]


def test_without_spans_the_oldest_version_counts_for_all() -> None:
    old, new = captured(token_spans=..., weight_versions=[4, 3]), captured(token_spans=..., weight_versions=[4, 5])
    untold = captured(token_spans=..., weight_versions=...)
    assert masks(old, new, untold) == [[0] * 8, MASK, MASK]
    assert masks(captured(token_spans=..., weight_versions=..., weight_version=3)) == [[0] * 8]


def test_spans_are_not_of_tokens_that_collate_made() -> None:
    tokenizer = build_tokenizer(Recipe())
    bare = {"tokens": ..., "loss_mask": ...}
    old, new = captured(**bare), captured(**bare, weight_versions=[4])
    assert not any(masks(old, tokenizer=tokenizer)[0])
    assert masks(new, tokenizer=tokenizer) == masks(new, tokenizer=tokenizer, version=None)
    assert any(masks(new, tokenizer=tokenizer)[0])


def test_versions_that_are_words_have_no_age() -> None:
    spans = [SPANS[0], {"source": "llm", "start": 2, "end": 8, "weight_version": "default"}]
    assert masks(captured(token_spans=spans)) == [MASK]


@pytest.mark.parametrize("spans", [[{"start": 0, "end": 9}], [{"start": 3, "end": 2}], [{"end": 2}], "all", [1]])
def test_spans_that_are_none_are_told_with_their_sample(spans: Any) -> None:
    sample = captured(token_spans=spans)
    with pytest.raises(InvalidInput, match=sample["uid"]):
        masks(sample)


@pytest.mark.parametrize("as_tensors", [True, False])
def test_both_ways_to_read_a_batch_give_the_same(server: ServerProcess, as_tensors: bool) -> None:
    run = server.start_run(group_size=2)
    run.write(*(captured() | sample for sample in make_group("a", [0.0, 1.0])))
    with BufferClient(server.url, as_tensors=as_tensors) as client:
        client.attach(run.run_id)
        batch = client.read(num_groups=1)
        assert batch is not None
        out = collate(batch, 0, min_weight_version=4)
        whole = collate(batch, 0)
    assert out["loss_mask"].int().tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]] * 2
    assert whole["loss_mask"].int().tolist() == [MASK] * 2
