"""The base class of all roles, with the decisions that the manager delegates, and the registry of classes."""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from forebay.core.errors import ForebayError, InvalidInput
from forebay.replay.skip.config import SkipAction, SkipConfig

__all__ = ["ARGUMENTS", "SKIP_REGISTRY", "BaseSkip", "NoDump", "SkipAction", "register_skip"]

ARGUMENTS: ContextVar[Mapping[str, str] | None] = ContextVar("forebay_skip_arguments", default=None)
"""Digests of a call's arguments for ``prepare_data``, computed before the function may change the arguments."""


class NoDump(ForebayError, RuntimeError):
    """``warp_function`` was called without a dump to load."""

    code = "no_dump"
    status = 404


class BaseSkip:
    """Replaces calls of a function that has a role.

    The manager has one instance per role, and many tasks and threads use it at once, so it must not keep state of a
    call. If the function is a coroutine function, the methods run in threads, off the event loop; methods that are
    coroutine functions are awaited. Their own arguments are positional-only, because a function may have its own
    ``step`` argument.
    """

    support_actions: ClassVar[Sequence[SkipAction]] = (SkipAction.CACHE, SkipAction.REPEAT)
    """The actions that this class supports."""
    support_online_step: ClassVar[bool] = False
    """Whether ``extract_step`` returns the step of each call; otherwise ``SkipManager.set_step`` sets it."""
    config_class: ClassVar[type[SkipConfig]] = SkipConfig
    """The class of the role's configuration; derive from ``SkipConfig`` to add fields."""

    def __init__(self, local_config: SkipConfig, global_config: Any) -> None:
        self.local_config = local_config
        self.global_config = global_config
        self.enable = local_config.enable
        self.dump_dir = Path(local_config.dump_dir).expanduser().resolve()
        self.steps = local_config.steps
        self.action = SkipAction(local_config.action)
        if self.action not in self.support_actions:
            known = ", ".join(self.support_actions)
            raise InvalidInput(f"Unsupported action {self.action!r}; supported: {known}", field="action")

    def is_enabled(self) -> bool:
        """Whether calls may be skipped or dumped at all."""
        return self.enable

    def extract_step(self, /, *args: Any, **kwargs: Any) -> int:
        """The step of a call with these arguments. Raises ``ValueError`` if they do not contain it."""
        raise NotImplementedError

    def meet_precondition(self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> bool:
        """Whether ``warp_function`` can replace this call."""
        raise NotImplementedError

    def warp_function(self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The result that the caller gets instead of calling ``func``."""
        raise NotImplementedError

    def prepare_data(self, step: int, result: Any, /, *args: Any, **kwargs: Any) -> None:
        """Store the function's result for later calls."""
        raise NotImplementedError

    def lock_path(self, step: int) -> Path | None:  # noqa: ARG002 - used by overrides
        """The file to lock while the function runs for ``step``; None if calls may run concurrently."""
        return None

    def has_dump(self, step: int) -> bool:  # noqa: ARG002 - used by overrides
        """Whether the dump was created by another call while this one waited for ``lock_path``."""
        return False

    def digest_arguments(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Mapping[str, str] | None:  # noqa: ARG002
        """Digests of a call's arguments by name; None if not needed."""
        return None


SKIP_REGISTRY: dict[str, type[BaseSkip]] = {}
"""The class of each role."""

SkipClass = TypeVar("SkipClass", bound=type[BaseSkip])


def register_skip(role: str) -> Callable[[SkipClass], SkipClass]:
    """A class decorator that registers the class for ``role``. Raises ``InvalidInput``."""

    def register(kind: SkipClass) -> SkipClass:
        if not isinstance(kind, type) or not issubclass(kind, BaseSkip):
            raise InvalidInput(f"{kind!r} is not a class derived from BaseSkip", field="role")
        if SKIP_REGISTRY.get(role, kind) is not kind:
            raise InvalidInput(f"the role {role!r} already has the class {SKIP_REGISTRY[role].__name__}", field="role")
        if kind.support_online_step and kind.extract_step is BaseSkip.extract_step:
            raise InvalidInput(f"{kind.__name__} sets support_online_step but lacks extract_step", field="role")
        SKIP_REGISTRY[role] = kind
        return kind

    if not isinstance(role, str) or not role.isidentifier():
        raise InvalidInput(f"{role!r} is not a valid role name: use an identifier", field="role")
    return register
