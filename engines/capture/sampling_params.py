"""How tokens were drawn: the sampling parameters of a call, and whether their logprobs are the policy's own.

SGLang (seen: 0.5.23) gives the logprobs of the distribution after penalties, grammar, ``logit_bias`` and temperature,
and before ``top_k``, ``top_p`` and ``min_p``. Set at the server, ``SGLANG_RETURN_ORIGINAL_LOGPROB`` leaves out the
temperature alone; no server tells whether it is set.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from forebay.engines.capture.turn import SamplingSpan, Turn

Sampling: TypeAlias = dict[str, Any]
"""What differs from the policy's own distribution: parameters by their names in a chat, and ``grammar``, the field that
brought one. None stands for a parameter that the call left out and of which the engine does not tell what it took."""

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
"""The parameters that change nothing."""
OF_THE_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Those that an engine may take from the model's ``generation_config.json`` where a chat leaves them out."""
TRUNCATIONS = frozenset({"top_p", "top_k", "min_p"})
BIASES = ("custom_logit_processor", "watermark")
"""Recorded as true: what they do is not told by their values."""
ALIASES = {"min_new_tokens": "min_tokens"}
"""Names of ``/generate``."""
TOP_K_ALL = 1 << 30
"""SGLang's number for the whole vocabulary."""

GRAMMAR_NAMES = ("regex", "ebnf", "json_schema", "structural_tag", "guided_json", "guided_regex", "guided_grammar")


class EngineDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine takes for parameters that a call leaves out, by name; None where that is not known.

    A parameter that is not named is neutral.
    """

    chat: Mapping[str, Any]
    generate: Mapping[str, Any]
    tool_grammar: Literal["never", "strict", "always"] = "strict"
    """When tools that the model may call, but need not, bring a grammar: never, if one is strict, or always."""


UNKNOWN_DEFAULTS = EngineDefaults(chat=dict.fromkeys(OF_THE_MODEL), generate=dict.fromkeys(NEUTRAL))


def grammar_of(body: Mapping[str, Any]) -> str | None:
    """The field by which a chat holds its whole reply to a grammar; None if none does."""
    response_format = body.get("response_format")
    if isinstance(response_format, Mapping) and response_format.get("type", "text") != "text":
        return "response_format"
    if (name := next((name for name in GRAMMAR_NAMES if body.get(name)), None)) is not None:
        return name
    is_required = (body.get("tool_choice") or "auto") not in ("auto", "none")
    return "tool_choice" if body.get("tools") and is_required else None


def sampling_of(body: Mapping[str, Any], defaults: EngineDefaults, *, is_generate: bool = False) -> Sampling:
    """How the tokens of a chat with this body are drawn; ``is_generate`` where it goes over ``/generate``."""
    given = {ALIASES.get(name, name): value for name, value in body.items() if value is not None}
    asked = {**(defaults.generate if is_generate else defaults.chat), **given}
    values = {name: asked.get(name, neutral) for name, neutral in NEUTRAL.items()}
    sampling: Sampling = {name: value for name, value in values.items() if not _is_neutral(name, value)}
    if asked.get("logit_bias"):
        sampling["logit_bias"] = asked["logit_bias"]
    sampling |= {name: True for name in BIASES if asked.get(name)}
    grammar = grammar_of(asked) or _grammar_of_tools(asked, defaults)
    return sampling if grammar is None else {**sampling, "grammar": grammar}


def are_scores(sampling: Sampling) -> bool | None:
    """Whether a prefill at temperature 1 has the same logprobs; None where something is not known."""
    # Truncations come after the logprobs: they change which tokens are drawn, and not what is told of them. So does
    # temperature 0, which SGLang takes for 1 with ``top_k`` 1.
    others = {name: value for name, value in sampling.items() if name not in TRUNCATIONS}
    values = [value for name, value in others.items() if (name, value) != ("temperature", 0)]
    if any(value is not None for value in values):
        return False
    return None if values else True


def drawn(turn: Turn, sampling: Sampling) -> Turn:
    """The turn of one call, with how its tokens were drawn."""
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
        number = float(value)  # type: ignore[arg-type] # engines take numbers in quotes as well
    except (TypeError, ValueError, OverflowError):
        return False
    return number == NEUTRAL[name] or (name == "top_k" and not 0 < number < TOP_K_ALL)
