"""Verifiers: commands that compute the reward from an agent's result."""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from forebay.core.outcome import is_part_name
from forebay.generators.failures import JudgeFailed
from forebay.generators.rewards import TOTAL, Reward
from forebay.generators.sandbox import Command, Limits, Sandbox, shown
from forebay.telemetry.tracing.spans import current_span

VERIFIER_LIMITS = Limits(wall_s=60)
WRONG_STATUS = 1


@dataclass(frozen=True)
class Verifier:
    """A command that computes the reward. It runs in the agent's folder and reads the item as JSON from standard input.

    With ``last_line``, it must exit with status 0 and print as its last line a number, or an object with the total as
    ``reward``; its other numbers, if their names are those of parts, are parts of the reward.
    With ``exit_status``, status 0 means a reward of 1 and status 1 a reward of 0, as for test runners. Note that a
    Python program that crashes also exits with 1. Anything else is a judge failure, never a reward.
    """

    command: Command
    reads: Literal["last_line", "exit_status"] = "last_line"
    limits: Limits = VERIFIER_LIMITS

    async def reward(self, sandbox: Sandbox, item: dict[str, Any]) -> Reward:
        """Run the command. Raises ``JudgeFailed``."""
        stdin = msgspec.json.encode(item)
        finished = await sandbox.run(self.command, stdin=stdin, limits=self.limits, phase="reward")
        if (reward := current_span.get()) is not None:
            reward.set(cpu_s=finished.cpu_s)
        if self.reads == "exit_status" and finished.exit_status in (0, WRONG_STATUS):
            return float(finished.exit_status != WRONG_STATUS)
        if finished.problem:
            raise JudgeFailed(f"the verifier {shown(self.command):.200} {finished.problem}")
        return _last_line_reward(finished.stdout)


def _last_line_reward(stdout: str) -> Reward:
    last = (stdout.strip().splitlines() or [""])[-1]
    try:
        value: Reward = msgspec.json.decode(last)
        total = value[TOTAL] if isinstance(value, dict) else value
        if not isinstance(total, int | float):
            raise TypeError
    except (msgspec.DecodeError, KeyError, TypeError):
        raise JudgeFailed(
            f"the verifier's last line must be a number or an object with a reward (got {last!r:.200})"
        ) from None
    if not isinstance(value, dict):
        return value
    # The rest is for people who run the command by hand.
    return {name: part for name, part in value.items() if isinstance(part, int | float) and is_part_name(name)}
