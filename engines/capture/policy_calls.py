"""Decide by model and adapter which chats are the policy's, and read the header that excludes a chat."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from forebay.core.fields import WORDS
from forebay.engines.capture.turn import Turn

RECORD_HEADER = "x-forebay-record"


def is_left_out(headers: Mapping[str, Any]) -> bool:
    """Whether the header ``X-Forebay-Record: false`` excludes a call from the record."""
    given = (str(value).lower() for name, value in headers.items() if name.lower() == RECORD_HEADER)
    return not all(WORDS.get(value) for value in given)


def asked(body: Mapping[str, Any]) -> dict[str, str]:
    """Return a chat's ``model`` and ``adapter`` as SGLang reads them: ``model:adapter``, or ``lora_path``."""
    given = (body.get(name) for name in ("model", "lora_path"))
    name, path = (value if isinstance(value, str) else "" for value in given)
    model, _, adapter = name.partition(":")
    return {"model": model.strip(), "adapter": adapter.strip() or path}


def name_of(turn: Turn) -> str:
    """Name of the turn's model as in ``policy_models``: the model, or ``model:adapter``."""
    return _name(turn.model, turn.adapter)


def _name(model: str, adapter: str) -> str:
    return f"{model}:{adapter}" if adapter else model


def is_policys(body: Mapping[str, Any], policy_models: Iterable[str] | None) -> bool:
    """Whether ``marked`` would leave the turns of this chat to the policy."""
    return policy_models is None or _name(**asked(body)) in {"", *policy_models}


def marked(turns: Iterable[Turn], policy_models: Iterable[str] | None) -> list[Turn]:
    """Mark the turns of other models. None: all are the policy's. A call without a name always is."""
    if policy_models is None:
        return list(turns)
    names = {"", *policy_models}
    return [turn if name_of(turn) in names else msgspec.structs.replace(turn, is_policys=False) for turn in turns]


def noted_names(turns: Sequence[Turn]) -> list[str]:
    """Return the model names a rollout requested if they are unusual: several, an adapter, or not the policy's."""
    names = list(dict.fromkeys(name_of(turn) for turn in turns if name_of(turn)))
    is_plain = len(names) < 2 and all(turn.is_policys and not turn.adapter for turn in turns)
    return [] if is_plain else names
