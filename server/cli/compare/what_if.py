"""Prepares a comparison: what changes, which hooks judge, and the two rehearsals of a recording.

The hooks, as recorded and as changed, are the built-in ones or those of a generator file.
"""

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from forebay.buffer.rehearsal import Rehearsal, RehearsalHooks
from forebay.buffer.rehearsed_groups import Treatment, rehearse
from forebay.core.errors import InvalidInput
from forebay.core.records.recording_rows import RecordedRun
from forebay.core.records.rows import GroupRow
from forebay.core.run import RunSettings
from forebay.generators.discovery.catalog import inspect_alone
from forebay.generators.discovery.info import GeneratorInfo
from forebay.generators.discovery.module_loading import import_roots
from forebay.hooks.types import Contract
from forebay.replay.comparison import Comparison
from forebay.replay.options import parse_steps
from forebay.replay.source import Source
from forebay.replay.step_filter import chosen_groups
from forebay.server.cli.compare.new_rewards import NewRewards, open_rewarder
from forebay.server.cli.options import own_command
from forebay.server.cli.output import make_console
from forebay.server.cli.start_command import parse_assignment

INSPECT_TIMEOUT_S = 120.0
GROUP_SIZE, ITS_ALIAS = "group_size", "num_repeat_per_sample"
COMPARED = (
    GROUP_SIZE,
    "min_valid_group_size_ratio",
    "min_valid_item_size_ratio",
    "group_timeout_seconds",
    "group_deadline_seconds",
    "min_timeout_group_size_ratio",
    "normaliser",
    "reward_range",
    "contract",
    "hook_time_limit_s",
)
"""Settings that a comparison can change. The others decide what is generated and delivered, and when."""


def read_changes(assignments: Sequence[str]) -> dict[str, Any]:
    """Parse the fields to set. Raises ``InvalidInput`` for an unknown field, or one without effect here."""
    changes: dict[str, Any] = {}
    for name, value in map(parse_assignment, assignments):
        field = GROUP_SIZE if name == ITS_ALIAS else name
        if field not in COMPARED:
            raise _wrong_name(name)
        changes[field] = value
    return changes


def _wrong_name(name: str) -> InvalidInput:
    hint = f"the fields are {', '.join(COMPARED)}"
    if name.partition(".")[0] in RunSettings.model_fields:
        message = f"--set {name} has no effect on how a recording is judged"
        return InvalidInput(message, hint=f"{hint}; `forebay simulate` tries schedulers", field=name)
    nearest = difflib.get_close_matches(name, COMPARED, 1)
    meant = f"; did you mean {nearest[0]}?" if nearest else ""
    return InvalidInput(f"--set {name:.100}: a run has no such setting{meant}", hint=hint, field=name)


def settings_of(run: RecordedRun, changes: Mapping[str, Any] | None = None) -> RunSettings:
    """The recorded settings of a run, updated with ``changes``. Raises ``InvalidInput``."""
    payload = dict(run.payload)
    for name, value in (changes or {}).items():
        payload.pop(ITS_ALIAS if name == GROUP_SIZE else name, None)
        payload[name] = value
    return RunSettings.parse(payload, "slime" if run.origin == "slime" else "native")


@dataclass(frozen=True)
class JudgingCode:
    """A generator file, or the built-in hooks: its hooks, and which of slime's contracts it declares."""

    path: Path | None
    hooks: Collection[str] = ()
    contract: Contract | None = None

    def __str__(self) -> str:
        return f"{', '.join(self.hooks)} of {self.path}" if self.path is not None and self.hooks else "built-in"

    def make_hooks(self, run: RecordedRun, settings: RunSettings) -> RehearsalHooks:
        """The hooks, called as the server would call them for this run."""
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
    """The hooks used with everything as recorded, and those used with the changes."""

    recorded: JudgingCode
    changed: JudgingCode
    has_recorded: bool
    """Whether ``recorded`` are the run's own hooks; otherwise the built-in ones replace them."""

    @property
    def differ(self) -> bool:
        """Whether the changed hooks differ from the recorded ones."""
        return self.recorded != self.changed


async def find_codes(run: RecordedRun, file: Path | None, inspect_timeout_s: float) -> JudgingCodes:
    """Find the hooks to use; ``file`` is the argument of ``--code``. Raises ``InvalidInput`` if it cannot be used."""
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
        what = "is a folder" if file.is_dir() else "does not exist"
        raise InvalidInput(f"--code {file} {what}", hint="give the path of a generator file", field="code")
    info = await inspect_alone(file, working_dir=Path.cwd(), inspect_timeout_s=inspect_timeout_s)
    if info.status != "ok":
        hint = f"`{own_command()} generators check {file}` shows the whole error"
        raise InvalidInput(f"{file} cannot be used: {info.error}", hint=hint, field="code")
    return info


@dataclass(frozen=True)
class WhatChanges:
    """The changes to compare with the recording."""

    code: Path | None = None
    """A generator file whose hooks are used."""
    reward: str | None = None
    """A reward function, as ``FILE:NAME``."""
    settings: dict[str, Any] = field(default_factory=dict)

    def facts(self, codes: JudgingCodes) -> dict[str, str]:
        """Descriptions of the changes, by label."""
        changes = [f"{name}={value!r}" for name, value in self.settings.items()]
        facts = {"hooks": f"as recorded {codes.recorded}"}
        if codes.differ:
            facts["hooks"] += f"; as changed {codes.changed}"
        return facts | ({"settings": f"as changed {', '.join(changes)}"} if changes else {})


async def compare(source: Source, changes: WhatChanges, steps: str | None) -> tuple[dict[str, str], Comparison]:
    """Compare a recording as is and with ``changes``; ``steps`` selects groups. Returns facts and results.

    Raises ``InvalidInput`` for settings, code or steps that cannot be used.
    """
    run = source.run
    settings, changed = settings_of(run), settings_of(run, changes.settings)
    codes = await find_codes(run, changes.code, INSPECT_TIMEOUT_S)
    is_changed = bool(codes.differ or changes.reward or changes.settings)
    comparison = Comparison(run, has_code=codes.has_recorded, has_other_hooks=codes.differ, is_changed=is_changed)
    groups = await _chosen(source, steps)
    async with AsyncExitStack() as stack:
        rewards = await _open_rewards(stack, changes.reward, run)
        is_slime = await _is_read_by_slime(source)
        before = Rehearsal(run, settings, codes.recorded.make_hooks(run, settings), is_slime=is_slime)
        treatments = [Treatment(await stack.enter_async_context(before))]
        if is_changed:
            after = Rehearsal(run, changed, codes.changed.make_hooks(run, changed), is_slime=is_slime)
            treatments.append(
                Treatment(await stack.enter_async_context(after), None if rewards is None else rewards.change)
            )
        with _progress(len(groups)) as note:
            async for each in rehearse(source, groups, settings, treatments):
                note()
                if each.damage:
                    comparison.add_damaged(each.group, each.damage)
                else:
                    comparison.add(each.group, *each.outcomes)
    name = f"{run.name}, {run.run_id}" if run.name else run.run_id
    which = {
        "recording": f"{name} ({run.task_type}), {comparison.num_groups:,} groups, {comparison.num_samples:,} samples"
    }
    asked = {} if rewards is None else {"rewards": f"as changed by {changes.reward}: {rewards.facts()}"}
    return which | changes.facts(codes) | asked, comparison


async def _open_rewards(stack: AsyncExitStack, given: str | None, run: RecordedRun) -> NewRewards | None:
    return None if given is None else NewRewards(await stack.enter_async_context(open_rewarder(given, run)))


async def _chosen(source: Source, steps: str | None) -> Sequence[GroupRow]:
    groups = await source.groups()
    return groups if steps is None else chosen_groups(groups, await source.batches(), parse_steps(steps))


async def _is_read_by_slime(source: Source) -> bool:
    batches = await source.batches()
    return any(batch.is_self_acking for batch in batches) if batches else source.run.origin == "slime"


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    done = 0
    with console.status("") as status:

        def note() -> None:
            nonlocal done
            done += 1
            if done % 16 == 0:
                status.update(f"{done:,} of {total:,} groups")

        yield note
