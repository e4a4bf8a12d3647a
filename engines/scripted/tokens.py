"""The scripted engine's vocabulary and chat template: a token is a byte of UTF-8, or one of two special tokens.

A chat is ``<|im_start|>ROLE\\nCONTENT<|im_end|>\\n`` per message and ends in ``<|im_start|>assistant\\n``. Tools are in
a system message at the beginning. Tool calls are in the assistant's content as
``<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>``. Like real templates, it drops the reasoning of earlier
turns and re-encodes arguments, so replies whose arguments are formatted differently drift.
"""

import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

TURN_START = 256
TURN_END = 257
VOCABULARY_SIZE = 258

MARKS = {"<|im_start|>": TURN_START, "<|im_end|>": TURN_END}
NAMES = {token: mark for mark, token in MARKS.items()}
ASSISTANT = "<|im_start|>assistant\n"


def encode(text: str) -> list[int]:
    """Return the tokens of a text; the two special tokens are one token each."""
    # The group in the pattern keeps the special tokens among the parts.
    parts = re.split("(" + "|".join(map(re.escape, MARKS)) + ")", text)
    return [token for part in parts for token in ([MARKS[part]] if part in MARKS else part.encode())]


def decode(tokens: Iterable[int], *, with_marks: bool = False) -> str:
    """Return the text of tokens. Invalid bytes become replacement characters."""
    data = b"".join(bytes([token]) if token < TURN_START else _mark(token, with_marks) for token in tokens)
    return data.decode(errors="replace")


def logprob(before: int, token: int, version: str) -> float:
    """Return a made-up but deterministic logprob of ``token`` after ``before`` under the weights ``version``."""
    return -((31 * before + 17 * token + zlib.crc32(version.encode())) % 96 + 1) / 32


def encode_chat(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *, is_continued: bool = False
) -> list[int]:
    """Render a chat's prompt, ending with an open assistant turn, or with the continued assistant message."""
    closed = messages[:-1] if is_continued else messages
    turns = (f"<|im_start|>{message.get('role')}\n{_content(message)}<|im_end|>\n" for message in closed)
    text = (_tools(tools) if tools else "") + "".join(turns) + ASSISTANT
    return encode(text + (_content(messages[-1]) if is_continued else ""))


def open_chat(prompt_ids: Sequence[int]) -> tuple[list[dict[str, Any]], str] | None:
    """Decode a prompt into messages and the begun answer; ``None`` if it has no open assistant turn."""
    turns = decode(prompt_ids, with_marks=True).split("<|im_start|>")[1:]
    if not turns or not turns[-1].startswith("assistant\n") or "<|im_end|>" in turns[-1]:
        return None
    parts = [turn.removesuffix("\n").removesuffix("<|im_end|>").partition("\n") for turn in turns[:-1]]
    return [{"role": role, "content": content} for role, _, content in parts], turns[-1].removeprefix("assistant\n")


def call_text(call: Mapping[str, Any], *, is_canonical: bool) -> str:
    """Render a tool call as the model writes it; canonical: with re-encoded arguments."""
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    spelled = _rewritten(arguments) if is_canonical else arguments
    return f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {spelled}}}\n</tool_call>'


def _mark(token: int, is_shown: bool) -> bytes:
    return NAMES[token].encode() if is_shown else b""


def _tools(tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return f"<|im_start|>system\n# Tools\n{listed}<|im_end|>\n"


def _content(message: Mapping[str, Any]) -> str:
    calls = (call_text(call, is_canonical=True) for call in message.get("tool_calls") or ())
    return "\n".join([text for text in [_text(message.get("content"))] if text] + list(calls))


def _text(content: object) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def _rewritten(arguments: object) -> str:
    if not isinstance(arguments, str):
        return json.dumps(arguments, ensure_ascii=False)
    try:
        # Parsed and dumped like real templates: `{"a":1}` becomes `{"a": 1}`, and the turn drifts.
        return json.dumps(json.loads(arguments), ensure_ascii=False)
    except json.JSONDecodeError:
        return json.dumps(arguments, ensure_ascii=False)
