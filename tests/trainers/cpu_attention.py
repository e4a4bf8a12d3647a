"""A stand-in for the attention kernel of AsyncGRPOTrainer, which exists for GPUs only, and for its look at the GPU."""

from types import SimpleNamespace
from typing import Any

import torch
from trl.experimental.async_grpo import async_grpo_trainer, packing


def attend(q: Any, k: Any, v: Any, ends_q: Any, ends_k: Any, *_: Any, softmax_scale: float, **__: Any) -> Any:
    """Each stretch of queries attends to its stretch of keys, of which it is the end."""
    parts = []
    for n in range(len(ends_q) - 1):
        query = q[ends_q[n] : ends_q[n + 1]].transpose(0, 1)
        key, value = (each[ends_k[n] : ends_k[n + 1]].transpose(0, 1) for each in (k, v))
        mask = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril(key.shape[1] - query.shape[1])
        made = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=softmax_scale, enable_gqa=True
        )
        parts.append(made.transpose(0, 1))
    return torch.cat(parts)


packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attend)
async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
