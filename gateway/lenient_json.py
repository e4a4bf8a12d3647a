"""The body of a call as an engine would read it: engines take more for JSON, true or a number than JSON does."""

import json
import re
from typing import Any

import msgspec

from forebay.gateway.off_loop import decode_in_steps
from forebay.gateway.refusals import NoObject, OwnIds

Json = dict[str, Any]

TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})
"""Words that pydantic reads as true."""
SURROGATES = re.compile("[\ud800-\udfff]")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_decode = msgspec.json.Decoder().decode


def read_object(content: bytes) -> Json | None:
    """The JSON object in a body; None if no engine would find one either.

    Halves of surrogate pairs, which no tokenizer takes, are replaced. Raises ``NoObject`` for an object that cannot be
    passed on as it was meant, such as one with NaN.
    """
    try:
        body = decode_in_steps(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = _read_leniently(content)
    except RecursionError:
        raise NoObject from None
    return body if isinstance(body, dict) else None


def _read_leniently(content: bytes) -> object:
    """As the standard library reads it, in which most engines are written: UTF-16 too, and unpaired surrogates."""
    try:
        text = json.dumps(json.loads(content), ensure_ascii=False)
    except ValueError:
        return None
    except RecursionError:
        raise NoObject from None
    # The text again, for what the library reads and JSON has not: an engine could not be given a NaN.
    try:
        return _decode(SURROGATES.sub(REPLACEMENT, text))
    except msgspec.DecodeError:
        raise NoObject from None


def read_chat(content: bytes) -> Json | None:
    """``read_object`` for a completion of a chat or of a text, or for an embedding. Raises ``OwnIds``."""
    body = read_object(content)
    if body is None:
        return None
    for name in ("input_ids", "prompt", "input"):
        if body.get(name) is not None and (name == "input_ids" or _has_ids(body[name])):
            raise OwnIds(name)
    # As pydantic reads it, in SGLang and vLLM: a "yes" asks for a stream that must be recorded as one.
    stream = body.get("stream")
    is_stream = stream.lower() in TRUE if isinstance(stream, str) else stream == 1
    return {**body, "stream": True} if is_stream else body


def _has_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and any(isinstance(part, int | list) for part in prompt)


def bounded(value: object, limit: int) -> object:
    """``value``, unless an engine would read more than ``limit`` in it: it takes ``64``, ``64.0`` and ``"64"``."""
    if not isinstance(value, int | float | str):
        return value
    try:
        return limit if float(value) > limit else value
    except (ValueError, OverflowError):
        # Too large an int for a float is over any limit; a text that is no number is the engine's to refuse.
        return limit if isinstance(value, int) else value
