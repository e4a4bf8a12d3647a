"""Weight versions: which policy produced a sample's tokens, and what becomes of calls while it changes."""

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

PauseMode = Literal["abort", "retract", "in_place"]
"""What becomes of calls in flight: ended with what they have; kept, and their cache computed anew; kept as they are."""

MAX_VERSION = (1 << 63) - 1
APART = "@"
"""Stands after the version in an engine's name for its weights, before what tells them from others so called."""


def oldest_version(*versions: object) -> int | None:
    """The least of the integers in ``versions`` and in the lists there; None if there is none.

    Engines also name versions by words, which have no order.
    """
    flat = [version for each in versions for version in (each if isinstance(each, list) else [each])]
    # The exact type: ``True`` is an int as well.
    return min((v for v in flat if type(v) is int and 0 <= v <= MAX_VERSION), default=None)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Weights that the engines of a run have been given."""

    version: int
    engine_name: str | None = None
    """What the engines were told to call them; None where the trainer told them, or nobody did."""
    keeps_cache: bool = True
    """Whether the engines' caches may have kept what other weights had computed."""


@dataclass(frozen=True, slots=True)
class AnnouncedWeights:
    """What the trainer of a run said last about the weights of its engines. Every announcement is another one."""

    id: str = ""
    """Of this announcement, once and for ever; "" before the first."""
    number: int = 0
    """Which announcement of the run it is."""
    version: int | None = None
    """What the trainer calls the weights; None before the first."""
    engine_name: str | None = None
    """What the engines were told to call them; None where the server did not tell them."""
    last_kept: int = 0
    """The newest announcement at which the engines' caches may have kept what other weights had computed."""

    def followed_by(self, loaded: "Loaded") -> "AnnouncedWeights":
        """The next announcement."""
        number = self.number + 1
        last_kept = number if loaded.keeps_cache else self.last_kept
        return AnnouncedWeights(secrets.token_hex(8), number, loaded.version, loaded.engine_name, last_kept)


def name_apart(version: int, present: Collection[str | None]) -> str:
    """What engines are told to call the weights ``version``, other than what any of them calls its ``present`` ones."""
    name = str(version)
    return f"{name}{APART}{secrets.token_hex(4)}" if name in present else name


def number_of(name: str) -> int | None:
    """The version in an engine's name for its weights; None if that is a word."""
    number = name.partition(APART)[0]
    return int(number) if number.isdecimal() else None
