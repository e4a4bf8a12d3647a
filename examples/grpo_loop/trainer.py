"""GRPO in torch: the policy, one training step per batch, and model folders that appear atomically."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from forebay.client import Batch
from forebay.client.tensors import collate

CLIP_BELOW, CLIP_ABOVE = 0.2, 0.28
MAX_GRADIENT_NORM = 1.0
NUM_KEPT = 3
"""Number of model folders to keep by default; an engine may still be reading the second newest."""


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters: each batch is trained on ``num_passes`` times, in ``num_minibatches`` parts."""

    learning_rate: float = 5e-4
    num_passes: int = 2
    num_minibatches: int = 2
    seed: int = 0


class Trainer:
    """A policy, its optimiser, and the last completed step."""

    def __init__(self, model_folder: Path, recipe: Recipe, step: int = 0) -> None:
        self.step = step
        self._recipe = recipe
        self._tokenizer = AutoTokenizer.from_pretrained(model_folder)
        self._network = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).train()
        self._optimizer = torch.optim.AdamW(self._network.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
        state = model_folder / "optimizer.pt"
        if state.is_file():
            self._optimizer.load_state_dict(torch.load(state, weights_only=True))

    def train(self, batch: Batch) -> None:
        """Train one step on a batch. Its rewards are already advantages: the buffer normalised each group."""
        data = collate(batch, self._tokenizer.pad_token_id, tokenizer=self._tokenizer)
        data["old"] = self._old_logprobs(data)
        torch.manual_seed(1_000_003 * self._recipe.seed + self.step)
        for _ in range(self._recipe.num_passes):
            for rows in torch.randperm(len(data["tokens"])).tensor_split(self._recipe.num_minibatches):
                self._optimizer.zero_grad(set_to_none=True)
                self._loss({name: tensor[rows] for name, tensor in data.items()}).backward()
                torch.nn.utils.clip_grad_norm_(self._network.parameters(), MAX_GRADIENT_NORM)
                self._optimizer.step()
        self.step += 1

    def _loss(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        """The clipped surrogate with a wider upper bound (DAPO, arXiv:2503.14476), averaged over all tokens."""
        ratio = (self._logprobs(data) - data["old"]).exp()
        advantage = data["rewards"][:, None]
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP_BELOW, 1 + CLIP_ABOVE) * advantage)
        mask = data["loss_mask"][:, 1:]
        return -gain[mask].mean()

    def _logprobs(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logprobs under the policy of each token but the first: ``[rows, tokens - 1]``."""
        tokens = data["tokens"]
        mask = data["attention_mask"].long()
        logits = self._network(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1]
        return torch.log_softmax(logits, dim=-1).gather(2, tokens[:, 1:, None]).squeeze(2)

    @torch.no_grad()
    def _old_logprobs(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        """The engine's logprobs from sampling; for tokens without one, the policy's own."""
        sampled = data["logprobs"][:, 1:]
        return torch.where(sampled.isnan(), self._logprobs(data), sampled) if sampled.isnan().any() else sampled

    def save(self, models: Path, num_kept: int = NUM_KEPT) -> Path:
        """Write the folder of this step below ``models`` atomically, and keep only the newest ``num_kept``."""
        folder = step_folder(models, self.step)
        draft = models / f".{folder.name}"
        shutil.rmtree(draft, ignore_errors=True)
        self._network.save_pretrained(draft)
        self._tokenizer.save_pretrained(draft)
        torch.save(self._optimizer.state_dict(), draft / "optimizer.pt")
        for path in draft.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        draft.rename(folder)
        for old in model_folders(models)[:-num_kept]:
            shutil.rmtree(old)
        return folder


def step_folder(models: Path, step: int) -> Path:
    """The folder of the model of a step."""
    return models / f"step-{step:05d}"


def model_folders(models: Path) -> list[Path]:
    """The visible model folders, newest last."""
    return sorted(models.glob("step-*"))
