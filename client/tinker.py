"""Batches as ``Datum``s, for Tinker and for servers and loops that use its types (SkyRL's, tinker-cookbook)."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from forebay.client.model import Batch, Row
from forebay.client.tensors import rows
from forebay.client.trainer.marked_steps import Unusable
from forebay.core.errors import InvalidInput

logger = logging.getLogger(__name__)

SUPERVISED = ("target_tokens", "weights")
POLICY = ("target_tokens", "logprobs", "advantages")


def datums(batch: Batch, loss_fn: str | None = None) -> tuple[list[Any], list[Unusable]]:
    """Return a ``tinker.Datum`` for each row of a batch, and the groups that were passed over for lack of a value.

    With N tokens in a row, each input has N - 1 items: ``model_input`` is all tokens but the last, and
    ``target_tokens`` all but the first. ``weights`` (the loss mask), ``logprobs`` of the engine that sampled the
    targets, and ``advantages`` (the row's ``reward``, 0 where the weight is 0) belong to the targets.

    Pass the ``loss_fn`` that you give to ``forward_backward``: its datums have only the inputs that it takes,
    ``weights`` for "cross_entropy", and ``logprobs`` and ``advantages`` for all others. Without it they have all four.

    A group is passed over, with a logged warning, if one of its rows has fewer than two tokens, no logprobs or no
    reward. Raises ``ImportError`` without the package ``tinker``, and ``InvalidInput`` for invalid arrays.
    """
    names = SUPERVISED if loss_fn == "cross_entropy" else POLICY if loss_fn else (*POLICY, "weights")
    made: list[Any] = []
    unusable: list[Unusable] = []
    for group in replace(batch, rows=rows(batch), content=b"").groups:
        try:
            made += [_datum(row, names) for row in group.samples]
        except InvalidInput as error:
            unusable.append(Unusable(group.instance_id, str(error)))
            logger.warning("passing over a group of %r: %s", group.instance_id, error)
    return made, unusable


def _datum(row: Row, names: Sequence[str]) -> Any:
    tinker = import_module("tinker")
    tokens, logprobs, reward = row.get("tokens") or [], row.get("logprobs"), row.get("reward")
    if len(tokens) < 2:
        raise InvalidInput(f"sample {row.get('uid')!r} has fewer than two tokens", field="tokens")
    weights = [float(weight) for weight in row["loss_mask"][1:]]
    inputs = {"target_tokens": tokens[1:], "weights": weights}
    if "logprobs" in names:
        if logprobs is None or not isinstance(reward, int | float):
            missing = "logprobs" if logprobs is None else "reward"
            raise InvalidInput(f"sample {row.get('uid')!r} has no {missing}", field=missing)
        inputs |= {"logprobs": logprobs[1:], "advantages": [reward * weight for weight in weights]}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={name: inputs[name] for name in names}
    )
