"""What the class of a worker derives from, and that class with its arguments, to be put together on the worker."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar


@dataclass(frozen=True)
class WorkerPlace:
    """Where one worker stands among those of its group."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Among the workers of its node."""
    local_world_size: int = 1
    node: str = "localhost"
    """Name of the machine."""
    roles: Mapping[str, Any] = field(default_factory=dict)
    """The workers of the other roles in the same process, by role, where several share one."""


class Worker:
    """One member of a group. A subclass says with ``register`` which of its methods the group has.

    The place is known from the constructor on: whoever makes a worker enters ``WorkerPlace`` before ``__init__`` runs,
    and a subclass need not call ``super().__init__()``. By itself, as in a unit test, it is the only one of its group.
    """

    _place = WorkerPlace()

    @property
    def rank(self) -> int:
        """0 to ``world_size`` - 1."""
        return self._place.rank

    @property
    def world_size(self) -> int:
        """Workers of the group."""
        return self._place.world_size

    @property
    def local_rank(self) -> int:
        """0 to ``local_world_size`` - 1, among those on the same machine."""
        return self._place.local_rank

    @property
    def local_world_size(self) -> int:
        """Workers of the group on the same machine."""
        return self._place.local_world_size

    @property
    def node(self) -> str:
        """Name of the machine."""
        return self._place.node

    @property
    def roles(self) -> Mapping[str, Any]:
        """The workers of the other roles in this process."""
        return self._place.roles


W = TypeVar("W", bound=Worker)


class ClassWithInitArgs(Generic[W]):
    """``cls(*args, **kwargs)``, made later, in the process of the worker."""

    def __init__(self, cls: type[W], *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args: tuple[Any, ...] = args
        self.kwargs: Mapping[str, Any] = kwargs

    def make(self, place: WorkerPlace) -> W:
        """The worker; it knows its place before its constructor runs."""
        worker = self.cls.__new__(self.cls)
        worker._place = place
        worker.__init__(*self.args, **self.kwargs)  # type: ignore[misc]
        return worker
