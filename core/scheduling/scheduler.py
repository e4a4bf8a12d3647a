"""The settings of a run's scheduler: which policy, and its parameters."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from forebay.core.addresses import engine_root, is_http_url
from forebay.core.fields import wrong_field

Share = Annotated[float, Field(gt=0, lt=1)]
WINDOW = 64


def _read_heavy(value: Any) -> list[str] | float:
    if isinstance(value, list | tuple):
        urls = [engine_root(str(url)) for url in value]
        if urls and all(isinstance(url, str) for url in value) and all(map(is_http_url, urls)):
            return urls
    elif not isinstance(value, bool):
        try:
            if 0 < (share := float(value)) < 1:
                return share
        except (TypeError, ValueError, OverflowError):
            pass
    raise ValueError("must be a share of the engines above 0 and below 1, or a list of their addresses")


def _read_cap(value: Any) -> int | str:
    if value in ("cut", "own", "none"):
        return str(value)
    if not isinstance(value, bool | float):
        try:
            if 1 <= (tokens := int(value)) <= 1 << 31:
                return tokens
        except (TypeError, ValueError):
            pass
    raise ValueError('must be "cut", "own", "none", or a number of tokens')


class Scheduler(BaseModel):
    """What starts next, and on which engine. docs/scheduling.md lists the settings of each policy."""

    # A misspelt field would otherwise be ignored silently.
    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: str = "pull"
    """The name of an entry point in the group ``forebay.policies``."""
    window: int | None = Field(default=None, ge=1, le=1_000_000)
    """Number of groups that the policy looks ahead; null for those of a step, or 64."""
    affinity: float = Field(default=1.25, ge=1, le=1_000)
    """Factor on the lowest load up to which a group's rollouts stay on its engine."""
    heavy: Annotated[list[str] | float, BeforeValidator(_read_heavy)] = 0.25
    """Engines for long rollouts: their addresses, or a share of the engines (at least one)."""
    top: Share = 0.2
    """Share of groups, ranked by their probes, that continue on the heavy engines."""
    by: Literal["tokens", "seconds"] = "tokens"
    """How probes are ranked."""
    cap: Annotated[int | Literal["cut", "own", "none"], BeforeValidator(_read_cap)] = "cut"
    """Token limit off the heavy engines: 1.5 times the probe at the cut, or the group's own probe; or a number."""
    fast_concurrency: float = Field(default=2.0, ge=1, le=1_000)
    """Factor on the slots of an engine that is not heavy, once the probes are there."""
    options: dict[str, Any] = {}
    """Options for third-party policies, which read them themselves."""


SETTINGS_OF: Mapping[str, tuple[str, ...]] = {
    "pull": ("window", "affinity"),
    "static": ("window",),
    "longest-first": ("window", "affinity"),
    "probe": ("window", "heavy", "top", "by", "cap", "fast_concurrency"),
}
"""The settings that Forebay's own policies use; third-party policies may use all of them."""

HINTS: Mapping[str, str] = {
    "window": "for example 128; null for the groups of a step, or 64",
    "affinity": "1 never keeps a group on its engine; 1.25 is the default",
    "heavy": 'for example 0.25, or ["http://10.0.0.1:30000"], which remote_engine_url must also name',
    "top": "0.2 is the fifth of the groups with the longest probes",
    "by": "the size of an answer: tokens or seconds",
    "cap": "cut is 1.5 times the probe at the cut, own 1.5 times a group's own probe, none no cap",
    "fast_concurrency": "with 2, engines that are not heavy take twice their slots once the probes are there",
    "options": "an object, for third-party policies",
}


FIELD_HINTS = {
    "scheduler": f'for example {{"policy": "longest-first"}}; other fields: {", ".join(HINTS)}',
    **{f"scheduler.{name}": hint for name, hint in HINTS.items()},
}


def parse_scheduler(given: Mapping[str, Any]) -> Scheduler:
    """Read the settings from JSON values; numbers may be strings. Raises ``InvalidInput`` for an invalid field."""
    try:
        return Scheduler.model_validate(given)
    except ValidationError as error:
        raise wrong_field(error.errors(include_url=False)[0], FIELD_HINTS, outer=("scheduler",)) from None


def settings_in_use(scheduler: Scheduler | None, groups_per_step: int | None) -> dict[str, Any]:
    """The policy of a run with the settings it uses, for display."""
    given = scheduler or Scheduler()
    every = given.model_dump(exclude={"policy"}) | {"window": given.window or groups_per_step or WINDOW}
    names = SETTINGS_OF.get(given.policy, tuple(every))
    return {"policy": given.policy, **{name: every[name] for name in names}}
