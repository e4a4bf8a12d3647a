"""A stand-in for Tinker in this process: its calls and its types, around a table of which token follows which."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import tinker
import torch
from tinker import types

NUM_TOKENS = 512
TAKES = {
    "cross_entropy": {"target_tokens", "weights"},
    "importance_sampling": {"target_tokens", "logprobs", "advantages"},
}
"""The inputs of each loss; like Tinker, the stand-in refuses others."""


class LocalService:
    """The calls of ``tinker.ServiceClient`` that the loop makes; models are files in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def create_lora_training_client(self, base_model: str) -> "Future[LocalTraining]":
        """A model that has learnt nothing: every token is as likely as any other."""
        del base_model
        return _done(LocalTraining(self._folder))

    def create_training_client_from_state_with_optimizer(self, path: str) -> "Future[LocalTraining]":
        """A saved model."""
        training = LocalTraining(self._folder)
        state = torch.load(path)
        with torch.no_grad():
            training.logits.copy_(state["logits"])
        training.optimizer.load_state_dict(state["optimizer"])
        return _done(training)


class LocalTraining:
    """The calls of ``tinker.TrainingClient`` that the loop makes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.logits = torch.zeros(NUM_TOKENS, NUM_TOKENS, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.logits])

    def forward_backward(self, data: Sequence[tinker.Datum], loss_fn: str) -> "Future[types.ForwardBackwardOutput]":
        """Add the gradients of the loss, summed over all tokens."""
        logprobs = [self._logprobs(datum, loss_fn) for datum in data]
        loss = sum(_loss(datum, own, loss_fn) for datum, own in zip(data, logprobs, strict=True))
        loss.backward()
        outputs = [{"logprobs": tinker.TensorData.from_torch(own.detach())} for own in logprobs]
        return _done(types.ForwardBackwardOutput("ArrayRecord", outputs, {"loss:sum": loss.item()}))

    def optim_step(self, params: types.AdamParams) -> "Future[types.OptimStepResponse]":
        """Take a step of Adam."""
        self.optimizer.param_groups[0]["lr"] = params.learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return _done(types.OptimStepResponse())

    def save_state(self, name: str, overwrite: bool = False) -> "Future[types.SaveWeightsResponse]":
        """Save the model and the state of its optimiser."""
        path = self._folder / f"{name}.pt"
        if path.exists() and not overwrite:
            raise FileExistsError(path)
        torch.save({"logits": self.logits.detach(), "optimizer": self.optimizer.state_dict()}, path)
        return _done(types.SaveWeightsResponse(path=str(path)))

    def _logprobs(self, datum: tinker.Datum, loss_fn: str) -> torch.Tensor:
        if datum.loss_fn_inputs.keys() != TAKES[loss_fn]:
            raise ValueError(f"{loss_fn} takes {TAKES[loss_fn]} (got {set(datum.loss_fn_inputs)})")
        inputs = torch.tensor(datum.model_input.to_ints())
        targets = datum.loss_fn_inputs["target_tokens"].to_torch()
        return self.logits[inputs].log_softmax(-1).gather(1, targets[:, None])[:, 0]


def _loss(datum: tinker.Datum, logprobs: torch.Tensor, loss_fn: str) -> torch.Tensor:
    given = {name: value.to_torch() for name, value in datum.loss_fn_inputs.items()}
    if loss_fn == "cross_entropy":
        return -(logprobs * given["weights"]).sum()
    return -((logprobs - given["logprobs"]).exp() * given["advantages"]).sum()


def _done(result: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(result)
    return future
