"""slime's ``GenerateState``, as far as prompts need it: its tokenizer writes down what it was asked for."""

from typing import Any


class Tokenizer:
    def apply_chat_template(self, messages: Any, tools: Any, *, add_generation_prompt: bool, **options: Any) -> str:
        assert add_generation_prompt
        return f"{tools} {options} {messages[-1]['content']}\n"


class GenerateState:
    def __init__(self, args: Any) -> None:
        assert args.hf_checkpoint
        self.tokenizer = Tokenizer()
