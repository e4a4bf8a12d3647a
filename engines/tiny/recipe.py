"""The embedded model's shape, its training prompt, and its warm-up.

The warm-up is supervised, on single-digit addition, so that some sampled answers are right and rewards vary.
"""

import hashlib
import json
import random
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from forebay.engines.tiny.extra import require

FORMAT = 1
"""Increment when the same recipe would yield another folder, so that old cached folders are not reused."""

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

# The whole template is part of the cache key: after a change, each machine makes its model again.
CHAT_TEMPLATE = (
    "{% if tools %}"
    "{{ '<|im_start|>system\\n# Tools\\n' }}"
    "{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{% for call in message.tool_calls or [] %}"
    "{% set told = {'name': call.function.name, 'arguments': call.function.arguments} %}"
    "{{ '<tool_call>\\n' + told | tojson + '\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

IGNORED = -100
"""The label of a position that is not learned; the default of torch's cross entropy."""

CHECK_EVERY = 5
"""Optimiser steps between accuracy checks."""

GRADIENT_NORM = 1.0

MOMENTA = (0.9, 0.98)
"""AdamW's betas; the second is low because the whole warm-up takes less than a hundred steps."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The shape of the model and its warm-up. Equal recipes give equal weights on one machine.

    The warm-up stops at the first check where a sampled answer at temperature 1 is right with probability
    ``target_accuracy``, and at ``max_steps`` at the latest.
    """

    hidden_size: int = 96
    num_layers: int = 3
    num_heads: int = 4
    num_key_value_heads: int = 2
    intermediate_size: int = 384
    max_vocab_size: int = 320
    context_length: int = 8192
    initializer_range: float = 0.06
    seed: int = 0
    batch_size: int = 32
    learning_rate: float = 3e-3
    target_accuracy: float = 0.35
    max_steps: int = 300

    def key(self) -> str:
        """A short hash of the recipe, its format and its prompt."""
        parts = [FORMAT, CHAT_TEMPLATE, question(3, 5), answer(8), asdict(self)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def question(left: int, right: int) -> str:
    """The user message of one addition."""
    return f"What is {left} + {right}?\nPut the final answer in \\boxed{{}}."


def answer(total: int) -> str:
    """The correct assistant message for a sum."""
    return f"\\boxed{{{total}}}"


@dataclass(frozen=True, slots=True)
class Lesson:
    """All one hundred additions: token ids and labels, both ``[100, length]``; prompt positions have no label."""

    tokens: Any
    labels: Any


def warm_up(network: Any, tokenizer: Any, recipe: Recipe) -> float:
    """Train until a sampled answer is right with ``recipe.target_accuracy``; returns the accuracy reached."""
    torch = require("torch")
    lesson = build_lesson(tokenizer)
    optimizer = torch.optim.AdamW(network.parameters(), lr=recipe.learning_rate, betas=MOMENTA)
    order = random.Random(recipe.seed)
    accuracy = 0.0
    for step in range(1, recipe.max_steps + 1):
        rows = torch.tensor(order.choices(range(len(lesson.tokens)), k=recipe.batch_size))
        _train(network, optimizer, lesson.tokens[rows], lesson.labels[rows])
        if step % CHECK_EVERY == 0:
            accuracy = float(answer_probabilities(network, lesson).mean())
            if accuracy >= recipe.target_accuracy:
                break
    return accuracy


def answer_probabilities(network: Any, lesson: Lesson) -> Any:
    """Return the probability of each addition's exact answer at temperature 1: ``[100]``."""
    torch = require("torch")
    network.eval()
    with torch.inference_mode():
        losses = _token_losses(network, lesson.tokens, lesson.labels)
    return (-losses.sum(dim=1)).exp()


def build_lesson(tokenizer: Any) -> Lesson:
    """Encode all single-digit additions as chats, in the format of requests to the engine, padded on the right."""
    torch = require("torch")
    pairs = [_encode(tokenizer, left, right) for left, right in product(range(10), repeat=2)]
    length = max(len(tokens) for tokens, _ in pairs)
    tokens = [row + [tokenizer.pad_token_id] * (length - len(row)) for row, _ in pairs]
    labels = [row + [IGNORED] * (length - len(row)) for _, row in pairs]
    return Lesson(torch.tensor(tokens), torch.tensor(labels))


def _encode(tokenizer: Any, left: int, right: int) -> tuple[list[int], list[int]]:
    messages = [{"role": "user", "content": question(left, right)}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    asked = tokenizer.encode(prompt, add_special_tokens=False)
    completion = [*tokenizer.encode(answer(left + right), add_special_tokens=False), tokenizer.eos_token_id]
    return asked + completion, [IGNORED] * len(asked) + completion


def _train(network: Any, optimizer: Any, tokens: Any, labels: Any) -> None:
    torch = require("torch")
    network.train()
    losses = _token_losses(network, tokens, labels)
    optimizer.zero_grad(set_to_none=True)
    (losses.sum() / (labels != IGNORED).sum()).backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), GRADIENT_NORM)
    optimizer.step()


def _token_losses(network: Any, tokens: Any, labels: Any) -> Any:
    torch = require("torch")
    logits = network(input_ids=tokens[:, :-1], use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="none"
    )
    return losses.view(len(tokens), -1)
