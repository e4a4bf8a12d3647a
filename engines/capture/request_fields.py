"""Add the request fields that make an engine return tokens, and remove their effects from the reply."""

from collections.abc import Mapping
from typing import Any

_WHOLE = ("return_token_ids", "return_meta_info")
_STREAM = ("return_input_ids_in_sglext", "return_output_ids_in_sglext")
_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")


def asking(body: Mapping[str, Any], *, is_stream: bool) -> dict[str, Any]:
    """Add the fields that make SGLang (seen: 0.5.23) return token ids, logprobs and versions.

    SGLang rejects the fields of a whole reply in a stream. A stream gets usage in every chunk instead: it says which
    tokens the chunk's logprobs belong to, because tokens without text of their own have none.
    """
    if not is_stream:
        return {**body, "logprobs": True, **dict.fromkeys(_WHOLE, True)}
    options = {**_object(body.get("stream_options")), **dict.fromkeys(_STREAM_OPTIONS, True)}
    return {**body, "logprobs": True, **dict.fromkeys(_STREAM, True), "stream_options": options}


def without_asking(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body without the fields that ``asking`` sets, even those that the client set."""
    added = ("logprobs", *_WHOLE, *_STREAM)
    left = {name: value for name, value in body.items() if name not in added}
    options = left.get("stream_options")
    if isinstance(options, Mapping):
        left["stream_options"] = {name: value for name, value in options.items() if name not in _STREAM_OPTIONS}
    if not left.get("stream_options"):
        left.pop("stream_options", None)
    return left


def strip(reply: Mapping[str, Any], client_body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a reply, or one chunk of a stream, as the engine would have sent it for ``client_body``.

    None: the client gets nothing for this chunk.
    """
    reply = texts_only(reply)
    if reply.get("object") == "chat.completion.chunk":
        return _strip_chunk(reply, client_body)
    return _with_choices(_without_sglext(reply, client_body), client_body)


def texts_only(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Keep only the strings in a reply's ``metadata``, as in OpenAI's schema: strict clients reject anything else.

    SGLang puts the numbers of ``weight_versions`` there.
    """
    metadata = reply.get("metadata")
    if not isinstance(metadata, Mapping):
        return dict(reply)
    return {**reply, "metadata": {name: value for name, value in metadata.items() if isinstance(value, str)}}


def _strip_chunk(chunk: Mapping[str, Any], client_body: Mapping[str, Any]) -> dict[str, Any] | None:
    options = _object(client_body.get("stream_options"))
    shown = _without_sglext(chunk, client_body)
    if not chunk.get("choices"):
        # A final chunk with counts, or with ids that only we requested.
        is_wanted = options.get("include_usage") if chunk.get("usage") else "sglext" in shown or "sglext" not in chunk
        return shown if is_wanted else None
    # SGLang sends a chunk for logprobs without text: without the logprobs it is empty.
    if not client_body.get("logprobs") and all(map(_has_logprobs_alone, chunk["choices"])):
        return None
    if not (options.get("include_usage") and options.get("continuous_usage_stats")):
        shown.pop("usage", None)
    return _with_choices(shown, client_body)


def _has_logprobs_alone(choice: Mapping[str, Any]) -> bool:
    said = any(value is not None for value in _object(choice.get("delta")).values())
    return bool(choice.get("logprobs")) and not said and choice.get("finish_reason") is None


def _object(value: object) -> Mapping[str, Any]:
    # A client may send anything; the engine reports what is wrong.
    return value if isinstance(value, Mapping) else {}


def _with_choices(reply: dict[str, Any], client_body: Mapping[str, Any]) -> dict[str, Any]:
    choices = reply.get("choices")
    return {**reply, "choices": [_strip_choice(choice, client_body) for choice in choices]} if choices else reply


def _without_sglext(reply: Mapping[str, Any], client_body: Mapping[str, Any]) -> dict[str, Any]:
    shown = dict(reply)
    wanted = {
        "input_ids": client_body.get("return_input_ids_in_sglext"),
        "output_ids": client_body.get("return_output_ids_in_sglext"),
    }
    kept = {name: value for name, value in _object(shown.pop("sglext", None)).items() if wanted.get(name, True)}
    return {**shown, "sglext": kept} if kept else shown


def _strip_choice(choice: Mapping[str, Any], client_body: Mapping[str, Any]) -> dict[str, Any]:
    shown = dict(choice)
    # Logprobs are always requested, and appear in two places.
    if not client_body.get("logprobs"):
        shown |= {"logprobs": None} if "logprobs" in shown else {}
        meta_info = _object(shown.get("meta_info"))
        shown |= {"meta_info": {n: v for n, v in meta_info.items() if "token_logprobs" not in n}} if meta_info else {}
    has_ids = client_body.get("return_token_ids")
    wanted = {
        "prompt_token_ids": has_ids or client_body.get("return_prompt_token_ids"),
        "response_token_ids": has_ids,
        "meta_info": client_body.get("return_meta_info"),
    }
    return {name: value for name, value in shown.items() if wanted.get(name, True)}
