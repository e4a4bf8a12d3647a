"""What every role's class is: the decisions that the manager asks it for, and the register of such classes."""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from forebay.core.errors import ForebayError, InvalidInput
from forebay.replay.skip.config import SkipAction, SkipConfig

__all__ = ["ARGUMENTS", "SKIP_REGISTRY", "BaseSkip", "NoDump", "SkipAction", "register_skip"]

ARGUMENTS: ContextVar[Mapping[str, str] | None] = ContextVar("forebay_skip_arguments", default=None)
"""The digests of a call's arguments, made before the function may change them, for ``prepare_data``."""


class NoDump(ForebayError, RuntimeError):
    """``warp_function`` was called, and nothing is there that could be loaded."""

    code = "no_dump"
    status = 404


class BaseSkip:
    """What is done in place of a function of one role.

    The manager has one instance for each role, and calls of many tasks and threads pass through it at once: nothing of
    one call may be kept on it. Where the function is a coroutine function, the methods run in threads, off the event
    loop; one that is a coroutine function itself is awaited. Their own arguments are positional only: a function may
    have a ``step`` of its own.
    """

    support_actions: ClassVar[Sequence[SkipAction]] = (SkipAction.CACHE, SkipAction.REPEAT)
    """The actions that this class knows."""
    support_online_step: ClassVar[bool] = False
    """Whether ``extract_step`` tells the step of each call; else it is that of ``SkipManager.set_step``."""
    config_class: ClassVar[type[SkipConfig]] = SkipConfig
    """What the configuration of the role is made into; derive from ``SkipConfig`` to have more fields."""

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
        """Whether anything but the function itself is asked."""
        return self.enable

    def extract_step(self, /, *args: Any, **kwargs: Any) -> int:
        """The step of a call with these arguments. Raises ``ValueError`` where they do not tell it."""
        raise NotImplementedError

    def meet_precondition(self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> bool:
        """Whether ``warp_function`` can take the place of this call."""
        raise NotImplementedError

    def warp_function(self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """What the caller gets in place of what ``func`` would return."""
        raise NotImplementedError

    def prepare_data(self, step: int, result: Any, /, *args: Any, **kwargs: Any) -> None:
        """Called with what the function returned, for later calls."""
        raise NotImplementedError

    def lock_path(self, step: int) -> Path | None:  # noqa: ARG002 - for classes that have one
        """The file that is locked while the function runs for ``step``; None: calls run at once."""
        return None

    def has_dump(self, step: int) -> bool:  # noqa: ARG002 - the same
        """Whether, while this call waited for ``lock_path``, another one has made what it needs."""
        return False

    def digest_arguments(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Mapping[str, str] | None:  # noqa: ARG002
        """The digests of a call's arguments by their names, where they are of use."""
        return None


SKIP_REGISTRY: dict[str, type[BaseSkip]] = {}
"""The class of each role."""

SkipClass = TypeVar("SkipClass", bound=type[BaseSkip])


def register_skip(role: str) -> Callable[[SkipClass], SkipClass]:
    """The decorator of a class that makes it the one of ``role``. Raises ``InvalidInput``."""

    def register(kind: SkipClass) -> SkipClass:
        if not isinstance(kind, type) or not issubclass(kind, BaseSkip):
            raise InvalidInput(f"{kind!r} is no class derived from BaseSkip", field="role")
        if SKIP_REGISTRY.get(role, kind) is not kind:
            raise InvalidInput(f"the role {role!r} has the class {SKIP_REGISTRY[role].__name__} already", field="role")
        if kind.support_online_step and kind.extract_step is BaseSkip.extract_step:
            raise InvalidInput(f"{kind.__name__} has support_online_step, and no extract_step", field="role")
        SKIP_REGISTRY[role] = kind
        return kind

    if not isinstance(role, str) or not role.isidentifier():
        raise InvalidInput(f"{role!r} is no name of a role", field="role")
    return register
