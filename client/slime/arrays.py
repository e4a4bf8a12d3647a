"""Arrays per token in slime's form. slime has no sign for a missing row, so a sample that lacks one is unusable."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from forebay.client.slime.args import MASKS, ROUTES, SlimeArgs, needed_arrays
from forebay.client.slime.tokens import Tokens
from forebay.core.errors import InvalidInput
from forebay.core.parts import Rows, numpy_module

LOGPROBS = "sampling_logprobs"
"""Logprobs among the kept tokens, which come with ``sampling_mask``."""


def read_names(args: SlimeArgs) -> list[str]:
    """The arrays to read with a batch."""
    needed = needed_arrays(args)
    return [*needed, LOGPROBS] if MASKS in needed else needed


def with_arrays(tokens: Tokens, found: Mapping[str, Rows], args: SlimeArgs) -> tuple[Tokens, dict[str, Any]]:
    """The tokens as slime trains on them, and fields of its ``Sample``. Raises ``InvalidInput`` if a row is missing."""
    fields: dict[str, Any] = {}
    for name in needed_arrays(args):
        if name not in found:
            raise InvalidInput(f"it has no array {name}", field=f"arrays.{name}")
    if ROUTES in needed_arrays(args):
        fields["rollout_routed_experts"] = _routes(found[ROUTES], len(tokens.ids), args)
    if MASKS in needed_arrays(args):
        ids, offsets = found[MASKS].csr(len(tokens.ids), len(tokens.ids) - tokens.response_length)
        num_kept = offsets[1:] - offsets[:-1]
        if missing := sum(trained and not kept for trained, kept in zip(tokens.loss_mask, num_kept, strict=True)):
            raise InvalidInput(f"{missing} trained tokens have no sampling mask", field=f"arrays.{MASKS}")
        fields |= {"rollout_top_p_token_ids": ids.astype("int32"), "rollout_top_p_token_offsets": offsets}
        # slime's trainer computes logprobs among the kept tokens.
        tokens = replace(tokens, logprobs=_kept_logprobs(tokens, found.get(LOGPROBS)))
    return tokens, fields


def _routes(rows: Rows, num_tokens: int, args: SlimeArgs) -> Any:
    """[num_tokens - 1, layers, experts of a token], int32."""
    dense = rows.dense(num_tokens)[:-1].reshape(num_tokens - 1, -1)
    if missing := int((dense < 0).any(axis=1).sum()):
        raise InvalidInput(f"{missing} of its {num_tokens} tokens have no routed experts", field=f"arrays.{ROUTES}")
    shape = (args.num_layers, args.moe_router_topk)
    if dense.shape[1] != shape[0] * shape[1]:
        raise InvalidInput(
            f"--num-layers times --moe-router-topk must be {dense.shape[1]}, as in its rows (got {shape})",
            field=f"arrays.{ROUTES}",
        )
    return dense.astype("int32").reshape(num_tokens - 1, *shape)


def _kept_logprobs(tokens: Tokens, rows: Rows | None) -> list[float] | None:
    if rows is None:
        return None
    np = numpy_module()
    logprobs = rows.dense(len(tokens.ids), fill=np.nan)[-tokens.response_length :]
    logprobs[~np.asarray(tokens.loss_mask, bool)] = 0.0
    return None if np.isnan(logprobs).any() else logprobs.tolist()
