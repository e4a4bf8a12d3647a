"""Parse a call's body as an engine would: engines accept more as JSON, as true or as a number than JSON allows."""

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
    """Return the JSON object in a body; None if engines would find none either.

    Lone surrogates, which tokenizers reject, are replaced. Raises ``NoObject`` for an object that cannot be forwarded
    with its meaning, such as one with NaN.
    """
    try:
        body = decode_in_steps(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = _read_leniently(content)
    except RecursionError:
        raise NoObject from None
    return body if isinstance(body, dict) else None


def _read_leniently(content: bytes) -> object:
    """Parse as the standard library does, which most engines use: accepts UTF-16 and unpaired surrogates."""
    try:
        text = json.dumps(json.loads(content), ensure_ascii=False)
    except ValueError:
        return None
    except RecursionError:
        raise NoObject from None
    # Parsed again to reject what the library accepts beyond JSON: NaN cannot be sent to an engine.
    try:
        return _decode(SURROGATES.sub(REPLACEMENT, text))
    except msgspec.DecodeError:
        raise NoObject from None


def read_chat(content: bytes) -> Json | None:
    """``read_object`` for a chat, a text completion or an embedding. Raises ``OwnIds``."""
    body = read_object(content)
    if body is None:
        return None
    for name in ("input_ids", "prompt", "input"):
        if body.get(name) is not None and (name == "input_ids" or _has_ids(body[name])):
            raise OwnIds(name)
    # As pydantic does in SGLang and vLLM: "yes" requests a stream, which must be recorded as one.
    stream = body.get("stream")
    is_stream = stream.lower() in TRUE if isinstance(stream, str) else stream == 1
    return {**body, "stream": True} if is_stream else body


def _has_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and any(isinstance(part, int | list) for part in prompt)


def bounded(value: object, limit: int) -> object:
    """Cap ``value`` at ``limit``, reading numbers as engines do: ``64``, ``64.0`` and ``"64"``."""
    if not isinstance(value, int | float | str):
        return value
    try:
        return limit if float(value) > limit else value
    except (ValueError, OverflowError):
        # An int too large for a float exceeds any limit; the engine rejects a text that is not a number.
        return limit if isinstance(value, int) else value
