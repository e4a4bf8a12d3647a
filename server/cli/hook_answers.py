"""Who answers each hook of a generator: its file, an installed plugin, or what is built in."""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from forebay.core.errors import HookFailed
from forebay.generators.info import GeneratorInfo
from forebay.hooks import wire
from forebay.hooks.host_client import HostClient
from forebay.hooks.loading import installed_plugins
from forebay.hooks.runner import HookRunner

START_LIMIT_S = 120.0

Answers = dict[str, list[str]]
"""Hook → who implements it, the one asked first in front."""


async def hook_answers(infos: Sequence[GeneratorInfo]) -> dict[Path, Answers]:
    """The same for each usable generator. Asks the hook host where plugins are installed: only it may import them."""
    usable = [info for info in infos if info.status == "ok"]
    if not installed_plugins():
        return {info.path: _told_by_file(info) for info in usable}
    answers = await asyncio.gather(*(_told_by_host(info) for info in usable))
    return {info.path: each for info, each in zip(usable, answers, strict=True)}


def _told_by_file(info: GeneratorInfo) -> Answers:
    runner = HookRunner(
        task_type=info.task_type or "", contract=info.contract, module_path=info.path, user_hooks=info.hooks
    )
    return runner.implementations()


async def _told_by_host(info: GeneratorInfo) -> Answers:
    module = str(info.path) if info.hooks else ""
    setup = wire.Setup(info.task_type or "", info.contract, "grpo", module, [], loads_plugins=True)
    with tempfile.TemporaryDirectory() as folder:
        host = HostClient(
            setup, time_limit_s=START_LIMIT_S, start_limit_s=START_LIMIT_S, log_path=Path(folder) / "hooks.log"
        )
        try:
            return (await host.ready()).implementations
        except HookFailed as error:
            return {hook: [*by, f"but loading them fails: {error.message}"] for hook, by in _told_by_file(info).items()}
        finally:
            await host.close()
