"""Results of a call on a worker group, which may still be pending."""

import asyncio
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeVar

from forebay.core.errors import ForebayError, InvalidInput
from forebay.workers.members.worker_errors import WorkerError, WorkerFailed, WorkerLost
from forebay.workers.members.worker_spec import RemoteFailure

T = TypeVar("T")
Outputs = Mapping[int, Any]
"""Results of the workers, by rank, in the order of ranks."""


class GroupCall(Generic[T]):
    """A call that was sent, or will be once its arguments are available. ``get`` or ``await`` its value.

    It may be an argument of a call on any group; the workers then get its value.
    """

    def __init__(self, method: str, outputs: "Future[Outputs]", collect: Callable[[Outputs], T]) -> None:
        self._method, self._outputs, self._collect = method, outputs, collect
        self._lock = threading.Lock()
        self._collected: list[T] = []

    @property
    def done(self) -> bool:
        """Whether it has succeeded, failed or been cancelled."""
        return self._outputs.done()

    def get(self, timeout_s: float | None = None) -> T:
        """Wait for the value. Raises ``TimeoutError`` after ``timeout_s``; the call continues.

        A failed call raises ``WorkerFailed`` (with the traceback of every rank that raised), ``WorkerLost``,
        ``TimeoutError`` (deadline), ``InvalidInput`` (something cannot be pickled) or ``CancelledError``.
        """
        try:
            outputs = self._outputs.result(timeout_s)
        except TimeoutError:
            if self._outputs.done():
                raise
            raise TimeoutError(f"{self._method} has not ended after {timeout_s:g} s, and goes on") from None
        return self._value(outputs)

    def cancel(self) -> bool:
        """Cancel running ``async`` methods, and others that have not begun. False if the call has ended."""
        return self._outputs.cancel()

    def __await__(self) -> Generator[Any, None, T]:
        outputs = yield from asyncio.wrap_future(self._outputs).__await__()
        return self._value(outputs)

    def __repr__(self) -> str:
        return f"<Call of {self._method}, {'ended' if self.done else 'on its way'}>"

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise InvalidInput(
            f"a call ({self._method}) cannot be pickled", hint="pass it on its own, or get() it", field="call"
        )

    def _value(self, outputs: Outputs) -> T:
        # Collected here, not on arrival: a user's function must not delay other replies.
        with self._lock:
            if not self._collected:
                self._collected.append(self._collect(outputs))
            return self._collected[0]


def gather(
    whole: "Future[Outputs]",
    method: str,
    futures: "Mapping[int, Future[Any]]",
    world_size: int,
    rank_of: Callable[[int], int],
) -> None:
    """End ``whole`` when all ``futures`` have ended, with one error if any failed. ``rank_of`` names their ranks."""
    left, lock = set(futures), threading.Lock()

    def ended(key: int, _: "Future[Any]") -> None:
        with lock:
            left.discard(key)
            if left:
                return
        if not whole.set_running_or_notify_cancel():
            return
        errors = {rank_of(key): error for key, each in futures.items() if (error := error_of(each)) is not None}
        if errors:
            whole.set_exception(one_error(method, errors, world_size))
        else:
            whole.set_result({key: each.result() for key, each in futures.items()})

    for key, future in futures.items():
        future.add_done_callback(partial(ended, key))
    if not futures:
        whole.set_result({})
    whole.add_done_callback(lambda ended: [each.cancel() for each in futures.values()] if ended.cancelled() else None)


def error_of(future: "Future[Any]") -> BaseException | None:
    """Error of a future that has ended, or None."""
    return WorkerError("the call was cancelled") if future.cancelled() else future.exception()


def one_error(method: str, errors: Mapping[int, BaseException], world_size: int) -> BaseException:
    """The error that a call raises when some of its ranks failed."""
    first = next(iter(errors.values()))
    for error in errors.values():  # the caller's mistake, identical on every rank
        if isinstance(error, InvalidInput):
            return error
    if any(isinstance(error, RemoteFailure) for error in errors.values()):
        traces = {
            rank: error.trace if isinstance(error, RemoteFailure) else str(error) for rank, error in errors.items()
        }
        failed = WorkerFailed(method, traces, world_size)
        failed.__cause__ = next((each.error for each in errors.values() if isinstance(each, RemoteFailure)), None)
        return failed
    late = [rank for rank, error in errors.items() if isinstance(error, TimeoutError)]
    if late and not isinstance(first, WorkerLost):
        return TimeoutError(f"{first} (rank {', '.join(map(str, late))})")
    return first if isinstance(first, ForebayError) else WorkerError(f"{method} failed: {first!r}")


def waits_for(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an argument is a call, or a list, tuple or dict that contains one."""
    return any(isinstance(each, GroupCall) for value in (*args, *kwargs.values()) for each in _inside(value))


def materialized(value: Any) -> Any:
    """``value`` with each call replaced by its value. Waits for the calls."""
    if isinstance(value, GroupCall):
        return value.get()
    if not any(isinstance(each, GroupCall) for each in _inside(value)):
        return value
    if type(value) is dict:
        return {key: materialized(each) for key, each in value.items()}
    return type(value)(each.get() if isinstance(each, GroupCall) else each for each in value)


def _inside(value: Any) -> Sequence[Any]:
    if type(value) is dict:
        return tuple(value.values())
    return value if type(value) in (list, tuple) else (value,)
