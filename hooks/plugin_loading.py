"""Loading of users' code in a hook host: the generator file under its own name, and the installed plugins."""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from forebay.core.group import Normaliser, RewardRange
from forebay.hooks import answer_checks
from forebay.hooks.contract import ContractChoice
from forebay.hooks.defaults import Defaults
from forebay.hooks.manager import BUILT_IN, HookManager
from forebay.hooks.plain_functions import adapt
from forebay.hooks.specs import PROJECT
from forebay.hooks.types import Contract


def installed_plugins() -> list[EntryPoint]:
    """Return the entry points of the group ``forebay``, one per name, from metadata alone."""
    # Keyed by modification times, because installing a package changes its folder.
    return _read_plugins(tuple((path, os.stat(path).st_mtime_ns) for path in sys.path if os.path.isdir(path)))


@lru_cache(maxsize=1)
def _read_plugins(_: tuple[tuple[str, int], ...]) -> list[EntryPoint]:
    # Cached: reading the metadata of every installed package takes milliseconds, and each run needs it.
    return list({point.name: point for point in entry_points(group=PROJECT)}.values())


def load_hooks(
    manager: HookManager,
    *,
    task_type: str,
    contract: Contract | None,
    normaliser: Normaliser,
    reward_range: RewardRange | None,
    module_path: Path | None,
    python_path: Sequence[str],
    loads_plugins: bool,
    complete: Callable[[Any], Any],
) -> ContractChoice:
    """Fill ``manager`` and return the contract. Raises ``HookFailed`` with the name of what could not be loaded.

    Plugins are called before the generator file, and the built-in behaviour after both.
    """
    sys.path += python_path
    choice = ContractChoice(contract)
    if module_path is not None:
        with _blamed(f"file {module_path.name}"):
            namespace = vars(_import_file(module_path))
            adapted = adapt(namespace, task_type=task_type, contract=contract, complete=complete)
            choice = adapted.choice
            manager.register(adapted.plugin, f"file {module_path.name}")
    # Registered later, so that plugins are called before the generator file.
    for point in installed_plugins() if loads_plugins else []:
        with _blamed(f"plugin {point.name}"):
            manager.register(point.load(), f"plugin {point.name}")
    manager.register(Defaults(choice, normaliser, reward_range), BUILT_IN)
    return choice


def _import_file(path: Path) -> Any:
    """Import ``path`` under its stem, so that its classes can be pickled; a stem in use gets a prefix."""
    # The file may import modules from its folder.
    sys.path.insert(0, str(path.parent))
    name = path.stem if path.stem not in sys.modules else f"generator_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Before it is executed, because dataclasses and pickle look up their module there.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def _blamed(culprit: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # noqa: BLE001  importing a user's file may raise anything, SystemExit included
        raise answer_checks.raised(culprit, error) from None
