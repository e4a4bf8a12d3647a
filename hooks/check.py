"""Checks of a generator file's hooks without calling them: which exist, and which are invalid."""

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from forebay.hooks import specs
from forebay.hooks.contract import declared_contract

if TYPE_CHECKING:
    from forebay.hooks.types import Contract

POSITIONAL: dict[str, tuple[str, ...]] = {
    "get_group_data_meta_info": ("temp_data",),
    "is_valid_group": ("group", "min_valid_group_size or group_size", "task_type"),
    "filter_item": ("item", "task_type"),
    "normalize_group_data": ("group",),
    "pad_group_data": ("group", "group_size"),
    "transform_group": ("group", "task_type"),
}
"""Positional arguments of each plain function."""

_LIKENESS = 0.87
"""difflib ratio from which a name counts as a misspelt hook; ``normalise_group_data`` has 0.95."""


@dataclass
class HookReport:
    """Hooks of a file, each with the contracts that call it ("A", "B" or "A, B"; "" for notifications)."""

    hooks: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    contract: "Contract | None" = None
    """The contract; None if only the first answer of ``is_valid_group`` will show it."""


def check_hooks(namespace: Mapping[str, object]) -> HookReport:
    """Check the hooks in a module's namespace. A file with any ``problems`` should not be used."""
    offered = [name for name in specs.READ_HOOKS if callable(namespace.get(name))]
    offered += [name for name in specs.NOTIFICATIONS if is_marked(namespace.get(name))]
    report = HookReport({name: _asked_under(name) for name in offered}, contract=_contract(namespace, offered))
    for name in specs.READ_HOOKS:
        value = namespace.get(name)
        if value is not None and not callable(value):
            report.problems.append(f"{name} is of type {type(value).__name__}, not a function")
    for name in offered:
        report.problems += _misfits(name, namespace[name])
    report.problems += _bad_declaration(namespace)
    report.problems += _misspelt(namespace)
    return report


def is_marked(value: object) -> bool:
    """Whether ``value`` carries the mark of ``forebay.hooks.hookimpl``."""
    # pluggy's mark is a dict of options; anything else with this name belongs to the user.
    return callable(value) and isinstance(getattr(value, f"{specs.PROJECT}_impl", None), dict)


def _asked_under(hook: str) -> str:
    if hook in specs.NOTIFICATIONS:
        return ""
    return next((contract for contract, hooks in specs.CONTRACT_HOOKS.items() if hook in hooks), "A, B")


def _contract(namespace: Mapping[str, object], offered: list[str]) -> "Contract | None":
    declared = declared_contract(namespace)
    if declared is not None or "is_valid_group" in offered:
        return declared
    return "B" if "transform_group" in offered else "A"


def _bad_declaration(namespace: Mapping[str, object]) -> Iterator[str]:
    value = namespace.get("CONTRACT")
    if value is not None and declared_contract({"CONTRACT": value}) is None:
        yield f"CONTRACT is {value!r}; it must be 'A' or 'B'"


def _misfits(hook: str, function: Any) -> Iterator[str]:
    if is_marked(function):
        spec = inspect.signature(getattr(specs, hook)).parameters
        unknown = [name for name in inspect.signature(function).parameters if name not in spec]
        if unknown:
            yield f"{hook} asks for {', '.join(unknown)}; a marked hook may name: {', '.join(spec)}"
    elif not _accepts(function, len(POSITIONAL[hook])):
        arguments = ", ".join(POSITIONAL[hook])
        yield f"{hook}{inspect.signature(function)} cannot be called as {hook}({arguments})"


def _accepts(function: Callable[..., Any], num_arguments: int) -> bool:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature
        return True
    try:
        signature.bind(*[None] * num_arguments)
    except TypeError:
        return False
    return True


def _misspelt(namespace: Mapping[str, object]) -> Iterator[str]:
    """Report functions named like a missing hook that accept its arguments and are not called by other functions."""
    # A function that is called in the file is a helper, even if its name is similar to a hook's.
    called = _names_used(namespace)
    missing = [name for name in specs.READ_HOOKS if name not in namespace]
    for name, value in namespace.items():
        near = difflib.get_close_matches(name, missing, n=1, cutoff=_LIKENESS)
        if near and name not in called and isinstance(value, FunctionType) and _could_be(value, near[0], namespace):
            yield f"{name} is not a hook; did you mean {near[0]}?"


def _could_be(function: FunctionType, hook: str, namespace: Mapping[str, object]) -> bool:
    is_own = function.__module__ == namespace.get("__name__", function.__module__)
    return is_own and _accepts(function, len(POSITIONAL[hook]))


def _names_used(namespace: Mapping[str, object]) -> set[str]:
    return {name for value in namespace.values() if isinstance(value, FunctionType) for name in _names(value.__code__)}


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
