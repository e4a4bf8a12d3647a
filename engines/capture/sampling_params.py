"""Record the sampling parameters of a call, and decide whether its logprobs are the policy's own.

SGLang (seen: 0.5.23) returns logprobs after penalties, grammar, ``logit_bias`` and temperature, but before ``top_k``,
``top_p`` and ``min_p``. The server setting ``SGLANG_RETURN_ORIGINAL_LOGPROB`` excludes the temperature only; a server
does not report whether it is set.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from forebay.engines.capture.turn import SamplingSpan, Turn

Sampling: TypeAlias = dict[str, Any]
"""Deviations from the policy's own distribution: parameters by their chat names, and ``grammar``, the field that set
one. None for a parameter that the call omitted and whose engine default is unknown."""

NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_tokens": 0,
}
"""Values of the parameters that change nothing."""
OF_THE_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters whose default an engine may read from the model's ``generation_config.json``."""
TRUNCATIONS = frozenset({"top_p", "top_k", "min_p"})
BIASES = ("custom_logit_processor", "watermark", "bad_words", "allowed_token_ids")
"""Recorded as true, because their values do not describe their effect."""
ALIASES = {"min_new_tokens": "min_tokens"}
"""Names in ``/generate``."""
TOP_K_ALL = 1 << 30
"""SGLang's value for the whole vocabulary."""

GRAMMAR_NAMES = (
    "regex",
    "ebnf",
    "json_schema",
    "structural_tag",
    "guided_json",
    "guided_regex",
    "guided_grammar",
    "structured_outputs",
)


class EngineDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's defaults for omitted parameters, by name; None for an unknown default.

    Parameters that are not listed are neutral.
    """

    chat: Mapping[str, Any]
    generate: Mapping[str, Any]
    logprobs: Literal["", "raw"] | None = ""
    """What logprobs are of: "" for the logits after the temperature, ``raw`` for those before it, None if unknown."""
    tool_grammar: Literal["never", "strict", "always"] = "strict"
    """When optional tools impose a grammar: never, if one of them is strict, or always."""


UNKNOWN_DEFAULTS = EngineDefaults(chat=dict.fromkeys(OF_THE_MODEL), generate=dict.fromkeys(NEUTRAL))


def grammar_of(body: Mapping[str, Any]) -> str | None:
    """Return the chat field that constrains the whole reply to a grammar, or None."""
    response_format = body.get("response_format")
    if isinstance(response_format, Mapping) and response_format.get("type", "text") != "text":
        return "response_format"
    if (name := next((name for name in GRAMMAR_NAMES if body.get(name)), None)) is not None:
        return name
    is_required = (body.get("tool_choice") or "auto") not in ("auto", "none")
    return "tool_choice" if body.get("tools") and is_required else None


def sampling_of(body: Mapping[str, Any], defaults: EngineDefaults, *, is_generate: bool = False) -> Sampling:
    """Return how the tokens of a chat with this body are sampled. ``is_generate``: it is sent to ``/generate``."""
    given = {ALIASES.get(name, name): value for name, value in body.items() if value is not None}
    asked = {**(defaults.generate if is_generate else defaults.chat), **given}
    values = {name: asked.get(name, neutral) for name, neutral in NEUTRAL.items()}
    sampling: Sampling = {name: value for name, value in values.items() if not _is_neutral(name, value)}
    if asked.get("logit_bias"):
        sampling["logit_bias"] = asked["logit_bias"]
    sampling |= {name: True for name in BIASES if asked.get(name)}
    sampling |= {} if defaults.logprobs == "" else {"logprobs": defaults.logprobs}
    grammar = grammar_of(asked) or _grammar_of_tools(asked, defaults)
    return sampling if grammar is None else {**sampling, "grammar": grammar}


def are_scores(sampling: Sampling) -> bool | None:
    """Whether a prefill at temperature 1 yields the same logprobs; None if that is unknown."""
    # Truncations apply after the logprobs: they change which tokens are sampled, not the reported logprobs.
    # Temperature 0 is similar: SGLang treats it as temperature 1 with `top_k` 1.
    others = {name: value for name, value in sampling.items() if name not in TRUNCATIONS}
    values = [value for name, value in others.items() if (name, value) != ("temperature", 0)]
    if any(value is not None for value in values):
        return False
    return None if values else True


def drawn(turn: Turn, sampling: Sampling) -> Turn:
    """Return the turn of one call with its sampling parameters attached."""
    if not turn.sampled_ids:
        return turn
    return msgspec.structs.replace(turn, sampling=[SamplingSpan(sampling, 0, len(turn.sampled_ids))])


def _grammar_of_tools(body: Mapping[str, Any], defaults: EngineDefaults) -> str | None:
    tools = body.get("tools")
    if not isinstance(tools, list) or not tools or body.get("tool_choice") == "none":
        return None
    is_held = defaults.tool_grammar == "always" or (defaults.tool_grammar == "strict" and any(map(_is_strict, tools)))
    return "tools" if is_held else None


def _is_strict(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and bool(function.get("strict"))


def _is_neutral(name: str, value: object) -> bool:
    try:
        number = float(value)  # type: ignore[arg-type] # engines also accept quoted numbers
    except (TypeError, ValueError, OverflowError):
        return False
    return number == NEUTRAL[name] or (name == "top_k" and not 0 < number < TOP_K_ALL)
