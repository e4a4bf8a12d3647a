"""The function of ``--reward FILE:NAME``, asked for the rewards of recorded rollouts."""

import asyncio
import difflib
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, cast

import msgspec

from forebay.buffer.recorded_group import Recorded
from forebay.core.binary_sample import is_binary, json_start
from forebay.core.errors import InvalidInput
from forebay.core.outcome import RolloutOutcome
from forebay.core.reward_place import set_reward
from forebay.generators.discovery.module_loading import (
    import_roots,
    is_stdlib_name,
    load_module,
    module_name,
    set_import_path,
)
from forebay.generators.rewards import Rewarder, RewardFunc, RewardOutcome
from forebay.replay.model import RunRecord, SampleRecord

TIMEOUT_S = 30.0
"""As of runs that say nothing else."""


def open_rewarder(given: str, run: RunRecord) -> Rewarder:
    """The function that ``given`` names, to be asked. Raises ``InvalidInput`` if there is none, or it cannot be."""
    timeout_s = run.payload.get("reward_timeout_s")
    return Rewarder(
        load_function(given),
        timeout_s=float(timeout_s) if timeout_s is not None else TIMEOUT_S,
        num_workers=os.cpu_count() or 1,
    )


def load_function(given: str) -> RewardFunc:
    """The function ``FILE:NAME``. Raises ``InvalidInput``."""
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
    except BaseException as error:  # a user's file may raise anything, SystemExit included
        if isinstance(error, KeyboardInterrupt):
            raise
        last = traceback.format_exception_only(error)[-1].strip()
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f", line {frames[-1].lineno}" if frames else ""
        raise InvalidInput(f"{path}{where} cannot be imported: {last}", field="reward") from error


class NewRewards:
    """Gives recorded samples the rewards that a function says now, and counts what it says."""

    def __init__(self, rewarder: Rewarder) -> None:
        self._rewarder = rewarder
        self.num_asked = 0
        self.num_not_asked = 0
        """Rollouts that had failed before there was anything to judge."""
        self.failures: Counter[str] = Counter()
        """By kind of error, how often there was no reward: such a sample has failed, and has none of 0."""
        self.examples: dict[str, str] = {}
        """The first message of each kind."""

    async def change(self, recorded: Sequence[Recorded]) -> list[Recorded]:
        """The samples of a group with other rewards; forks have that of their rollout's main sample."""
        mains = [each for each in recorded if not each[0].fork]
        outcomes = await asyncio.gather(*(self._ask(*each) for each in mains))
        by_rollout = {_rollout(record): outcome for (record, _), outcome in zip(mains, outcomes, strict=True)}
        return [_judged(*each, by_rollout.get(_rollout(each[0]))) for each in recorded]

    async def _ask(self, record: SampleRecord, body: bytes) -> RewardOutcome | None:
        if record.reward is None and record.rollout_outcome != RolloutOutcome.JUDGE_FAILURE:
            self.num_not_asked += 1
            return None
        self.num_asked += 1
        outcome = await self._rewarder.reward(_item(record, body))
        if outcome.kind:
            self.failures[outcome.kind] += 1
            self.examples.setdefault(outcome.kind, outcome.message[:200])
        return outcome

    def facts(self) -> str:
        """What came of it, in words."""
        text = f"{self.num_asked:,} rollouts were asked about"
        if self.num_not_asked:
            text += f", {self.num_not_asked:,} had failed before"
        if not self.failures:
            return text
        kinds = "; ".join(f"{number:,} {kind}: {self.examples[kind]}" for kind, number in self.failures.most_common())
        return f"{text}; {self.failures.total():,} have none now, and count as failed: {kinds}"


def _rollout(record: SampleRecord) -> tuple[int, str]:
    return (record.slot, record.rollout_id) if record.rollout_id else (-1, record.uid)


def _item(record: SampleRecord, body: bytes) -> dict[str, Any]:
    """What a reward function is given, as far as the sample has it: of the task's row, what is in ``extra_info``."""
    fields = _fields(body)
    info, given = (fields.get(name) for name in ("extra_info", "for_reward"))
    info = info if isinstance(info, dict) else {}
    return {
        **info,
        "extra_info": info,
        **(given if isinstance(given, dict) else {}),
        "uid": record.uid,
        "instance_id": record.instance_id,
        "messages": fields.get("messages", []),
        "finish_reason": str(info.get("finish_reason", "")),
    }


def _fields(body: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.json.decode(body[json_start(body) if is_binary(body) else 0 :])
    return fields


def _judged(record: SampleRecord, body: bytes, outcome: RewardOutcome | None) -> Recorded:
    if outcome is None:
        return record, body
    if outcome.reward is None:
        # Hooks do not see it: nobody reads in its body that it once had a reward.
        failed = {"error": outcome.message, "rollout_outcome": RolloutOutcome.JUDGE_FAILURE.value}
        return msgspec.structs.replace(record, reward=None, reward_start=0, reward_end=0, **failed), body
    if record.reward is None:
        start = json_start(body) if is_binary(body) else 0
        kept = {name: value for name, value in _fields(body).items() if name != "error"}
        ended: dict[str, Any] = {"reward": outcome.reward, "status": "completed", "outcome": RolloutOutcome.OK.value}
        body = body[:start] + msgspec.json.encode({**kept, **ended})
    else:
        span = (record.reward_start, record.reward_end) if record.reward_end else None
        body = b"".join(set_reward(body, span, outcome.reward, None))
    # The number may be longer or shorter now, and few ask where it is.
    changes = {"reward": outcome.reward, "reward_start": 0, "reward_end": 0}
    return msgspec.structs.replace(record, **changes, rollout_outcome=RolloutOutcome.OK.value), body


@contextmanager
def prints_to_stderr() -> Iterator[None]:
    """What users' code prints does not get between what the command writes: here, and in the processes it starts."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(own, 1)
        os.close(own)
