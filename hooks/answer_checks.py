"""Checks of the answers of users' hooks, and the errors for invalid answers."""

import json
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import pluggy

from forebay.core.errors import HookFailed
from forebay.core.ids import InstanceId
from forebay.hooks.advantages import is_number
from forebay.hooks.types import Group, Item, Sizes, Verdict

_LONGEST_SHOWN = 200
_OUR_FOLDERS = (str(Path(__file__).parent), str(Path(pluggy.__file__).parent))


_QUOTE_NOTHING = ("it took longer than ", "its answer is longer than ", "its process died ")
"""Beginnings of messages about the host itself, which contain no user text."""


def misanswer(hook: str, answer: object, wanted: str) -> HookFailed:
    """Return the error for an invalid answer, with the answer and the expected form."""
    shown = repr(answer)
    shown = shown if len(shown) <= _LONGEST_SHOWN else shown[:_LONGEST_SHOWN] + "…"
    return failure(hook, f"it returned {shown}; wanted: {wanted}")


def failure(hook: str, message: str, traceback_text: str = "") -> HookFailed:
    """Return a ``HookFailed`` with a non-empty traceback, because the traceback is stored with the group."""
    return HookFailed(hook, message, traceback_text or f"{hook}: {message}")


def raised(hook: str, error: BaseException) -> HookFailed:
    """Return the error for an exception raised by a hook, with the traceback from the user's first frame."""
    lines = traceback.format_exception(type(error), error, _skip_ours(error.__traceback__))
    return failure(hook, traceback.format_exception_only(error)[-1].strip(), "".join(lines))


def logged(error: HookFailed) -> str:
    """Return the failure for a log, with only the exception type: messages and answers may contain a model's text."""
    what = f"hook {error.hook} failed"
    words = error.message.removeprefix(f"{what}: ")
    if words.startswith(_QUOTE_NOTHING):
        return f"{what}: {words}"
    kind = words.partition(":")[0]
    return f"{what} with {kind}" if kind.replace(".", "_").isidentifier() else what


def _skip_ours(trace: TracebackType | None) -> TracebackType | None:
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename.startswith(_OUR_FOLDERS):
        rest = rest.tb_next
    return rest or trace


def is_truth(value: object) -> bool:
    """Whether ``value`` is a bool of Python or numpy, or an integer used as one."""
    # Tests the module's name, because only users' files import numpy.
    return isinstance(value, int) or type(value).__module__ == "numpy"


def check_truth(hook: str, answer: object) -> bool:
    """Return ``answer`` as a bool. Raises ``HookFailed``."""
    if not is_truth(answer):
        raise misanswer(hook, answer, "a bool")
    return bool(answer)


def check_verdict(hook: str, answer: object, num_samples: int, sizes: Sizes) -> Verdict:
    """Return ``answer`` as a verdict: a pair of bools, or one bool, for which a full group is finished."""
    # Contract B has no "not yet": a full group that is not valid never will be.
    if is_truth(answer):
        return Verdict(bool(answer), bool(answer) or num_samples >= sizes.group_size)
    if not isinstance(answer, tuple | list) or len(answer) != 2 or not all(map(is_truth, answer)):
        raise misanswer(hook, answer, "(is_valid, is_finished), or a bool")
    verdict = Verdict(bool(answer[0]), bool(answer[1]))
    if verdict.is_valid and not verdict.is_finished:
        raise misanswer(hook, answer, "is_finished to be true for a valid group")
    return verdict


def check_group(hook: str, answer: object, instance_id: InstanceId) -> Group:
    """Return ``answer`` as a group: the pair of ``instance_id`` and a list of objects that all have this id."""
    if not isinstance(answer, tuple | list) or len(answer) != 2 or not isinstance(answer[1], tuple | list):
        raise misanswer(hook, answer, "(instance_id, items)")
    if not _is_same(answer[0], instance_id):
        raise misanswer(hook, answer[0], f"the instance_id {instance_id!r} unchanged")
    items = list(answer[1])
    for item in items:
        _check_item(hook, item, instance_id)
    return instance_id, items


def _check_item(hook: str, item: Any, instance_id: InstanceId) -> None:
    if not isinstance(item, dict):
        raise misanswer(hook, item, "items that are dicts")
    if not _is_same(item.get("instance_id"), instance_id):
        raise misanswer(hook, item.get("instance_id"), f"the instance_id {instance_id!r} in each item")
    reward = item.get("reward")
    if isinstance(reward, float) and not is_number(reward):
        raise misanswer(hook, reward, "rewards that are finite")


def check_object(hook: str, answer: object) -> dict[str, Any]:
    """Return ``answer`` as a JSON object. Raises ``HookFailed``."""
    if not isinstance(answer, dict):
        raise misanswer(hook, answer, "a dict")
    return answer


def encode(hook: str, value: object) -> bytes:
    """Encode ``value`` as JSON. Raises ``HookFailed`` for values that JSON cannot hold, such as NaN and Infinity."""
    try:
        return encode_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise failure(hook, f"it returned a value that is not plain JSON: {error}") from None


def encode_json(value: object) -> bytes:
    """Encode ``value`` as compact UTF-8 JSON. Raises ``TypeError`` or ``ValueError``."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:  # a lone surrogate must be escaped
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def as_reward(item: Item, field: str) -> float | None:
    """Return the number in ``field`` of ``item``; None if it has none."""
    value = item.get(field)
    return float(value) if isinstance(value, int | float) and is_number(value) else None


def _is_same(answered: object, instance_id: InstanceId) -> bool:
    # ``1 == True == 1.0`` in Python, but in JSON these are three different ids.
    return type(answered) is type(instance_id) and answered == instance_id
