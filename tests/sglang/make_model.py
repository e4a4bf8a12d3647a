"""Make a tiny random model folder with a tokenizer and a chat template. usage: make_model.py FOLDER [KIND]

``dense`` (the default) is a Qwen2, ``wide`` one whose heads have size 64, ``moe`` a Qwen3 with a mixture of experts.

``thinking`` has Qwen3's chat template; it thinks, says something and calls a tool. Which kind of token comes next
follows from the last token alone; which letter it is, also from random layers. So its answers have a form that parsers
read, and logprobs that depend on all tokens before.
"""

import math
import sys
from pathlib import Path
from typing import Any

from cpu_stand_ins import put_in_place

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = ["system user assistant: what is 1 + 2? the answer is 3. one two three four five six seven eight nine ten"]
CHAT_TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
THINKING_TEMPLATE = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set content = message.content or '' %}
{%- set reasoning = message.reasoning_content or '' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Each a token of its own, and no merges: a text has one spelling in tokens, as that of a trained model mostly has.
THINK, THOUGHT = "<think>\n", "\n</think>\n\n"
CALL = '\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
FORM: dict[str, tuple[Any, dict[str, float]]] = {
    "newline": (["Ċ"], {"think": 1.0}),
    "think": ([THINK], {"thinking": 1.0}),
    "thinking": ("abcdefghijklm", {"thinking": 0.85, "thought": 0.15}),
    "thought": ([THOUGHT], {"saying": 1.0}),
    "saying": ("nopqrstuvwxyz", {"saying": 0.8, "call": 0.2}),
    "call": ([CALL], {"end": 1.0}),
    "end": (["<|im_end|>"], {"end": 1.0}),
}
"""Kinds of tokens: their spelling, and about how likely each kind comes next."""
NEVER = -40.0
FIELDS: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "pad_token_id": 0,
}
MOE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
OTHER: dict[str, dict[str, Any]] = {
    "dense": {"tie_word_embeddings": True},
    "wide": {
        "tie_word_embeddings": True,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        # With 2 layers, vLLM's engine process finishes calls before its HTTP process can abort them.
        "num_hidden_layers": 16,
    },
    "thinking": {"tie_word_embeddings": False, "max_position_embeddings": 4096},
}


def make_tokenizer(is_thinking: bool) -> Any:
    """A byte-level BPE tokenizer of at most 509 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=509, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([] if is_thinking else CORPUS * 50, trainer)
    if is_thinking:
        tokenizer.add_tokens([THINK, THOUGHT, CALL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = THINKING_TEMPLATE if is_thinking else CHAT_TEMPLATE
    return fast


def make_model(kind: str, eos_token_id: int) -> Any:
    """A random model of 0.1 M parameters, or a few more."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    fields = {**FIELDS, "eos_token_id": eos_token_id}
    if kind == "moe":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields | MOE)).float()
    return Qwen2ForCausalLM(Qwen2Config(**fields | OTHER[kind])).float()


def give_form(model: Any, tokenizer: Any) -> None:
    """Make ``FORM`` likely, by a direction for each kind, which the last norm stretches to the root of the width."""
    import torch

    stretch = math.sqrt(FIELDS["hidden_size"])
    numbers = {kind: tokenizer.convert_tokens_to_ids(list(spelled)) for kind, (spelled, _) in FORM.items()}
    with torch.no_grad():
        for place, (kind, (_, following)) in enumerate(FORM.items()):
            model.model.embed_tokens.weight[numbers[kind], place] += 1.0
            model.lm_head.weight[:, place] = NEVER / stretch
            for after, share in following.items():
                model.lm_head.weight[numbers[after], place] = math.log(share / len(numbers[after])) / stretch


def main() -> None:
    put_in_place()
    folder, kind = Path(sys.argv[1]), (sys.argv[2:] or ["dense"])[0]
    tokenizer = make_tokenizer(kind == "thinking")
    model = make_model(kind, tokenizer.eos_token_id)
    if kind == "thinking":
        give_form(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
