"""Token ids for conversations without them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from forebay.core.errors import InvalidInput

Message = Mapping[str, Any]


class Tokenizer(Protocol):
    """The methods used of a tokenizer of the transformers package."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def encode(self, text: str, **options: Any) -> Any: ...


def chat_tokens(
    messages: Sequence[Message], tokenizer: Tokenizer, chat_template: str | None = None
) -> tuple[list[int], list[int]]:
    """Token ids of ``messages`` and their loss mask, which is 1 for assistant turns, end-of-turn token included.

    Each assistant turn is tokenised separately, as when it was generated. Raises ``InvalidInput`` if the template
    renders earlier turns differently once later ones follow: then the text that the model saw cannot be recovered.
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
    """The text of the conversation in pieces, each with whether it is the assistant's."""

    def text_of(count: int, *, is_prompt: bool = False) -> str:
        options = {"tokenize": False, "add_generation_prompt": is_prompt, "chat_template": chat_template}
        return str(tokenizer.apply_chat_template([dict(message) for message in messages[:count]], **options))

    if not messages:
        return
    whole, at = text_of(len(messages)), 0
    for number, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        # Many templates move the thoughts or tools of a turn once it is not the last one. The text of the whole
        # conversation then differs from what the model saw when it wrote this turn.
        before = text_of(number, is_prompt=True) if number else ""
        after = text_of(number + 1)
        if not (whole.startswith(after) and after.startswith(before)):
            raise InvalidInput(
                f"the chat template renders message {number} differently when more messages follow it",
                hint="pass a chat_template that keeps earlier turns unchanged, or send token ids with the samples",
                field="chat_template",
            )
        # A line break after the end-of-turn token is the template's, not the model's, unless it ends the prompt.
        end = max(len(before), len(after.rstrip("\n")))
        yield whole[at : len(before)], False
        yield whole[len(before) : end], True
        at = end
    yield whole[at:], False
