"""Whose hooks judge: those that are built in, or those of a generator file. Both times, as recorded and as changed."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from forebay.buffer.rehearsal import RehearsalHooks
from forebay.core.errors import InvalidInput
from forebay.core.records.recording_rows import RecordedRun
from forebay.core.run import RunSettings
from forebay.generators.discovery.catalog import inspect_alone
from forebay.generators.discovery.info import GeneratorInfo
from forebay.generators.discovery.module_loading import import_roots
from forebay.hooks.types import Contract
from forebay.server.cli.options import own_command


@dataclass(frozen=True)
class JudgingCode:
    """A generator file, or none: its hooks, and which of slime's contracts it declares."""

    path: Path | None
    hooks: Collection[str] = ()
    contract: Contract | None = None

    def __str__(self) -> str:
        return f"{', '.join(self.hooks)} of {self.path}" if self.path is not None and self.hooks else "built-in"

    def make_hooks(self, run: RecordedRun, settings: RunSettings) -> RehearsalHooks:
        """Its hooks, as the server would ask them for this run."""
        return RehearsalHooks(
            task_type=run.task_type,
            contract=settings.contract or self.contract,
            normaliser=settings.normaliser,
            reward_range=settings.reward_range,
            module_path=self.path,
            python_path=import_roots(self.path.parent) if self.path is not None else (),
            user_hooks=self.hooks,
            time_limit_s=settings.hook_time_limit_s,
        )


@dataclass(frozen=True)
class JudgingCodes:
    """Who is asked with everything as recorded, and who with what is changed."""

    recorded: JudgingCode
    changed: JudgingCode
    has_recorded: bool
    """Whether ``recorded`` are the hooks that the run had; else they are the built-in ones in their place."""

    @property
    def differ(self) -> bool:
        """Whether others are asked."""
        return self.recorded != self.changed


async def find_codes(run: RecordedRun, file: Path | None, inspect_timeout_s: float) -> JudgingCodes:
    """Who judges, where ``file`` is what ``--code`` names. Raises ``InvalidInput`` if it cannot be used."""
    built_in = JudgingCode(None, contract=cast("Contract | None", run.generator_contract))
    given = None if file is None else await _inspected(file, inspect_timeout_s)
    if given is None:
        return JudgingCodes(built_in, built_in, has_recorded=not run.generator_hooks)
    code = JudgingCode(given.path, tuple(given.hooks), given.contract)
    if not run.generator_hooks:
        return JudgingCodes(built_in, code, has_recorded=True)
    is_recorded = given.sha256 == run.generator_sha256
    return JudgingCodes(code if is_recorded else built_in, code, has_recorded=is_recorded)


async def _inspected(file: Path, inspect_timeout_s: float) -> GeneratorInfo:
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "is not there"
        raise InvalidInput(f"--code {file} {what}", hint="it names a generator file", field="code")
    info = await inspect_alone(file, working_dir=Path.cwd(), inspect_timeout_s=inspect_timeout_s)
    if info.status != "ok":
        hint = f"`{own_command()} generators check {file}` shows the whole error"
        raise InvalidInput(f"{file} cannot be used: {info.error}", hint=hint, field="code")
    return info
