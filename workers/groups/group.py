"""A controller's handle of many workers, which has their registered methods."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import update_wrapper
from types import TracebackType
from typing import Any, Self

from forebay.core.errors import InvalidInput
from forebay.workers.backends.abc import WorkerBackend
from forebay.workers.backends.by_name import make_backend
from forebay.workers.groups.bound_method import (
    UNREGISTERED,
    BoundMethod,
    ColocatedClasses,
    any_method,
    bound_methods,
    check_not_hidden,
    classes_of,
    missing,
)
from forebay.workers.groups.call import GroupCall
from forebay.workers.groups.group_workers import GroupWorkers, LostFn
from forebay.workers.groups.method_caller import MethodCaller, got
from forebay.workers.groups.resource_pool import ResourcePool
from forebay.workers.members.worker import ClassWithInitArgs
from forebay.workers.members.worker_spec import Vitals, free_port, worker_specs

Classes = Mapping[str, ClassWithInitArgs[Any]]
DRAIN_S = 30.0
SYSTEM_VARIABLES = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)
"""Variables that give a process its position in the group. They differ between workers and cannot be set."""
SYSTEM_PREFIXES = ("RAY_", "TORCHELASTIC_")
"""Prefixes of variables that Ray and torch's launcher set for their own processes."""


class WorkerGroup:
    """Starts a worker for each process of a pool. Every registered method of its class is a method of the group.

    ``backend``: ``"inline"``, ``"processes"``, ``"ray"`` or a backend object. ``env``: environment variables added to
    those of the workers. ``wait_started=False``: return while workers start; calls wait for their start.

    Raises ``InvalidInput``, ``PlacementFailed``, and ``WorkerFailed`` with the errors of all constructors.
    """

    def __init__(
        self,
        resource_pool: ResourcePool | Sequence[int],
        cls_with_init: ClassWithInitArgs[Any] | ColocatedClasses,
        *,
        backend: str | WorkerBackend = "processes",
        env: Mapping[str, str] | None = None,
        wait_started: bool = True,
    ) -> None:
        pool = ResourcePool.of(resource_pool)
        specs = worker_specs(
            pool.process_on_nodes,
            classes_of(cls_with_init),
            env=_checked_env(env),
            cpus=pool.cpus,
            resources=pool.resources,
            master=("127.0.0.1", free_port()),
        )
        check_not_hidden(bound_methods(specs[0].classes), WorkerGroup)  # before anything is started
        made = make_backend(backend)
        workers = made.start(specs)
        self._bind(GroupWorkers(made, specs, workers), specs[0].classes)
        if wait_started:
            try:
                self._workers.wait_started()
            except BaseException:  # Ctrl-C, too: nothing else could close the workers
                self.close(drain_s=0.0)
                raise

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self._workers.world_size

    @property
    def vitals(self) -> Mapping[int, Vitals]:
        """Last vitals of each worker, by rank."""
        return self._workers.vitals

    @property
    def lost(self) -> Mapping[int, str]:
        """Ranks whose worker is lost and was not restarted, with the reasons."""
        return self._workers.lost

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> GroupCall[list[Any]]:
        """Call any method, registered or not, on all workers; returns a call of all results.

        If every argument is a list as long as the group, each worker gets its own item; otherwise all get the same.
        """
        return self._caller(method_name).whole(*args, **kwargs)

    execute_all = execute_all_async

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The results of ``execute_all_async``."""
        results: list[Any] = got(self.execute_all_async(method_name, *args, **kwargs))
        return results

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> GroupCall[Any]:
        """Call any method, registered or not, on rank 0; returns a call of its result."""
        return self.execute_rank(0, method_name, *args, **kwargs)

    execute_rank_zero = execute_rank_zero_async

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """The result of ``execute_rank_zero_async``."""
        return got(self.execute_rank_zero_async(method_name, *args, **kwargs))

    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``func(worker, *args, **kwargs)`` on rank 0, with the worker of the first class if there are several."""
        if not callable(func):
            raise InvalidInput(f"{func!r} is not a function", field="func", hint="pass a function of the worker")
        role = next(iter(self._classes))
        name = getattr(func, "__name__", "func")
        caller = MethodCaller(self, self._workers, BoundMethod(role, name, UNREGISTERED), name)
        return got(caller.on(0, func, *args, **kwargs))

    def execute_rank(self, rank: int, method_name: str, *args: Any, **kwargs: Any) -> GroupCall[Any]:
        """Call any method, registered or not, on one worker; returns a call of its result."""
        if rank not in range(self.world_size):
            raise InvalidInput(
                f"rank must be 0 to {self.world_size - 1} (got {rank})",
                field="rank",
                hint=f"the group has {self.world_size} workers",
            )
        return self._caller(method_name).on(rank, None, *args, **kwargs)

    def spawn(self, roles: Iterable[str] | None = None) -> dict[str, "WorkerGroup"]:
        """Return a group for each role, or for ``roles``, over the same workers. Closing one of them closes all."""
        wanted = list(self._classes if roles is None else roles)
        for role in wanted:
            if not role or role not in self._classes:
                raise InvalidInput(
                    f"there is no role {role!r}; there are {', '.join(filter(None, self._classes)) or 'none'}",
                    field="roles",
                    hint="create_colocated_worker_cls gives roles to classes",
                )
        return {role: self._of_role(role) for role in wanted}

    def replace(self, rank: int) -> "Future[None]":
        """End this worker if it is alive and start a new one. The future is done when its classes are constructed.

        The state of the old worker is gone.
        """
        return self._workers.replace(rank)

    def started(self, rank: int) -> "Future[None]":
        """Future that is done when the classes of this worker are constructed, and fails with a constructor's error."""
        return self._workers.started(rank)

    def on_lost(self, notify: LostFn) -> None:
        """Call ``notify(rank, reason)``, from any thread, for each worker that is lost."""
        self._workers.on_lost(notify)

    def close(self, drain_s: float = DRAIN_S) -> None:
        """Refuse new calls, wait up to ``drain_s`` for calls that were sent, then end the workers."""
        self._workers.close(drain_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After an error the script no longer waits for the calls that it sent.
        self.close() if error is None else self.close(drain_s=0.0)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_classes" not in self.__dict__:
            raise AttributeError(name)
        raise missing(self._classes, name, bound_methods(self._classes))

    def __repr__(self) -> str:
        classes = ", ".join(each.cls.__name__ for each in self._classes.values())
        return f"<WorkerGroup of {self.world_size} x {classes} on {self._workers.backend.name}>"

    def _of_role(self, role: str) -> "WorkerGroup":
        group, classes = WorkerGroup.__new__(WorkerGroup), {role: self._classes[role]}
        check_not_hidden(bound_methods(classes, is_prefixed=False), WorkerGroup)
        group._bind(self._workers, classes, is_prefixed=False)
        return group

    def _bind(self, workers: GroupWorkers, classes: Classes, *, is_prefixed: bool = True) -> None:
        self._workers, self._classes = workers, classes
        for label, method in bound_methods(classes, is_prefixed=is_prefixed).items():
            caller = MethodCaller(self, workers, method, label)
            self.__dict__[label] = update_wrapper(caller, getattr(classes[method.role].cls, method.name))

    def _caller(self, method_name: str) -> MethodCaller:
        method = any_method(self._classes, method_name)
        return MethodCaller(self, self._workers, method, method_name)


def _checked_env(env: Mapping[str, str] | None) -> dict[str, str]:
    """A copy of ``env``. Raises ``InvalidInput`` for a variable of the system or an invalid one."""
    for name, value in (env or {}).items():
        if name in SYSTEM_VARIABLES or str(name).startswith(SYSTEM_PREFIXES):
            raise InvalidInput(
                f"{name} is a variable of the system and cannot be set",
                field=f"env.{name}",
                hint="a worker reads its position from self.rank, self.world_size, self.local_rank",
            )
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise InvalidInput(f"{name!r} is not a variable name", field="env", hint="use a string without '='")
        if not isinstance(value, str) or "\0" in value:
            raise InvalidInput(f"{name} must be a string (got {value!r})", field=f"env.{name}", hint="use str()")
    return dict(env or {})
