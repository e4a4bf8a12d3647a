"""The chat template and tokenizer of a model folder: prompts as token ids, and token ids as text."""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from forebay.core.errors import InvalidInput, MissingExtra

Messages = Sequence[Mapping[str, Any]]
TextOf = Callable[[Sequence[int], bool], str]

FIELD = "template_path"
NEEDED = ("transformers", "jinja2")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


@dataclass(frozen=True)
class ChatTemplate:
    """What SGLang does with its model's template and tokenizer, done here. Both functions may be called by any thread.

    ``render`` makes chat messages the token ids of a prompt that waits for the assistant, and raises ``InvalidInput``
    for messages that the template refuses. ``text_of`` makes token ids a text, with special tokens if its second
    argument is true.
    """

    render: Callable[[Messages], list[int]]
    text_of: TextOf


def check_template(folder: str | Path) -> None:
    """Raise ``InvalidInput`` unless ``load_template`` can do with ``folder``, as far as its files tell.

    Nothing slow is imported.
    """
    _check_files(Path(folder))
    for package in NEEDED:
        if find_spec(package) is None:
            raise _unusable(f"template_path needs {package}, which is not installed", "pip install 'forebay[local]'")


def load_template(folder: str | Path) -> ChatTemplate:
    """The chat template of a model folder. Raises ``InvalidInput``, and ``MissingExtra`` without ``transformers``."""
    _check_files(Path(folder))
    tokenizer = _tokenizer(Path(folder))
    if not tokenizer.chat_template:
        raise _no_template(folder)
    # Tokenizers change settings of their own while they encode.
    lock = threading.Lock()

    def render(messages: Messages) -> list[int]:
        with lock:
            prompt = _applied(tokenizer, messages)
            return list(tokenizer.encode(prompt, add_special_tokens=False))

    def text_of(ids: Sequence[int], with_special: bool) -> str:
        with lock:
            return str(tokenizer.decode(list(ids), skip_special_tokens=not with_special))

    return ChatTemplate(render, text_of)


def _check_files(folder: Path) -> None:
    if not os.path.isdir(folder):
        raise _unusable(f"template_path {str(folder)!r} is no folder", "give the folder of the model that is served")
    if not _has_any(folder, TOKENIZER_FILES):
        raise _unusable(f"the folder {folder} has no tokenizer", "it should have a tokenizer.json")
    if not _has_any(folder, TEMPLATE_FILES) and not _config(folder).get("chat_template"):
        raise _no_template(folder)


def _has_any(folder: Path, names: Sequence[str]) -> bool:
    # Of ``os.path``: a path raises errors for folders that may not be read, and for names that are too long.
    return any(os.path.exists(folder / name) for name in names)


def _applied(tokenizer: Any, messages: Messages) -> str:
    from jinja2 import TemplateError

    try:
        texts = [{**message, "content": message.get("content") or ""} for message in messages]
        return str(tokenizer.apply_chat_template(texts, tokenize=False, add_generation_prompt=True))
    except (TemplateError, TypeError) as error:
        raise InvalidInput(f"the chat template refuses these messages: {error}", field="messages") from error


def _tokenizer(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ModuleNotFoundError as error:
        raise MissingExtra("transformers", "local") from error
    # The first goes by the model's type and would cut the text as that type's own tokenizer does, unlike SGLang.
    is_generic = _config(folder).get("tokenizer_class") in {"TokenizersBackend", "PreTrainedTokenizerFast"}
    kind = PreTrainedTokenizerFast if is_generic else AutoTokenizer
    try:
        return kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise _unusable(f"the tokenizer in {folder} cannot be loaded: {error}", "give a whole model folder") from error


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.is_file() else {}
    except (OSError, msgspec.DecodeError) as error:
        raise _unusable(f"{path} cannot be read: {error}", "copy the model folder again") from None


def _no_template(folder: str | Path) -> InvalidInput:
    return _unusable(f"the tokenizer in {folder} has no chat template", "give the folder of a chat model")


def _unusable(message: str, hint: str) -> InvalidInput:
    return InvalidInput(message, hint=hint, field=FIELD)
