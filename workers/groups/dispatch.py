"""Dispatch modes: how arguments of a call are laid out over workers, and how results are combined."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypedDict

from forebay.core.errors import InvalidInput
from forebay.workers.groups.splitting import join, split


class _NotCalled:
    def __repr__(self) -> str:
        return "NOT_CALLED"

    def __reduce__(self) -> str:
        return "NOT_CALLED"


NOT_CALLED = _NotCalled()
"""Stands for a rank's argument: that rank is not called."""


class HasWorkers(Protocol):
    """The group, as dispatch and collect functions see it."""

    @property
    def world_size(self) -> int:
        """Number of workers."""


LaidOut = tuple[tuple[Sequence[Any], ...], dict[str, Sequence[Any]]]
DispatchFn = Callable[..., LaidOut]
"""``dispatch_fn(worker_group, *args, **kwargs)`` returns, for each argument, a list with one entry per worker."""
CollectFn = Callable[[Any, list[Any]], Any]
"""``collect_fn(worker_group, outputs)`` combines the outputs of the called ranks, in rank order."""


class DispatchFunctions(TypedDict):
    """A custom dispatch mode."""

    dispatch_fn: DispatchFn
    collect_fn: CollectFn


def dispatch_one_to_all(worker_group: HasWorkers, *args: Any, **kwargs: Any) -> LaidOut:
    """Pass every argument whole to every worker."""
    size = worker_group.world_size
    return tuple([value] * size for value in args), {name: [value] * size for name, value in kwargs.items()}


def dispatch_all_to_all(worker_group: HasWorkers, *args: Any, **kwargs: Any) -> LaidOut:
    """Pass each worker its value of every argument, a list with one per worker. Raises ``InvalidInput`` otherwise."""
    for name, value in _named(args, kwargs):
        if not isinstance(value, list | tuple) or len(value) != worker_group.world_size:
            given = f"{len(value)} values" if isinstance(value, list | tuple) else type(value).__name__
            raise InvalidInput(
                f"argument {name} must be a list with one value for each of {worker_group.world_size} workers,"
                f" and is {given}",
                field=name,
                hint="ONE_TO_ALL passes the same value to every worker, DP_COMPUTE_PROTO splits it",
            )
    return args, dict(kwargs)


def dispatch_split(worker_group: HasWorkers, *args: Any, **kwargs: Any) -> LaidOut:
    """Split each argument along its first axis. Ranks with an empty share are not called."""
    lengths: list[int] = []
    laid_out: dict[str, Sequence[Any]] = {}
    for name, value in _named(args, kwargs):
        parts, sizes = split(value, worker_group.world_size, name)
        lengths.append(sum(sizes))
        if lengths[-1] != lengths[0]:
            raise InvalidInput(
                f"argument {name} has length {lengths[-1]}, those before it have {lengths[0]}",
                field=name,
                hint="all arguments that are split must have the same length",
            )
        # Rank 0 is called even for empty data, so that the call has a result.
        called = [size > 0 or (lengths[0] == 0 and rank == 0) for rank, size in enumerate(sizes)]
        laid_out[name] = [part if is_called else NOT_CALLED for part, is_called in zip(parts, called, strict=True)]
    positional = tuple(laid_out.pop(str(number)) for number in range(len(args)))
    return positional, laid_out


def dispatch_split_and_function(worker_group: HasWorkers, *args: Any, **kwargs: Any) -> LaidOut:
    """Pass the first argument, a function, whole to each worker, and split the others."""
    if not args or not callable(args[0]):
        raise InvalidInput(
            "the first argument must be a function, by position", field="0", hint="group.method(function, data)"
        )
    positional, named = dispatch_split(worker_group, *args[1:], **kwargs)
    return ([args[0]] * worker_group.world_size, *positional), named


def collect_all_to_all(worker_group: HasWorkers, outputs: list[Any]) -> list[Any]:  # noqa: ARG001 - a collect function
    """Return the results as a list, by rank."""
    return outputs


def collect_joined(worker_group: HasWorkers, outputs: list[Any]) -> Any:  # noqa: ARG001 - a collect function
    """Join the results in rank order. Results of a type that cannot be joined are returned as a list."""
    return join(outputs)


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Pairs of name and argument. The name of a positional argument is its number."""
    yield from ((str(number), value) for number, value in enumerate(args))
    yield from kwargs.items()


class DispatchMode:
    """A name of ``Dispatch`` for a dispatch and a collect function. ``MAP`` has neither."""

    def __init__(self, name: str, dispatch_fn: DispatchFn | None = None, collect_fn: CollectFn | None = None) -> None:
        self.name, self.dispatch_fn, self.collect_fn = name, dispatch_fn, collect_fn

    def __repr__(self) -> str:
        return f"Dispatch.{self.name}"

    def __reduce__(self) -> tuple[object, ...]:
        return (_mode_named, (self.name,))  # classes are sent to workers, and their methods refer to modes


class _Modes(type):
    """Makes registered modes attributes and members of a class."""

    _modes: dict[str, DispatchMode]

    def __contains__(cls, mode: object) -> bool:
        return mode in cls._modes if isinstance(mode, str) else mode in cls._modes.values()

    def __iter__(cls) -> Iterator[DispatchMode]:
        return iter(cls._modes.values())

    def __getattr__(cls, name: str) -> DispatchMode:
        try:
            return cls._modes[name]
        except KeyError:
            raise AttributeError(f"unknown dispatch mode {name}; the modes are {', '.join(cls._modes)}") from None


class Dispatch(metaclass=_Modes):
    """The dispatch modes. ``register_dispatch_mode`` adds others."""

    ONE_TO_ALL = DispatchMode("ONE_TO_ALL", dispatch_one_to_all, collect_all_to_all)
    """Every worker gets every argument whole. Returns a list of results."""
    ALL_TO_ALL = DispatchMode("ALL_TO_ALL", dispatch_all_to_all, collect_all_to_all)
    """Every argument is a list with one value per worker. Returns a list of results."""
    DP_COMPUTE = DispatchMode("DP_COMPUTE", dispatch_all_to_all, collect_all_to_all)
    """Alias of ``ALL_TO_ALL``."""
    DP_COMPUTE_PROTO = DispatchMode("DP_COMPUTE_PROTO", dispatch_split, collect_joined)
    """Arguments are split along their first axis; results are joined in order."""
    DP_COMPUTE_PROTO_WITH_FUNC = DispatchMode("DP_COMPUTE_PROTO_WITH_FUNC", dispatch_split_and_function, collect_joined)
    """Like ``DP_COMPUTE_PROTO``, after a first argument that is a function, which every worker gets."""
    DP_COMPUTE_METRIC = DispatchMode("DP_COMPUTE_METRIC", dispatch_split, collect_all_to_all)
    """Arguments are split along their first axis. Returns a list of results."""
    MAP = DispatchMode("MAP")
    """An idle worker takes the next item of the first argument. Results are available as they finish."""

    _modes: dict[str, DispatchMode]

    @classmethod
    def remove(cls, name: str) -> None:
        """Remove a mode that was registered. Groups that have bound it keep it."""
        mode = cls._modes.get(name)
        if mode is None or mode in PREDEFINED:
            raise InvalidInput(
                f"{name!r} was not registered as a dispatch mode",
                field="dispatch_mode",
                hint="only modes added by register_dispatch_mode can be removed",
            )
        del cls._modes[name]


PREDEFINED = tuple(each for each in vars(Dispatch).values() if isinstance(each, DispatchMode))
Dispatch._modes = {mode.name: mode for mode in PREDEFINED}


def _mode_named(name: str) -> DispatchMode:
    # A worker may not know a mode that its controller registered: nothing is dispatched there.
    return Dispatch._modes.get(name) or DispatchMode(name)


def check_dispatch_mode(mode: object) -> None:
    """Raise ``InvalidInput`` unless ``mode`` is a mode or a dict of two functions."""
    if isinstance(mode, DispatchMode) and mode in Dispatch:
        return
    if isinstance(mode, Mapping) and set(mode) == {"dispatch_fn", "collect_fn"} and all(map(callable, mode.values())):
        return
    raise InvalidInput(
        f"{mode!r} is not a dispatch mode",
        field="dispatch_mode",
        hint="use a mode of Dispatch, or a dict with the functions dispatch_fn and collect_fn",
    )


def get_predefined_dispatch_fn(dispatch_mode: DispatchMode) -> DispatchFunctions:
    """The two functions of a mode."""
    check_dispatch_mode(dispatch_mode)
    if dispatch_mode.dispatch_fn is None or dispatch_mode.collect_fn is None:
        raise InvalidInput(
            "MAP has no dispatch and collect functions: an idle worker takes the next item",
            field="dispatch_mode",
            hint="register_dispatch_mode adds a mode that has them",
        )
    return DispatchFunctions(dispatch_fn=dispatch_mode.dispatch_fn, collect_fn=dispatch_mode.collect_fn)


def register_dispatch_mode(dispatch_mode_name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> DispatchMode:
    """Add a mode, available as ``Dispatch.NAME``. ``Dispatch.remove`` removes it."""
    if dispatch_mode_name in Dispatch:
        raise InvalidInput(
            f"dispatch mode {dispatch_mode_name!r} already exists",
            field="dispatch_mode_name",
            hint="update_dispatch_mode changes the functions of a mode",
        )
    if not dispatch_mode_name.isidentifier() or hasattr(Dispatch, dispatch_mode_name):
        raise InvalidInput(
            f"{dispatch_mode_name!r} cannot be a name of Dispatch", field="dispatch_mode_name", hint="as 'TWO_TO_ALL'"
        )
    check_dispatch_mode(DispatchFunctions(dispatch_fn=dispatch_fn, collect_fn=collect_fn))
    mode = DispatchMode(dispatch_mode_name, dispatch_fn, collect_fn)
    Dispatch._modes[dispatch_mode_name] = mode
    return mode


def update_dispatch_mode(dispatch_mode: DispatchMode, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> None:
    """Change the functions of a mode, for groups created from now on."""
    get_predefined_dispatch_fn(dispatch_mode)
    check_dispatch_mode(DispatchFunctions(dispatch_fn=dispatch_fn, collect_fn=collect_fn))
    dispatch_mode.dispatch_fn, dispatch_mode.collect_fn = dispatch_fn, collect_fn
