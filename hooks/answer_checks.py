"""Checks of what users' hooks answer, and the errors for those that are wrong."""

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
"""Beginnings of what is said of a host itself."""


def misanswer(hook: str, answer: object, wanted: str) -> HookFailed:
    """The error for an answer of the wrong shape: it shows the answer and says what was wanted."""
    shown = repr(answer)
    shown = shown if len(shown) <= _LONGEST_SHOWN else shown[:_LONGEST_SHOWN] + "…"
    return failure(hook, f"it returned {shown}; wanted: {wanted}")


def failure(hook: str, message: str, traceback_text: str = "") -> HookFailed:
    """A ``HookFailed`` whose traceback is never empty, since it is what is kept with the group."""
    return HookFailed(hook, message, traceback_text or f"{hook}: {message}")


def raised(hook: str, error: BaseException) -> HookFailed:
    """The error for an exception out of a hook, with the traceback from the user's first frame on."""
    lines = traceback.format_exception(type(error), error, _skip_ours(error.__traceback__))
    return failure(hook, traceback.format_exception_only(error)[-1].strip(), "".join(lines))


def logged(error: HookFailed) -> str:
    """The failure for a log, with the kind of exception alone: its words, or an answer, may be a model's text."""
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
    """Whether ``value`` is a bool, Python's or numpy's, or an integer that stands for one."""
    # By the module's name: nothing here imports numpy, only users' files do.
    return isinstance(value, int) or type(value).__module__ == "numpy"


def check_truth(hook: str, answer: object) -> bool:
    """``answer`` as a bool."""
    if not is_truth(answer):
        raise misanswer(hook, answer, "a bool")
    return bool(answer)


def check_verdict(hook: str, answer: object, num_samples: int, sizes: Sizes) -> Verdict:
    """``answer`` as a verdict: a pair of bools, or one bool, by which a group is finished once it is full."""
    # Contract B knows no "not yet": once every sample is there, a group that is not valid never will be.
    if is_truth(answer):
        return Verdict(bool(answer), bool(answer) or num_samples >= sizes.group_size)
    if not isinstance(answer, tuple | list) or len(answer) != 2 or not all(map(is_truth, answer)):
        raise misanswer(hook, answer, "(is_valid, is_finished), or a bool")
    verdict = Verdict(bool(answer[0]), bool(answer[1]))
    if verdict.is_valid and not verdict.is_finished:
        raise misanswer(hook, answer, "a valid group to be finished as well")
    return verdict


def check_group(hook: str, answer: object, instance_id: InstanceId) -> Group:
    """``answer`` as the group of ``instance_id``: the pair of its id and a list of objects that all carry this id."""
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
    """``answer`` as a JSON object."""
    if not isinstance(answer, dict):
        raise misanswer(hook, answer, "a dict")
    return answer


def encode(hook: str, value: object) -> bytes:
    """``value`` as JSON. Raises ``HookFailed`` for what JSON cannot say, NaN and Infinity among it."""
    try:
        return encode_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise failure(hook, f"it returned what is not plain JSON: {error}") from None


def encode_json(value: object) -> bytes:
    """``value`` as compact UTF-8 JSON. Raises ``TypeError`` or ``ValueError``."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can carry
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def as_reward(item: Item, field: str) -> float | None:
    """The number in ``field`` of ``item``, None where there is none."""
    value = item.get(field)
    return float(value) if isinstance(value, int | float) and is_number(value) else None


def _is_same(answered: object, instance_id: InstanceId) -> bool:
    # ``1 == True == 1.0`` for Python; on the wire these are three ids.
    return type(answered) is type(instance_id) and answered == instance_id
