"""Add the request fields that make an engine return tokens, and remove their effects from the reply."""

from collections.abc import Collection, Mapping
from typing import Any

from forebay.core.starts.asked_arrays import MAX_KEPT, AskedArrays

ROUTED_ASKED, ROUTED_START = "return_routed_experts", "routed_experts_start_len"
"""Whether rows of routed experts are wanted, and the first token whose row is."""

MASK_ASKED, TOP_ASKED, TOP_NUMBER = "return_sampling_mask", "return_flat_raw_output_top_logprobs", "top_logprobs"
ROW_FIELDS = (ROUTED_ASKED, ROUTED_START, MASK_ASKED, TOP_ASKED)

_ANSWERS = {
    "token_logprobs": "logprobs",
    "routed_experts": ROUTED_ASKED,
    "output_token_sampling_": MASK_ASKED,
    "output_top_logprobs_": TOP_ASKED,
}
"""Parts of the names in ``meta_info``, and the request field that each answers."""
WHOLE_NAMES = ("return_token_ids", "return_meta_info")
"""SGLang (seen: 0.5.23) rejects these in streams, and takes the following instead."""
STREAM_NAMES = ("return_input_ids_in_sglext", "return_output_ids_in_sglext")
VLLM_NAMES = ("return_token_ids", "return_weight_versions")
"""Seen: 0.32."""
_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")


def asking(body: Mapping[str, Any], names: Collection[str], *, is_stream: bool) -> dict[str, Any]:
    """Add the fields ``names`` that make an engine return token ids, and those for logprobs.

    A stream gets usage in every chunk: it says which tokens the chunk's logprobs belong to, because tokens without text
    of their own have none.
    """
    asked = {**body, "logprobs": True, **dict.fromkeys(names, True)}
    if is_stream:
        asked["stream_options"] = {**_object(body.get("stream_options")), **dict.fromkeys(_STREAM_OPTIONS, True)}
    return asked


def asking_rows(body: Mapping[str, Any], arrays: AskedArrays, first: int) -> dict[str, Any]:
    """Return the fields that make SGLang return ``arrays``: routed experts from the token ``first`` on."""
    fields: dict[str, Any] = {ROUTED_ASKED: True, ROUTED_START: first} if arrays.routed_experts else {}
    if body.get("stream"):  # SGLang has no other rows for streams
        return fields
    top_k = body.get("top_k")
    if arrays.sampling_mask and isinstance(top_k, int) and 1 < top_k <= MAX_KEPT:
        fields[MASK_ASKED] = True
    # A client that asks for texts of its own gets no ids: the engine returns one or the other.
    if arrays.top_logprobs and not body.get(TOP_NUMBER):
        fields |= {TOP_NUMBER: arrays.top_logprobs, TOP_ASKED: True}
    return fields


def without_asking(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body without the fields that are added above, even those that the client set."""
    added = ("logprobs", *WHOLE_NAMES, *STREAM_NAMES, *VLLM_NAMES, *ROW_FIELDS)
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
    is_shown = client_body.get("logprobs") or client_body.get("return_token_ids")
    if not is_shown and all(map(_has_logprobs_alone, chunk["choices"])):
        return None
    if not (options.get("include_usage") and options.get("continuous_usage_stats")):
        shown.pop("usage", None)
    return _with_choices(shown, client_body)


def _has_logprobs_alone(choice: Mapping[str, Any]) -> bool:
    said = any(value is not None for value in _object(choice.get("delta")).values())
    return bool(choice.get("logprobs") or choice.get("token_ids")) and not said and choice.get("finish_reason") is None


def _object(value: object) -> Mapping[str, Any]:
    # A client may send anything; the engine reports what is wrong.
    return value if isinstance(value, Mapping) else {}


def _with_choices(reply: dict[str, Any], client_body: Mapping[str, Any]) -> dict[str, Any]:
    choices = reply.get("choices")
    return {**reply, "choices": [_strip_choice(choice, client_body) for choice in choices]} if choices else reply


def _without_sglext(reply: Mapping[str, Any], client_body: Mapping[str, Any]) -> dict[str, Any]:
    shown = dict(reply)
    if not client_body.get("return_token_ids"):
        shown.pop("prompt_token_ids", None)  # vLLM's
    wanted = {
        "input_ids": client_body.get("return_input_ids_in_sglext"),
        "output_ids": client_body.get("return_output_ids_in_sglext"),
        "routed_experts": client_body.get(ROUTED_ASKED),
    }
    kept = {name: value for name, value in _object(shown.pop("sglext", None)).items() if wanted.get(name, True)}
    return {**shown, "sglext": kept} if kept else shown


def _strip_choice(choice: Mapping[str, Any], client_body: Mapping[str, Any]) -> dict[str, Any]:
    has_ids = client_body.get("return_token_ids")
    wanted = {
        "prompt_token_ids": has_ids or client_body.get("return_prompt_token_ids"),
        "response_token_ids": has_ids,
        "meta_info": client_body.get("return_meta_info"),
        "token_ids": has_ids,
        "weight_versions": client_body.get("return_weight_versions"),
    }
    shown = {name: value for name, value in choice.items() if wanted.get(name, True)}
    # Logprobs are always requested, and appear in two places.
    if "logprobs" in shown and not client_body.get("logprobs"):
        shown["logprobs"] = None
    if isinstance(meta_info := shown.get("meta_info"), Mapping):
        unasked = [part for part, field in _ANSWERS.items() if not client_body.get(field)]
        shown["meta_info"] = {name: v for name, v in meta_info.items() if not any(part in name for part in unasked)}
    return shown
