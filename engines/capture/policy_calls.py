"""Which chats are the policy's: by the model and adapter that each asks for. And the header that leaves a chat out."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from forebay.core.fields import WORDS
from forebay.engines.capture.turn import Turn

RECORD_HEADER = "x-forebay-record"


def is_left_out(headers: Mapping[str, Any]) -> bool:
    """Whether the headers of a call leave it out of the record: ``X-Forebay-Record: false``."""
    given = (str(value).lower() for name, value in headers.items() if name.lower() == RECORD_HEADER)
    return not all(WORDS.get(value) for value in given)


def asked(body: Mapping[str, Any]) -> dict[str, str]:
    """The ``model`` and the ``adapter`` of a chat, as SGLang reads them: ``model:adapter``, or ``lora_path``."""
    given = (body.get(name) for name in ("model", "lora_path"))
    name, path = (value if isinstance(value, str) else "" for value in given)
    model, _, adapter = name.partition(":")
    return {"model": model.strip(), "adapter": adapter.strip() or path}


def name_of(turn: Turn) -> str:
    """What ``policy_models`` calls it: the model, or ``model:adapter``."""
    return f"{turn.model}:{turn.adapter}" if turn.adapter else turn.model


def marked(turns: Iterable[Turn], policy_models: Iterable[str] | None) -> list[Turn]:
    """The turns, those of other models marked. None: all are the policy's. A call without a name always is."""
    if policy_models is None:
        return list(turns)
    names = {"", *policy_models}
    return [turn if name_of(turn) in names else msgspec.structs.replace(turn, is_policys=False) for turn in turns]


def noted_names(turns: Sequence[Turn]) -> list[str]:
    """The names that a rollout asked for, if they need a look: several, an adapter, or one that is not the policy's."""
    names = list(dict.fromkeys(name_of(turn) for turn in turns if name_of(turn)))
    is_plain = len(names) < 2 and all(turn.is_policys and not turn.adapter for turn in turns)
    return [] if is_plain else names
