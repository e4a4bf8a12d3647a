"""Token ids of conversations that came without them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from forebay.core.errors import InvalidInput

Message = Mapping[str, Any]


class Tokenizer(Protocol):
    """What is used of a tokenizer of the transformers package."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def encode(self, text: str, **options: Any) -> Any: ...


def chat_tokens(
    messages: Sequence[Message], tokenizer: Tokenizer, chat_template: str | None = None
) -> tuple[list[int], list[int]]:
    """Token ids of ``messages`` and their loss mask, which is 1 for what the assistant said, its end mark included.

    Each assistant turn is tokenised by itself, as it was when it was generated. Raises ``InvalidInput`` if the template
    changes earlier turns when a later one comes: then no text tells what the model saw.
    """
    tokens: list[int] = []
    mask: list[int] = []
    for text, is_assistant in _stretches(messages, tokenizer, chat_template):
        ids = tokenizer.encode(text, add_special_tokens=False)
        tokens += ids
        mask += [int(is_assistant)] * len(ids)
    return tokens, mask


def _stretches(
    messages: Sequence[Message], tokenizer: Tokenizer, chat_template: str | None
) -> Iterator[tuple[str, bool]]:
    """The text of the conversation in pieces, and whether each is the assistant's."""

    def text_of(count: int, *, is_prompt: bool = False) -> str:
        options = {"tokenize": False, "add_generation_prompt": is_prompt, "chat_template": chat_template}
        return str(tokenizer.apply_chat_template([dict(message) for message in messages[:count]], **options))

    if not messages:
        return
    whole, at = text_of(len(messages)), 0
    for number, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        # Many templates put the thoughts or tools of a turn elsewhere once it is not the last one: then the text of the
        # whole conversation is not what the model saw when it wrote this turn.
        before = text_of(number, is_prompt=True) if number else ""
        after = text_of(number + 1)
        if not (whole.startswith(after) and after.startswith(before)):
            raise InvalidInput(
                f"the chat template writes message {number} otherwise when more messages follow it",
                hint="give a chat_template that leaves earlier turns as they are, or send token ids with the samples",
                field="chat_template",
            )
        # The line break behind the end mark is the template's, not the model's; one that ends the prompt is neither's.
        end = max(len(before), len(after.rstrip("\n")))
        yield whole[at : len(before)], False
        yield whole[len(before) : end], True
        at = end
    yield whole[at:], False
