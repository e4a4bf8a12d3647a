"""The temporary process that imports one generator file and describes it.

Its parent sends the path, and it replies with a JSON object (see ``forebay.core.processes.child_link``).
"""

import inspect
import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from forebay.core.child_process import skip_httpx_command
from forebay.core.processes.parent_link import ParentLink
from forebay.generators.discovery.module_loading import (
    import_roots,
    is_stdlib_name,
    load_module,
    module_name,
    set_import_path,
    user_frames,
)

_BASE_MODULE = "forebay.generators.base"


def main(arguments: list[str]) -> None:
    """Inspect the file, reply, and exit at once: threads started by the file must not keep the process alive."""
    parent = ParentLink[bytes](arguments, bytes)
    skip_httpx_command()
    # As JSON, because a file may contain lone surrogates, which are not valid UTF-8.
    parent.send(json.dumps(inspect_module(Path(os.fsdecode(parent.receive())))))
    # A normal exit would wait for threads started by the file.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def inspect_module(path: Path) -> dict[str, Any]:
    """Import ``path`` into this process and describe it, with the keys of ``GeneratorInfo`` that are known."""
    if is_stdlib_name(module_name(path)):
        return _failed(f"the name {path.name} hides Python's own module {path.stem!r}", "rename the file")
    set_import_path(path.parent, *import_roots(path.parent))
    try:
        module = load_module(path)
    except BaseException as error:  # noqa: BLE001 -- a user's file may raise anything, SystemExit included
        return _import_failed(path, error)
    return _describe(module)


def _describe(module: ModuleType) -> dict[str, Any]:
    from forebay.hooks.check import check_hooks

    namespace = vars(module)
    report = check_hooks(namespace)
    task_type = namespace.get("TASK_TYPE")
    problems = [*_task_type_problems(namespace), *_run_rollout_problems(namespace), *report.problems]
    return {
        "task_type": task_type if isinstance(task_type, str) and task_type else None,
        "imports_base": refers_to_base(namespace),
        "has_own_loop": has_own_loop(namespace),
        "contract": report.contract,
        "hooks": dict(report.hooks),
        "problems": problems,
    }


def refers_to_base(namespace: Mapping[str, object]) -> bool:
    """Whether the module's names include our base module, ``BaseGenerator``, or a subclass of it."""
    # Not imported here: if the file does not use it, it is not in `sys.modules`.
    base = sys.modules.get(_BASE_MODULE)
    if base is None:
        return False
    kind = getattr(base, "BaseGenerator", None)
    return any(value is base or kind in getattr(value, "__mro__", ()) for value in namespace.values())


def has_own_loop(namespace: Mapping[str, object]) -> bool:
    """Whether a class in the module derives from ``BaseGenerator`` but has its own loop over the rows.

    Such classes, often written for slime, have an ``entry`` or ``run`` that never calls the base's.
    """
    base = getattr(sys.modules.get(_BASE_MODULE), "BaseGenerator", None)
    derived = (value for value in namespace.values() if base in getattr(value, "__mro__", ()) and value is not base)
    return base is not None and any(not _comes_to_base(kind, base, "entry", frozenset()) for kind in derived)


def _comes_to_base(kind: Any, base: Any, name: str, seen: frozenset[str]) -> bool:
    function = getattr(kind, name)
    if function is getattr(base, name):
        # The base's ``entry`` calls an overridden ``run``.
        return name != "entry" or kind.run is base.run or _comes_to_base(kind, base, "run", seen | {name})
    code = getattr(inspect.unwrap(function), "__code__", None)
    called = _names(code) if code else {"super"}  # assume the best of anything but a plain function
    if called & {"super", base.__name__}:
        return True
    others = {"entry", "run", "run_async"} & called - seen - {name}
    return any(_comes_to_base(kind, base, other, seen | {name}) for other in others)


def _names(code: CodeType) -> set[str]:
    """Return the names used in a function and its inner functions; some Pythons compile comprehensions to these."""
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _task_type_problems(namespace: Mapping[str, object]) -> list[str]:
    if "TASK_TYPE" not in namespace:
        remedy = 'add TASK_TYPE = "my_task" at the top level, or, if this is shared code, rename the file'
        return [f"TASK_TYPE is missing; {remedy} so that it does not end in _generator.py"]
    value = namespace["TASK_TYPE"]
    if not isinstance(value, str) or not value:
        return [f"TASK_TYPE is {value!r}; make it a non-empty string"]
    return []


def _run_rollout_problems(namespace: Mapping[str, object]) -> list[str]:
    if "run_rollout" not in namespace:
        return ["run_rollout is missing; define run_rollout(data), which is called once with the start's payload"]
    function = namespace["run_rollout"]
    if not callable(function):
        return [f"run_rollout is a {type(function).__name__}; make it a function run_rollout(data)"]
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature
        return []
    try:
        signature.bind({})
    except TypeError:
        return [f"run_rollout{signature} cannot be called with one argument; make it run_rollout(data)"]
    return []


def _import_failed(path: Path, error: BaseException) -> dict[str, Any]:
    lines = [line for line in "".join(traceback.format_exception_only(error)).splitlines() if line.strip()]
    answer = _failed(lines[-1].strip(), _remedy(path, error))
    answer["traceback"] = "".join(
        traceback.format_exception(type(error), error, user_frames(error.__traceback__, __file__))
    )
    return answer


def _failed(message: str, remedy: str) -> dict[str, Any]:
    return {"problems": [f"{message}; {remedy}"]}


def _remedy(path: Path, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in ("slime", "slime_plugins"):
        # Files that import slime's own base generator also import slime through it.
        return (
            "take slime's base class from here (from forebay.generators.base import BaseGenerator, query_single_turn), "
            "leave slime's own base_generator.py out, or install slime where the server runs"
        )
    if isinstance(error, ImportError) and "relative import" in str(error):
        return "import absolutely: the file is loaded by itself, not as a part of a package"
    if isinstance(error, ModuleNotFoundError):
        return f"install it for {sys.executable}, or put the module next to {path.name}"
    if isinstance(error, SyntaxError):
        return f"fix line {error.lineno} of {error.filename or path.name}"
    return f"fix line {_line_in(path, error)} of {path.name}"


def _line_in(path: Path, error: BaseException) -> int:
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno or 1 for frame in reversed(frames) if frame.filename == str(path)), 1)


if __name__ == "__main__":
    main(sys.argv[1:])
