"""Loading users' code: the generator file under its own name, and the installed plugins. Only a hook host does this."""

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
    """The entry points of the group ``forebay``, from metadata alone, one per name."""
    # Installing a package changes its folder.
    return _read_plugins(tuple((path, os.stat(path).st_mtime_ns) for path in sys.path if os.path.isdir(path)))


@lru_cache(maxsize=1)
def _read_plugins(_: tuple[tuple[str, int], ...]) -> list[EntryPoint]:
    # Reading the metadata of every installed package takes milliseconds, and each run asks.
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
    """Fill ``manager`` and return the contract. Raises ``HookFailed`` that names what could not be loaded.

    Registered last means asked first: plugins before the generator file, the built-in behaviour after both.
    """
    sys.path += python_path
    choice = ContractChoice(contract)
    if module_path is not None:
        with _blamed(f"file {module_path.name}"):
            namespace = vars(_import_file(module_path))
            adapted = adapt(namespace, task_type=task_type, contract=contract, complete=complete)
            choice = adapted.choice
            manager.register(adapted.plugin, f"file {module_path.name}")
    # What is registered last is asked first: plugins go before the generator file.
    for point in installed_plugins() if loads_plugins else []:
        with _blamed(f"plugin {point.name}"):
            manager.register(point.load(), f"plugin {point.name}")
    manager.register(Defaults(choice, normaliser, reward_range), BUILT_IN)
    return choice


def _import_file(path: Path) -> Any:
    """Import ``path`` under its stem, so that classes in it pickle; a stem that is taken gets a prefix."""
    # The file may import modules that lie beside it.
    sys.path.insert(0, str(path.parent))
    name = path.stem if path.stem not in sys.modules else f"generator_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Before it is executed: dataclasses look their module up there, and so does pickle.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def _blamed(culprit: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # noqa: BLE001  importing a user's file may raise anything, SystemExit included
        raise answer_checks.raised(culprit, error) from None
