"""Calls and their outcomes as bytes, for processes and Ray. All pickling of users' objects is done here.

cloudpickle sends functions and classes of ``__main__`` by value. Large buffers, such as those of numpy arrays, may stay
outside the pickle to avoid copies.
"""

import inspect
import io
import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Any

import cloudpickle

from forebay.core.errors import ForebayError, InvalidInput
from forebay.workers.members.worker import ClassWithInitArgs
from forebay.workers.members.worker_spec import MethodCall, RemoteFailure, WorkerSpec

Frames = list[Any]
"""A pickle as bytes, and the buffers that it left out."""

OUT_OF_BAND_BYTES = 64 << 10
"""Smallest buffer that is sent separately: copying a smaller one is faster."""

VALUE, FAILURE, ERROR, CANCELLED = "value", "failure", "error", "cancelled"


class _NotPlain(Exception):
    """The value is not plain."""


class _PlainPickler(pickle.Pickler):
    """Pickles numbers, strings and their containers, in a third of the time that cloudpickle needs to begin."""

    def reducer_override(self, _: Any) -> Any:
        raise _NotPlain


def to_frames(value: Any, *, out_of_band: bool = True) -> Frames:
    """Pickle any object. Raises the error of its pickling."""
    plain = io.BytesIO()
    try:
        _PlainPickler(plain, pickle.HIGHEST_PROTOCOL).dump(value)
    except _NotPlain:
        return _to_frames(value, out_of_band=out_of_band)
    return [plain.getvalue()]


def _to_frames(value: Any, *, out_of_band: bool) -> Frames:
    if not out_of_band:
        return [cloudpickle.dumps(value, pickle.HIGHEST_PROTOCOL)]
    buffers: list[memoryview] = []

    def stays_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < OUT_OF_BAND_BYTES:
            return True
        buffers.append(raw)
        return False

    return [cloudpickle.dumps(value, pickle.HIGHEST_PROTOCOL, stays_inside), *buffers]


def from_frames(frames: Sequence[Any]) -> Any:
    """Unpickle an object. Raises the error of its unpickling."""
    return pickle.loads(frames[0], buffers=frames[1:])  # noqa: S301 - sent by the other end of this connection


def spec_frames(specs: Sequence[WorkerSpec], *besides: Any, out_of_band: bool = True) -> list[Frames]:
    """First frames for each worker: a tuple of its spec without classes and ``besides``, then its classes."""
    classes: dict[int, Frames] = {}
    frames = []
    for spec in specs:
        key = id(spec.classes)  # usually the same for all, so pickled once
        if key not in classes:
            classes[key] = class_frames(spec.classes, out_of_band=out_of_band)
        frames.append([*to_frames((replace(spec, classes={}), *besides), out_of_band=False), *classes[key]])
    return frames


def class_frames(classes: Mapping[str, ClassWithInitArgs[Any]], *, out_of_band: bool = True) -> Frames:
    """Frames of a spec's classes. Raises ``InvalidInput`` that names the constructor's argument."""
    try:
        return to_frames(dict(classes), out_of_band=out_of_band)
    except Exception:  # pickling may raise anything
        for each in classes.values():
            _refuse_unpicklable(each.cls, each.cls.__name__, each.args, each.kwargs)
            _refuse(each.cls, f"the class {each.cls.__name__}", "cls")
        raise


def read_classes(frames: Sequence[Any]) -> dict[str, ClassWithInitArgs[Any]]:
    """Read classes. Raises ``InvalidInput`` if they cannot be unpickled here."""
    try:
        return from_frames(frames)  # type: ignore[no-any-return]
    except Exception as error:  # unpickling may raise anything
        raise InvalidInput(
            f"the class of the worker cannot be unpickled in its process: {_said(error)}",
            hint="it must be importable there; classes of __main__ and of functions are sent by value",
            field="cls",
        ) from error


def call_frames(call: MethodCall, classes: Mapping[str, ClassWithInitArgs[Any]], *, out_of_band: bool = True) -> Frames:
    """Frames of a call. Raises ``InvalidInput`` that names the argument, by the method's signature in ``classes``."""
    try:
        return to_frames(
            (call.role, call.method, tuple(call.args), dict(call.kwargs), call.function, call.deadline_s),
            out_of_band=out_of_band,
        )
    except Exception:  # pickling may raise anything
        known = classes.get(call.role)
        method = call.function or getattr(known and known.cls, call.method, None)
        if call.function is not None:
            _refuse(call.function, f"the function {call.method}", "function")
        _refuse_unpicklable(method, call.method, (None, *call.args), call.kwargs)
        raise


def read_call(frames: Sequence[Any], method: str) -> MethodCall:
    """Read a call. Raises ``InvalidInput`` if its arguments cannot be unpickled here."""
    try:
        return MethodCall(*from_frames(frames))
    except BaseException as error:  # SystemExit would end the reading thread without a reply
        raise InvalidInput(
            f"the arguments of {method} cannot be unpickled on the worker: {_said(error)}",
            hint="the worker must be able to import the modules of their classes",
            field="args",
        ) from error


def outcome_frames(ended: "Future[Any]", method: str, *, out_of_band: bool = True) -> tuple[str, Frames]:
    """Outcome of a call on the worker: its kind, and the frames for ``read_outcome``. Never raises."""
    try:
        value = ended.result()
    except CancelledError:
        return CANCELLED, []
    except RemoteFailure as failure:
        return FAILURE, [_failure_bytes(failure)]
    except BaseException as error:  # noqa: BLE001 - an error of Forebay, such as a deadline
        return ERROR, to_frames(error)
    try:
        return VALUE, to_frames(value, out_of_band=out_of_band)
    except Exception as error:  # noqa: BLE001 - pickling may raise anything
        refusal = InvalidInput(
            f"the result of {method} is a {type_name(value)} and cannot be pickled: {_said(error)}",
            hint="return plain data, and keep other objects on the worker",
            field="result",
        )
        return ERROR, to_frames(refusal)


def read_outcome(kind: str, frames: Sequence[Any], method: str) -> Any:
    """Return the value of a call, or raise its error."""
    if kind == CANCELLED:
        raise CancelledError
    if kind == FAILURE:
        trace, pickled = from_frames(frames)
        raise RemoteFailure(_error_of(pickled), trace)
    if kind == ERROR:
        raise from_frames(frames)
    try:
        return from_frames(frames)
    except Exception as error:  # unpickling may raise anything
        raise InvalidInput(
            f"the result of {method} cannot be unpickled here: {_said(error)}",
            hint="the controller must be able to import its class",
            field="result",
        ) from error


def type_name(value: Any) -> str:
    """Name of the value's class, with its module unless that is builtins."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _failure_bytes(failure: RemoteFailure) -> bytes:
    # The error is pickled separately, so that its trace arrives even if the error cannot be sent or read.
    try:
        pickled = cloudpickle.dumps(failure.error)
    except Exception:  # noqa: BLE001 - pickling may raise anything
        pickled = None
    return pickle.dumps((failure.trace, pickled))


def _error_of(pickled: bytes | None) -> BaseException | None:
    try:
        error = from_frames([pickled]) if pickled is not None else None
    except Exception:  # noqa: BLE001 - only the worker has its class, or the class rejects its own args
        return None
    return error if isinstance(error, BaseException) else None


def _refuse_unpicklable(function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for number, value in enumerate(args):
        _refuse(value, f"the argument {_parameter(function, number)!r} of {name}", _parameter(function, number))
    for key, value in kwargs.items():
        _refuse(value, f"the argument {key!r} of {name}", key)


def _parameter(function: Any, position: int) -> str:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return str(position)
    if not parameters:
        return str(position)
    parameter = parameters[min(position, len(parameters) - 1)]
    is_one_of_many = parameter.kind is parameter.VAR_POSITIONAL
    return f"*{parameter.name}" if is_one_of_many else parameter.name


def _refuse(value: Any, what: str, field: str) -> None:
    try:
        cloudpickle.dumps(value)
    except Exception as error:  # pickling may raise anything
        raise InvalidInput(
            f"{what} is a {type_name(value)} and cannot be pickled: {_said(error)}",
            hint="send plain data, and create connections, files and locks on the worker",
            field=field,
        ) from error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if not isinstance(error, ForebayError) else str(error)
