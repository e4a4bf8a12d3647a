"""Tokens without a logprob, or with one that is not the policy's, are left out of the loss, however a batch is read."""

import math
from typing import Any

import pytest

from forebay.client import BufferClient, SampleWriter
from forebay.client.slime.tokens import arrays_of_row, tokens_of
from forebay.client.tensors import collate, rows
from forebay.client.tensors.batch_groups import arrays_of_batch
from forebay.core.errors import InvalidInput
from tests.kit import Json, ServerProcess, make_group, make_sample

SPANS: list[Json] = [
    {"source": "environment", "start": 0, "end": 1},
    {"source": "llm", "start": 1, "end": 2, "sampling": {}},
    {"source": "llm", "start": 2, "end": 3, "sampling": {"temperature": 0.7}},
    {"source": "llm", "start": 3, "end": 4, "sampling": {"temperature": 0.7, "top_p": 0.9}},
    {"source": "tool", "start": 4, "end": 5},
    {"source": "llm", "start": 5, "end": 6, "sampling": {"grammar": "response_format"}},
    {"source": "llm", "start": 6, "end": 7, "sampling": {"temperature": None}},
    {"source": "llm", "start": 7, "end": 8, "sampling": {}, "mixed_kv": True},
    {"source": "llm", "start": 8, "end": 9},
]
MASK = [0, 1, 1, 1, 0, 1, 1, 1, 1]
LOGPROBS = [0.0, -0.5, -0.5, -0.5, 0.0, -0.5, -0.5, -0.5, -0.5]
POLICYS = [0, 1, 0, 0, 0, 0, 0, 0, 1]


def captured(**changes: Any) -> Json:
    fields = {"tokens": list(range(9)), "loss_mask": MASK, "logprobs": LOGPROBS, "token_spans": SPANS}
    return make_sample(**(fields | changes))


def gappy(**changes: Any) -> Json:
    return make_sample(**({"tokens": [1, 2, 3], "loss_mask": [0, 1, 1], "logprobs": [None, None, -0.5]} | changes))


def test_a_token_without_a_logprob_is_not_trained_on() -> None:
    with pytest.warns(RuntimeWarning, match="not trained on"):
        out = collate([gappy()], 0)
    assert out["loss_mask"].int().tolist() == [[0, 0, 1]]
    assert out["logprobs"].tolist() == [[0.0, 0.0, -0.5]]
    with pytest.warns(RuntimeWarning, match="not trained on"):
        (row,) = rows([sample := gappy()])
    assert (row["loss_mask"], row["logprobs"]) == ([0, 0, 1], [0.0, 0.0, -0.5])
    assert sample["loss_mask"] == [0, 1, 1], "the sample itself was changed"


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_and_cutting_move_the_mask_with_its_tokens(padding: Any) -> None:
    long = make_sample(tokens=list(range(5)), loss_mask=[1] * 5, logprobs=[-1.0, math.nan, math.inf, -1.0, -1.0])
    with pytest.warns(RuntimeWarning):
        out = collate([gappy(), long], 0, padding_side=padding, max_length=4, truncate="left")
    short = [0, 0, 0, 1] if padding == "left" else [0, 0, 1, 0]
    assert out["loss_mask"].int().tolist() == [short, [0, 0, 1, 1]]
    assert out["logprobs"].isfinite().all()


def test_a_sample_without_any_logprobs_is_for_a_trainer_that_has_its_own_unless_they_are_needed() -> None:
    bare = gappy(logprobs=...)
    out = collate([bare, gappy(logprobs=[0.0, -1.0, -1.0])], 0)
    assert out["loss_mask"].int().tolist() == [[0, 1, 1], [0, 1, 1]]
    assert out["logprobs"][0].isnan().tolist() == [False, True, True]
    assert "logprobs" not in rows([bare])[0]
    with pytest.warns(RuntimeWarning, match="needs_logprobs"):
        needed = collate([bare, gappy(logprobs=[0.0, -1.0, -1.0])], 0, needs_logprobs=True)
    assert needed["loss_mask"].int().tolist() == [[0, 0, 0], [0, 1, 1]]
    assert not needed["logprobs"].isnan().any()
    with pytest.warns(RuntimeWarning, match="needs_logprobs"):
        assert rows([bare], needs_logprobs=True)[0]["loss_mask"] == [0, 0, 0]


@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ({}, MASK),
        ({"only_policy_logprobs": True}, POLICYS),
        ({"only_policy_logprobs": True, "policy_temperature": 0.7}, [0, 0, 1, 0, 0, 0, 0, 0, 1]),
    ],
)
def test_tokens_whose_logprobs_are_not_the_policys_can_be_left_out(options: dict[str, Any], mask: list[int]) -> None:
    assert collate([captured()], 0, **options)["loss_mask"].int().tolist() == [mask]
    assert rows([captured()], **options)[0]["loss_mask"] == mask


def test_a_sample_without_spans_is_left_as_it_is() -> None:
    bare = captured(token_spans=...)
    assert collate([bare], 0, only_policy_logprobs=True)["loss_mask"].int().tolist() == [MASK]


def test_rows_leave_out_older_weights_as_well() -> None:
    spans = [SPANS[0], {"source": "llm", "start": 1, "end": 9, "weight_version": 3}]
    assert rows([captured(token_spans=spans)], min_weight_version=4)[0]["loss_mask"] == [0] * 9
    with pytest.raises(InvalidInput, match="exceed its tokens"):
        rows([captured(token_spans=[{"start": 3, "end": 99}])], only_policy_logprobs=True)


def test_rows_without_tokens_are_as_they_came() -> None:
    sample = make_sample()
    (row,) = rows([sample], only_policy_logprobs=True)
    assert row == sample
    assert row is not sample


@pytest.mark.parametrize("tokens", [["a", 2], [1.5, 2], [1, 1 << 33]])
def test_rows_whose_arrays_cannot_be_used_are_refused_and_not_left_unmasked(tokens: list[Any]) -> None:
    odd = make_sample(tokens=tokens, loss_mask=[1, 1], weight_version=1)
    with pytest.raises(InvalidInput, match="are invalid"):
        rows([odd], min_weight_version=5)


@pytest.mark.parametrize("way", ["tensors", "lists", "json"])
def test_every_way_through_the_server_gives_the_same(server: ServerProcess, way: str) -> None:
    run = server.start_run(group_size=2)
    unknown = [None, None, *LOGPROBS[2:]]
    group = [captured(logprobs=unknown) | sample for sample in make_group("a", [0.0, 1.0])]
    if way == "json":
        run.write(*group)
    else:
        with SampleWriter(server.url, run.run_id) as writer:
            for sample in group:
                writer.write(sample)
    with BufferClient(server.url, as_tensors=way != "lists") as client:
        client.attach(run.run_id)
        batch = client.read(num_groups=1)
        assert batch is not None
        with pytest.warns(RuntimeWarning, match="not trained on"):
            out, whole = collate(batch, 0, only_policy_logprobs=True), collate(batch, 0)
        with pytest.warns(RuntimeWarning, match="not trained on"):
            plain = rows(batch)
        left = rows([row | {"logprobs": LOGPROBS} for row in plain], only_policy_logprobs=True)
        arrays = arrays_of_batch(batch)[0] if way != "lists" else [arrays_of_row(row) for row in plain]
        client.ack(batch)
    known = [0, 0, *MASK[2:]]
    assert whole["loss_mask"].int().tolist() == [known] * 2
    assert not whole["logprobs"].isnan().any()
    assert out["loss_mask"].int().tolist() == [[0, 0, *POLICYS[2:]]] * 2
    assert [row["loss_mask"] for row in plain] == [known] * 2
    assert [row["tokens"] for row in plain] == [list(range(9))] * 2
    assert [row["uid"] for row in plain] == ["a/0", "a/1"]
    assert [row["loss_mask"] for row in left] == [[0, 0, *POLICYS[2:]]] * 2
    for row, own in zip(plain, arrays, strict=True):
        tokens = tokens_of(row, own, lambda: pytest.fail("nothing is to be tokenised"))
        assert tokens.logprobs is not None, "one gap cost slime all logprobs of the sample"
        assert sum(tokens.loss_mask) == sum(known)
