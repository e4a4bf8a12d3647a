"""Splits data along its first axis into one share for each worker, and joins results."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

from forebay.core.errors import InvalidInput

SplitFn = Callable[[Any, Sequence[int]], Sequence[Any]]
JoinFn = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class _Kind:
    """How data of one type is split and joined."""

    length: Callable[[Any], int]
    split: SplitFn
    """Splits a value into parts of given lengths, in order. Each part is a copy."""
    join: JoinFn


def register_split(
    kind: type, split: SplitFn, join: JoinFn, *, length: Callable[[Any], int] = len
) -> Callable[[], None]:
    """Register a type: ``split(value, sizes)`` returns its parts, ``join(parts)`` the whole.

    Applies to subclasses, too. Returns a function that unregisters the type.
    """
    if not isinstance(kind, type):
        raise InvalidInput(f"{kind!r} is not a class", field="kind", hint="register_split(Table, split, join)")
    _KINDS[kind] = _Kind(length, split, join)

    def forget() -> None:
        _KINDS.pop(kind, None)

    return forget


def split(value: Any, num_workers: int, name: str) -> tuple[Sequence[Any], Sequence[int]]:
    """Split ``value`` as evenly as possible, larger parts first. Returns one part per worker, and their sizes.

    Raises ``InvalidInput``, with ``name``, if ``value`` has no first axis.
    """
    least, more = divmod(_length(value, name), num_workers)
    sizes = [least + (rank < more) for rank in range(num_workers)]
    return _parts(value, sizes), sizes


def join(outputs: Sequence[Any]) -> Any:
    """Join outputs into the whole. Returns a list of the unchanged outputs if none has a type that can be joined."""
    kinds = [_joined_kind_of(output) for output in outputs]
    if not any(kinds):
        return list(outputs)
    found = kinds[0]
    if found is None or any(kind is not found for kind in kinds):
        names = ", ".join(type(output).__name__ for output in outputs)
        raise InvalidInput(
            f"results of different types cannot be joined: {names}",
            field="result",
            hint="DP_COMPUTE_METRIC returns them as a list",
        )
    return found.join(outputs)


def _length(value: Any, name: str) -> int:
    kind = _kind_of(value)
    if kind is None:
        raise InvalidInput(
            f"argument {name} cannot be split: {type(value).__name__}",
            field=name,
            hint="lists, tuples, mappings of them, arrays and tensors can; register_split adds types",
        )
    try:
        return kind.length(value)
    except InvalidInput as error:
        raise InvalidInput(f"argument {name} cannot be split: {error.message}", field=name, hint=error.hint) from None


def _parts(value: Any, sizes: Sequence[int]) -> Sequence[Any]:
    kind = _kind_of(value)
    assert kind is not None  # checked by ``_length``
    parts = kind.split(value, sizes)
    if len(parts) != len(sizes):
        raise InvalidInput(
            f"{type(value).__name__} was split into {len(parts)} parts, not {len(sizes)}",
            field="split",
            hint="the split function of register_split must return one part for each size",
        )
    return parts


def _joined_kind_of(value: Any) -> _Kind | None:
    kind = _kind_of(value)
    return None if kind is _KINDS.get(tuple) and hasattr(value, "_fields") else kind  # a record, not a sequence of rows


def _kind_of(value: Any) -> _Kind | None:
    for each in type(value).__mro__:
        if each in _KINDS:
            return _KINDS[each]
    if isinstance(value, Mapping):
        return _MAPPINGS
    # A value of numpy or torch exists only if its module is already imported, so neither is loaded here.
    if (numpy := sys.modules.get("numpy")) is not None and isinstance(value, numpy.ndarray) and value.ndim:
        return _ARRAYS
    if (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor) and value.ndim:
        return _TENSORS
    return None


def _slices(sizes: Sequence[int]) -> Iterator[slice]:
    return (slice(begin, end) for begin, end in pairwise(accumulate(sizes, initial=0)))


def _tuple_length(value: tuple[Any, ...]) -> int:
    if hasattr(value, "_fields"):
        raise InvalidInput("a named tuple has fields, not a first axis", hint="pass a dict, or use register_split")
    return len(value)


def _mapping_length(value: Mapping[Any, Any]) -> int:
    lengths = {key: _length(each, repr(key)) for key, each in value.items()}
    if len(set(lengths.values())) > 1:
        raise InvalidInput(f"its values differ in length: {lengths}", hint="all values must have the same length")
    return next(iter(lengths.values()), 0)


def _split_mapping(value: Mapping[Any, Any], sizes: Sequence[int]) -> Sequence[Any]:
    parts: list[dict[Any, Any]] = [{} for _ in sizes]
    for key, each in value.items():
        for part, its in zip(parts, _parts(each, sizes), strict=True):
            part[key] = its
    return parts


def _join_mappings(parts: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    first = parts[0]
    if any(part.keys() != first.keys() for part in parts):
        keys = "; ".join(", ".join(map(repr, part)) for part in parts)
        raise InvalidInput(
            f"mappings with different keys cannot be joined: {keys}",
            field="result",
            hint="DP_COMPUTE_METRIC returns them as a list",
        )
    return {key: join([part[key] for part in parts]) for key in first}


_KINDS: dict[type, _Kind] = {
    list: _Kind(len, lambda value, sizes: [value[each] for each in _slices(sizes)], lambda p: list(chain(*p))),
    tuple: _Kind(_tuple_length, lambda value, sizes: [value[each] for each in _slices(sizes)], lambda p: (*chain(*p),)),
}
_MAPPINGS = _Kind(_mapping_length, _split_mapping, _join_mappings)
_ARRAYS = _Kind(
    len,
    lambda value, sizes: [value[each].copy() for each in _slices(sizes)],
    lambda arrays: sys.modules["numpy"].concatenate(arrays, axis=0),
)
_TENSORS = _Kind(
    len,
    lambda value, sizes: [value[each].clone() for each in _slices(sizes)],
    lambda parts: sys.modules["torch"].cat(tuple(parts)),
)
