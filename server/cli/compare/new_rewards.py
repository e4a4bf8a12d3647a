"""Calls the function of ``--reward FILE:NAME`` for the rewards of recorded rollouts."""

import asyncio
import difflib
import os
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, cast

from forebay.core.errors import InvalidInput
from forebay.core.records.recording_rows import RecordedRun
from forebay.core.records.rows import SampleRow
from forebay.generators.discovery.module_loading import (
    import_roots,
    is_stdlib_name,
    load_module,
    module_name,
    set_import_path,
)
from forebay.generators.rewards import Rewarder, RewardFunc
from forebay.generators.rollouts.rejudging import check_judge, judged_again
from forebay.generators.rollouts.replayed_samples import ReplayedSample
from forebay.replay.source import Recorded

TIMEOUT_S = 30.0
"""Time limit of a call, the default of runs."""


def open_rewarder(given: str, run: RecordedRun) -> Rewarder:
    """Open the function that ``given`` names. Raises ``InvalidInput`` if it does not exist or cannot be loaded."""
    timeout_s = run.payload.get("reward_timeout_s")
    function = load_function(given)
    check_judge(function)
    return Rewarder(
        function,
        timeout_s=float(timeout_s) if timeout_s is not None else TIMEOUT_S,
        num_workers=os.cpu_count() or 1,
    )


def load_function(given: str) -> RewardFunc:
    """Load the function ``FILE:NAME``. Raises ``InvalidInput``."""
    file, _, name = given.rpartition(":")
    path = Path(file)
    hint = "as in --reward my_tasks/judge.py:reward_func"
    if not file or not name:
        raise InvalidInput(f"--reward {given!r:.200} is not FILE:NAME", hint=hint, field="reward")
    if not path.is_file():
        raise InvalidInput(f"--reward: there is no file {file}", hint=hint, field="reward")
    if is_stdlib_name(module_name(path)):
        message = f"the name {path.name} hides Python's own module {path.stem!r}"
        raise InvalidInput(message, hint="rename the file", field="reward")
    found = _imported(path.resolve())
    function = found.get(name)
    if not callable(function):
        names = [each for each, value in found.items() if callable(value) and not each.startswith("_")]
        nearest = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"it has {', '.join(names[:20]) or 'no function'}"
        raise InvalidInput(f"{file} has no function {name!r:.100}", hint=hint, field="reward")
    return cast(RewardFunc, function)


def _imported(path: Path) -> dict[str, Any]:
    set_import_path(path.parent, *import_roots(path.parent))
    try:
        return vars(load_module(path))
    except BaseException as error:  # a user's file may raise anything, including SystemExit
        if isinstance(error, KeyboardInterrupt):
            raise
        last = traceback.format_exception_only(error)[-1].strip()
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f", line {frames[-1].lineno}" if frames else ""
        raise InvalidInput(f"{path}{where} cannot be imported: {last}", field="reward") from error


class NewRewards:
    """Gives recorded samples the rewards that a function computes, and counts its results."""

    def __init__(self, rewarder: Rewarder) -> None:
        self._rewarder = rewarder
        self.num_asked = 0
        self.num_not_asked = 0
        """Rollouts that had failed before there was an answer to judge."""
        self.failures: Counter[str] = Counter()
        """Missing rewards by kind of error. Such a sample counts as failed, not as a reward of 0."""
        self.examples: dict[str, str] = {}
        """The first message of each kind of error."""

    async def change(self, recorded: Sequence[Recorded]) -> list[Recorded]:
        """The samples of a group with new rewards; forks get the reward of their rollout's main sample."""
        samples = [ReplayedSample(*each) for each in recorded]
        forks = defaultdict[tuple[int, str], list[ReplayedSample]](list)
        for sample in samples:
            if sample.record.fork:
                forks[_rollout(sample.record)].append(sample)
        mains = [sample for sample in samples if not sample.record.fork]
        rollouts = [(*forks.pop(_rollout(main.record), ()), main) for main in mains]
        judged = await asyncio.gather(*map(self._judged, rollouts))
        changed = {each.record.uid: each for rollout in (*judged, *forks.values()) for each in rollout}
        kept = (changed.get(sample.record.uid) for sample in samples)
        return [(each.record, each.body) for each in kept if each is not None]

    async def _judged(self, rollout: Sequence[ReplayedSample]) -> Sequence[ReplayedSample]:
        judged = await judged_again(rollout, None, self._rewarder.reward)
        if judged.outcome is None:
            self.num_not_asked += 1
            return judged.samples
        self.num_asked += 1
        if judged.outcome.kind:
            self.failures[judged.outcome.kind] += 1
            self.examples.setdefault(judged.outcome.kind, judged.outcome.message[:200])
        return judged.samples

    def facts(self) -> str:
        """A description of the results."""
        text = f"{self.num_asked:,} rollouts were judged again"
        if self.num_not_asked:
            text += f", {self.num_not_asked:,} had failed before"
        if not self.failures:
            return text
        kinds = "; ".join(f"{number:,} {kind}: {self.examples[kind]}" for kind, number in self.failures.most_common())
        return f"{text}; {self.failures.total():,} have none now, and count as failed: {kinds}"


def _rollout(record: SampleRow) -> tuple[int, str]:
    return (record.slot, record.rollout_id) if record.rollout_id else (-1, record.uid)


@contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Send the output of users' code to stderr, in this process and its children, apart from the command's output."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(own, 1)
        os.close(own)
