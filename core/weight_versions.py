"""Weight versions: which policy produced a sample's tokens, and how calls in flight are treated when it changes."""

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

PauseMode = Literal["abort", "retract", "in_place"]
"""Calls in flight: ended with what they have; kept, with their cache recomputed; kept unchanged."""

MAX_VERSION = (1 << 63) - 1
APART = "@"
"""Separates the version from a unique suffix in an engine's name for its weights."""


def oldest_version(*versions: object) -> int | None:
    """The smallest integer in ``versions`` and in the lists there; None if there is none.

    Engines may also use text as a version, which has no order.
    """
    flat = [version for each in versions for version in (each if isinstance(each, list) else [each])]
    # The exact type: ``True`` is an int as well.
    return min((v for v in flat if type(v) is int and 0 <= v <= MAX_VERSION), default=None)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Weights loaded into a run's engines."""

    version: int
    engine_name: str | None = None
    """Name given to the engines for them; None if the trainer set it, or if it was not set."""
    keeps_cache: bool = True
    """Whether the engines' caches may contain results of other weights."""


@dataclass(frozen=True, slots=True)
class AnnouncedWeights:
    """The trainer's latest announcement about the weights of a run's engines. Every announcement is distinct."""

    id: str = ""
    """Unique id of this announcement; "" before the first."""
    number: int = 0
    """Sequence number of the announcement within the run."""
    version: int | None = None
    """The trainer's version of the weights; None before the first."""
    engine_name: str | None = None
    """Name given to the engines for them; None if the server did not set it."""
    last_kept: int = 0
    """The newest announcement after which the engines' caches may have kept results of other weights."""

    def followed_by(self, loaded: "Loaded") -> "AnnouncedWeights":
        """Return the next announcement."""
        number = self.number + 1
        last_kept = number if loaded.keeps_cache else self.last_kept
        return AnnouncedWeights(secrets.token_hex(8), number, loaded.version, loaded.engine_name, last_kept)


def name_apart(version: int, present: Collection[str | None]) -> str:
    """Name for the weights ``version`` on the engines, different from the names in ``present``."""
    name = str(version)
    return f"{name}{APART}{secrets.token_hex(4)}" if name in present else name


def number_of(name: str) -> int | None:
    """Extract the version from an engine's name for its weights; None if the name is text."""
    number = name.partition(APART)[0]
    return int(number) if number.isdecimal() else None
