"""The part of a trainer's configuration that lies under ``skip``, whatever it is made of: dicts, objects, OmegaConf."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from forebay.core.errors import InvalidInput

DEFAULT_DUMP_DIR = "~/.forebay/rollout_dump"


class SkipAction(StrEnum):
    """What takes the place of a call. The roles that are built in know the first two."""

    CACHE = "cache"
    """What was dumped for this step."""
    REPEAT = "repeat"
    """What was dumped for this step, or else for the nearest one."""
    RANDOM = "random"
    EMPTY = "empty"


@dataclass(frozen=True)
class SkipConfig:
    """What each role has. A role with fields of its own derives from it. Raises ``InvalidInput`` with the field."""

    enable: bool = False
    """The master switch: without it the function is called, and nothing is read or written."""
    dump_dir: str = DEFAULT_DUMP_DIR
    """The root of all dumps; ``~`` is the home directory."""
    steps: list[int] = field(default_factory=list)
    """The steps on which a call may be skipped; on all others the function is called, and nothing is dumped."""
    action: str = SkipAction.CACHE

    actions: ClassVar[tuple[SkipAction, ...]] = tuple(SkipAction)
    """Which actions may be asked for."""

    def __post_init__(self) -> None:
        if not isinstance(self.enable, bool):
            raise InvalidInput(f"{self.enable!r} is neither true nor false", field="enable")
        if not isinstance(self.dump_dir, str | Path) or not str(self.dump_dir):
            raise InvalidInput(f"{self.dump_dir!r} is no folder", field="dump_dir")
        # Frozen, so that nobody changes it past these checks; they bring what was given into one form.
        object.__setattr__(self, "dump_dir", str(self.dump_dir))
        object.__setattr__(self, "steps", _checked_steps(self.steps))
        if self.action not in self.actions:
            known = ", ".join(self.actions)
            raise InvalidInput(f"unknown action {self.action!r}; known actions: {known}", field="action")


def _checked_steps(steps: Any) -> list[int]:
    steps = steps.tolist() if hasattr(steps, "tolist") else steps  # an array of NumPy
    if not isinstance(steps, Sequence) or isinstance(steps, str | bytes):
        raise InvalidInput(f"{steps!r} is no list of steps", field="steps")
    for number, step in enumerate(steps):
        # True is an int to Python, and would be step 1.
        if isinstance(step, bool) or not hasattr(step, "__index__") or step < 0:
            raise InvalidInput(f"{step!r} is no step: an integer from 0 on", field=f"steps[{number}]")
    return [int(step) for step in steps]


@dataclass(frozen=True)
class RolloutSkipConfig(SkipConfig):
    """What the roles ``rollout`` and ``async_rollout`` have."""

    on_mismatch: str = "warn"
    """What a call with other arguments than the dump's does: ``warn`` and load, ``run`` the function, or ``raise``."""

    actions: ClassVar[tuple[SkipAction, ...]] = (SkipAction.CACHE, SkipAction.REPEAT)

    def __post_init__(self) -> None:
        super().__post_init__()
        known = ("warn",) if self.action == SkipAction.REPEAT else ("warn", "run", "raise")
        if self.on_mismatch not in known:
            words = f"must be {' or '.join(known)} with action {self.action} (got {self.on_mismatch!r})"
            raise InvalidInput(words, field="on_mismatch")


AsyncRolloutSkipConfig = RolloutSkipConfig


class SkipManagerConfig:
    """What lies under ``skip``: ``roles`` by their names, which are attributes, too."""

    def __init__(self, roles: Mapping[str, SkipConfig] | None = None) -> None:
        built_in = {"rollout": RolloutSkipConfig(), "async_rollout": AsyncRolloutSkipConfig()}
        self.roles = dict(built_in if roles is None else roles)

    def __getattr__(self, role: str) -> SkipConfig:
        # Only for what is not there otherwise; `roles` is not while an instance is being copied.
        if role != "roles" and role in self.roles:
            return self.roles[role]
        raise AttributeError(f"the role {role} is not configured")

    @classmethod
    def of(cls, config: object, kinds: Mapping[str, type[SkipConfig]]) -> "SkipManagerConfig":
        """That of a trainer's configuration; ``kinds`` has the class of each role's. Raises ``InvalidInput``."""
        roles = {}
        for role, given in _entries(read(config, "skip"), "skip").items():
            if role in kinds:
                roles[role] = _role_config(role, given, kinds[role])
            elif not _is_unused_rollout_tq(role, given):
                hint = _TQ_HINT if role == _TQ else f"known roles: {', '.join(sorted(kinds))}; register_skip adds one"
                raise InvalidInput(f"skip.{role}: nothing is registered for this role", hint=hint, field=f"skip.{role}")
        return cls(roles)


_TQ = "rollout_tq"
_TQ_HINT = "groups that go straight into a queue are replayed as a run, not skipped as a call"


def _is_unused_rollout_tq(role: str, given: object) -> bool:
    """verl's own file of defaults has this role, switched off."""
    return role == _TQ and not read(given, "enable")


def _role_config(role: str, given: object, kind: type[SkipConfig]) -> SkipConfig:
    entries = _entries(given, f"skip.{role}")
    known = {each.name for each in fields(kind)}
    if unknown := sorted(set(entries) - known):
        place = f"skip.{role}.{unknown[0]}"
        raise InvalidInput(f"{place} is unknown", hint=f"known: {', '.join(sorted(known))}", field=place)
    try:
        return kind(**entries)
    except InvalidInput as error:
        place = f"skip.{role}.{error.field}"
        raise InvalidInput(f"{place}: {error.message}", hint=error.hint, field=place) from None


def _entries(given: object, place: str) -> dict[str, Any]:
    """What a dict, an object or a configuration of OmegaConf has, by name; ``_target_`` is Hydra's own."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        found = {str(name): given[name] for name in given}
    elif is_dataclass(given) and not isinstance(given, type):
        found = {each.name: getattr(given, each.name) for each in fields(given)}
    elif hasattr(given, "__dict__"):
        found = {name: value for name, value in vars(given).items() if not name.startswith("_")}
    else:
        raise InvalidInput(f"{place}: {given!r} has no fields", field=place)
    found.pop("_target_", None)
    return found


def read(config: object, dotted: str) -> Any:
    """What lies at ``dotted`` in a configuration of dicts and objects; None where it has nothing."""
    for name in dotted.split("."):
        config = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return config


def text_at(config: object, dotted: str, default: str) -> str:
    """A name; ``default`` where there is none."""
    found = read(config, dotted)
    return default if found is None or found == "" else str(found)


def size_at(config: object, *places: str) -> int:
    """The first of ``places`` that has a number; 0 where none has. Raises ``InvalidInput``."""
    for dotted in places:
        if (found := read(config, dotted)) is not None:
            try:
                return int(found)
            except (TypeError, ValueError):
                raise InvalidInput(f"{dotted}: {found!r} is no number", field=dotted) from None
    return 0


LEGACY_FLAG = "actor_rollout_ref.rollout.skip.enable"


def replace_legacy_flag(config: object, *, is_replaced: bool) -> None:
    """Warn of verl's older flag, and turn it off where the role ``rollout`` does its work: ``is_replaced``."""
    owner = read(config, LEGACY_FLAG.rpartition(".")[0])
    if not read(owner, "enable"):
        return
    advice = "it is turned off, as skip.rollout.enable is on" if is_replaced else "use skip.rollout.enable instead"
    # Shown at the line that called `SkipManager.init`.
    warnings.warn(f"{LEGACY_FLAG} is deprecated: {advice}", DeprecationWarning, stacklevel=3)
    if is_replaced and isinstance(owner, Mapping):
        owner["enable"] = False  # type: ignore[index]
    elif is_replaced:
        owner.enable = False
