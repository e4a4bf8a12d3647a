"""The ``skip`` section of a trainer's configuration, built from dicts, objects or OmegaConf."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from forebay.core.errors import InvalidInput

DEFAULT_DUMP_DIR = "~/.forebay/rollout_dump"


class SkipAction(StrEnum):
    """What replaces a call. The built-in roles support the first two."""

    CACHE = "cache"
    """The dump of this step."""
    REPEAT = "repeat"
    """The dump of this step, or else of the nearest one."""
    RANDOM = "random"
    EMPTY = "empty"


@dataclass(frozen=True)
class SkipConfig:
    """Fields common to all roles; derive from it to add fields. Raises ``InvalidInput`` with the field's name."""

    enable: bool = False
    """The master switch. If false, the function is called, and nothing is read or written."""
    dump_dir: str = DEFAULT_DUMP_DIR
    """The root of all dumps; ``~`` is the home directory."""
    steps: list[int] = field(default_factory=list)
    """The steps on which calls may be skipped. On all other steps the function is called, and nothing is dumped."""
    action: str = SkipAction.CACHE

    actions: ClassVar[tuple[SkipAction, ...]] = tuple(SkipAction)
    """The actions that may be configured."""

    def __post_init__(self) -> None:
        if not isinstance(self.enable, bool):
            raise InvalidInput(f"must be true or false (got {self.enable!r})", field="enable")
        if not isinstance(self.dump_dir, str | Path) or not str(self.dump_dir):
            raise InvalidInput(f"must be the path of a folder (got {self.dump_dir!r})", field="dump_dir")
        # Frozen, so that the values stay as checked; here they are normalised.
        object.__setattr__(self, "dump_dir", str(self.dump_dir))
        object.__setattr__(self, "steps", _checked_steps(self.steps))
        if self.action not in self.actions:
            known = ", ".join(self.actions)
            raise InvalidInput(f"unknown action {self.action!r}; known actions: {known}", field="action")


def _checked_steps(steps: Any) -> list[int]:
    steps = steps.tolist() if hasattr(steps, "tolist") else steps  # a NumPy array
    if not isinstance(steps, Sequence) or isinstance(steps, str | bytes):
        raise InvalidInput(f"must be a list of steps (got {steps!r})", field="steps")
    for number, step in enumerate(steps):
        # To Python, True is an int and would mean step 1.
        if isinstance(step, bool) or not hasattr(step, "__index__") or step < 0:
            raise InvalidInput(f"a step must be an integer of at least 0 (got {step!r})", field=f"steps[{number}]")
    return [int(step) for step in steps]


@dataclass(frozen=True)
class RolloutSkipConfig(SkipConfig):
    """Configuration of the roles ``rollout`` and ``async_rollout``."""

    on_mismatch: str = "warn"
    """If a call's arguments differ from the dump's: ``warn`` and load the dump, ``run`` the function, or ``raise``."""

    actions: ClassVar[tuple[SkipAction, ...]] = (SkipAction.CACHE, SkipAction.REPEAT)

    def __post_init__(self) -> None:
        super().__post_init__()
        known = ("warn",) if self.action == SkipAction.REPEAT else ("warn", "run", "raise")
        if self.on_mismatch not in known:
            words = f"must be {' or '.join(known)} with action {self.action} (got {self.on_mismatch!r})"
            raise InvalidInput(words, field="on_mismatch")


AsyncRolloutSkipConfig = RolloutSkipConfig


class SkipManagerConfig:
    """The ``skip`` section: ``roles`` by name. Each role is also an attribute."""

    def __init__(self, roles: Mapping[str, SkipConfig] | None = None) -> None:
        built_in = {"rollout": RolloutSkipConfig(), "async_rollout": AsyncRolloutSkipConfig()}
        self.roles = dict(built_in if roles is None else roles)

    def __getattr__(self, role: str) -> SkipConfig:
        # Called only for missing attributes; while an instance is copied, `roles` is one of them.
        if role != "roles" and role in self.roles:
            return self.roles[role]
        raise AttributeError(f"the role {role} is not configured")

    @classmethod
    def of(cls, config: object, kinds: Mapping[str, type[SkipConfig]]) -> "SkipManagerConfig":
        """Read a trainer's configuration. ``kinds`` maps roles to configuration classes. Raises ``InvalidInput``."""
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
    """verl's default configuration contains this role, disabled."""
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
    """The fields of a dict, an object or an OmegaConf configuration by name, without Hydra's ``_target_``."""
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
    """The value at ``dotted`` in a configuration of dicts and objects; None if missing."""
    for name in dotted.split("."):
        config = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return config


def text_at(config: object, dotted: str, default: str) -> str:
    """The text at ``dotted``; ``default`` if missing or empty."""
    found = read(config, dotted)
    return default if found is None or found == "" else str(found)


def size_at(config: object, *places: str) -> int:
    """The first of ``places`` that is set; 0 if none is. Raises ``InvalidInput``."""
    for dotted in places:
        if (found := read(config, dotted)) is not None:
            try:
                return int(found)
            except (TypeError, ValueError):
                raise InvalidInput(f"{dotted} must be a number (got {found!r})", field=dotted) from None
    return 0


LEGACY_FLAG = "actor_rollout_ref.rollout.skip.enable"


def replace_legacy_flag(config: object, *, is_replaced: bool) -> None:
    """Warn about verl's older flag. ``is_replaced``: the role ``rollout`` is enabled, so turn the flag off."""
    owner = read(config, LEGACY_FLAG.rpartition(".")[0])
    if not read(owner, "enable"):
        return
    advice = "it is turned off, as skip.rollout.enable is on" if is_replaced else "use skip.rollout.enable instead"
    # Reported at the line that called `SkipManager.init`.
    warnings.warn(f"{LEGACY_FLAG} is deprecated: {advice}", DeprecationWarning, stacklevel=3)
    if is_replaced and isinstance(owner, Mapping):
        owner["enable"] = False  # type: ignore[index]
    elif is_replaced:
        owner.enable = False
