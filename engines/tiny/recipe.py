"""What the embedded model is made of: its shape, its warm-up, and the prompt that it is warmed up on."""

import hashlib
import json
from dataclasses import asdict, dataclass

FORMAT = 1
"""Raised when the same recipe would give another folder, so that no cached one is taken for it."""

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

# Every character of it is in the key of the cached folder: a change has each machine make its model anew.
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
        """A short name that changes with the recipe, its format and its prompt."""
        parts = [FORMAT, CHAT_TEMPLATE, question(3, 5), answer(8), asdict(self)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def question(left: int, right: int) -> str:
    """The user message of one addition."""
    return f"What is {left} + {right}?\nPut the final answer in \\boxed{{}}."


def answer(total: int) -> str:
    """The assistant message that is right for a sum."""
    return f"\\boxed{{{total}}}"
