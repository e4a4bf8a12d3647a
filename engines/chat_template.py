"""The chat template and tokenizer of a model folder: renders prompts to token ids, and decodes token ids."""

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
    """Local equivalent of SGLang's chat template and tokenizer. Both functions are thread-safe.

    ``render`` converts chat messages to the token ids of a prompt for the assistant's reply, and raises
    ``InvalidInput`` for messages that the template rejects. ``text_of`` decodes token ids, including special tokens if
    its second argument is true.
    """

    render: Callable[[Messages], list[int]]
    text_of: TextOf


def check_template(folder: str | Path) -> None:
    """Raise ``InvalidInput`` unless the files in ``folder`` look sufficient for ``load_template``.

    Imports nothing slow.
    """
    _check_files(Path(folder))
    for package in NEEDED:
        if find_spec(package) is None:
            raise _unusable(f"template_path needs {package}, which is not installed", "pip install 'forebay[local]'")


def load_template(folder: str | Path) -> ChatTemplate:
    """Load the chat template of a model folder. Raises ``InvalidInput``; ``MissingExtra`` without ``transformers``."""
    _check_files(Path(folder))
    tokenizer = _tokenizer(Path(folder))
    if not tokenizer.chat_template:
        raise _no_template(folder)
    # Tokenizers change their own settings while they encode.
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
        raise _unusable(f"template_path {str(folder)!r} is not a folder", "use the folder of the served model")
    if not _has_any(folder, TOKENIZER_FILES):
        raise _unusable(f"the folder {folder} has no tokenizer", "it must contain a tokenizer.json")
    if not _has_any(folder, TEMPLATE_FILES) and not _config(folder).get("chat_template"):
        raise _no_template(folder)


def _has_any(folder: Path, names: Sequence[str]) -> bool:
    # `os.path` because `Path.exists` raises for unreadable folders and for names that are too long.
    return any(os.path.exists(folder / name) for name in names)


def _applied(tokenizer: Any, messages: Messages) -> str:
    from jinja2 import TemplateError

    try:
        texts = [{**message, "content": message.get("content") or ""} for message in messages]
        return str(tokenizer.apply_chat_template(texts, tokenize=False, add_generation_prompt=True))
    except (TemplateError, TypeError) as error:
        raise InvalidInput(f"the chat template rejects these messages: {error}", field="messages") from error


def _tokenizer(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ModuleNotFoundError as error:
        raise MissingExtra("transformers", "local") from error
    # AutoTokenizer picks the tokenizer of the model's type, which would split text differently from SGLang.
    is_generic = _config(folder).get("tokenizer_class") in {"TokenizersBackend", "PreTrainedTokenizerFast"}
    kind = PreTrainedTokenizerFast if is_generic else AutoTokenizer
    try:
        return kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise _unusable(f"the tokenizer in {folder} cannot be loaded: {error}", "use a full model folder") from error


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.is_file() else {}
    except (OSError, msgspec.DecodeError) as error:
        raise _unusable(f"{path} cannot be read: {error}", "copy the model folder again") from None


def _no_template(folder: str | Path) -> InvalidInput:
    return _unusable(f"the tokenizer in {folder} has no chat template", "use the folder of a chat model")


def _unusable(message: str, hint: str) -> InvalidInput:
    return InvalidInput(message, hint=hint, field=FIELD)
