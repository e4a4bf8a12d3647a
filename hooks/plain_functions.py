"""Conversion of a generator file's plain functions, in slime's style, to a plugin with positional arguments."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from forebay.core.ids import InstanceId
from forebay.hooks.answer_checks import is_truth, misanswer
from forebay.hooks.check import HookReport, check_hooks, is_marked
from forebay.hooks.contract import ContractChoice, declared_contract
from forebay.hooks.specs import NOTIFICATIONS, READ_HOOKS, hookimpl
from forebay.hooks.types import Contract, Group, Item

__all__ = ["Adapted", "HookReport", "adapt", "check_hooks"]

Complete = Callable[[Any], Any]


@dataclass(frozen=True)
class Adapted:
    """A generator file as a plugin, and its contract."""

    plugin: object
    choice: ContractChoice


def adapt(namespace: Mapping[str, Any], *, task_type: str, contract: Contract | None, complete: Complete) -> Adapted:
    """Make a plugin from the hooks in ``namespace``, for ``task_type`` only.

    ``contract`` is declared by the payload; without it, the file's declaration counts, then its answers. ``complete``
    waits for results of coroutine functions. Functions marked with ``hookimpl`` are bound by name, as in any plugin.
    """
    found = {name: namespace[name] for name in READ_HOOKS if callable(namespace.get(name))}
    choice = ContractChoice(
        contract or declared_contract(namespace),
        has_validity="is_valid_group" in found and not is_marked(found["is_valid_group"]),
        has_transform="transform_group" in found,
    )
    marked = {name: namespace[name] for name in NOTIFICATIONS if is_marked(namespace.get(name))}
    for name, function in found.items():
        if is_marked(function):
            marked[name] = function
        else:
            marked[name] = _bind(name, _Call(name, function, task_type, complete), choice)
    return Adapted(SimpleNamespace(**marked), choice)


@dataclass(frozen=True)
class _Call:
    """One plain function. It must answer: None means a forgotten ``return`` here, not "no opinion"."""

    hook: str
    function: Callable[..., Any]
    task_type: str
    complete: Complete

    def __call__(self, *arguments: object) -> Any:
        answer = self.complete(self.function(*arguments))
        # slime treats None as false.
        if answer is None and self.hook == "filter_item":
            return False
        if answer is None:
            raise misanswer(self.hook, None, "an answer")
        return answer


def _bind(hook: str, call: _Call, choice: ContractChoice) -> object:
    if hook == "is_valid_group":
        return _bind_validity(call, choice)
    return _BINDERS[hook](call)


def _bind_meta_info(call: _Call) -> object:
    @hookimpl
    def get_group_data_meta_info(temp_data: dict[InstanceId, list[Item]], task_type: str) -> Any:
        # For pluggy, None means "no opinion", and the next plugin is called.
        return call(temp_data) if task_type == call.task_type else None

    return get_group_data_meta_info


def _bind_validity(call: _Call, choice: ContractChoice) -> object:
    def ask(group: Group, sizes: Mapping[Contract, int], task_type: str) -> Any:
        assumed = choice.current
        answer = call(group, sizes[assumed], task_type)
        # If the first answer shows the other contract, which passes another number, the function is called again.
        choice.observe(answer)
        if choice.current == assumed or sizes["A"] == sizes["B"]:
            return answer
        return call(group, sizes[choice.current], task_type)

    @hookimpl
    def is_valid_group(group: Group, group_size: int, min_valid_group_size: int, task_type: str) -> Any:
        if task_type != call.task_type:
            return None
        answer = ask(group, {"A": min_valid_group_size, "B": group_size}, task_type)
        _check_form(answer, choice.current)
        return answer

    return is_valid_group


def _check_form(answer: object, contract: Contract) -> None:
    if contract == "A" and not isinstance(answer, tuple | list):
        raise misanswer("is_valid_group", answer, "(is_valid, is_finished), as in contract A")
    if contract == "B" and not is_truth(answer):
        raise misanswer("is_valid_group", answer, "a bool, as in contract B")


def _bind_filter(call: _Call) -> object:
    @hookimpl
    def filter_item(item: Item, task_type: str) -> Any:
        return call(item, task_type) if task_type == call.task_type else None

    return filter_item


def _bind_normalize(call: _Call) -> object:
    @hookimpl
    def normalize_group_data(group: Group, task_type: str) -> Any:
        return call(group) if task_type == call.task_type else None

    return normalize_group_data


def _bind_pad(call: _Call) -> object:
    @hookimpl
    def pad_group_data(group: Group, group_size: int, task_type: str) -> Any:
        return call(group, group_size) if task_type == call.task_type else None

    return pad_group_data


def _bind_transform(call: _Call) -> object:
    @hookimpl
    def transform_group(group: Group, task_type: str) -> Any:
        return call(group, task_type) if task_type == call.task_type else None

    return transform_group


_BINDERS: dict[str, Callable[[_Call], object]] = {
    "get_group_data_meta_info": _bind_meta_info,
    "filter_item": _bind_filter,
    "normalize_group_data": _bind_normalize,
    "pad_group_data": _bind_pad,
    "transform_group": _bind_transform,
}
