"""What an agent is given, and what it leaves behind."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from forebay.core.ids import InstanceId
from forebay.core.task_row import Message

INSTANCE_FILE = "instance.json"


@dataclass(frozen=True, kw_only=True)
class AgentTask:
    """One instance, and the model to solve it with. ``base_url`` and ``api_key`` are good for this rollout alone."""

    instance_id: InstanceId
    row: dict[str, Any] = field(repr=False)
    """What the instance's line in the input file holds, without the fields that are hidden from agents."""
    prompt: list[Message] = field(repr=False)
    """The row's prompt as messages."""
    model: str
    base_url: str
    """Chat Completions and Responses, as the ``openai`` package takes it: ends in ``/v1``."""
    anthropic_url: str
    """Messages, as the ``anthropic`` package takes it."""
    api_key: str = field(repr=False)
    folder: Path
    """A working folder of this rollout's own, removed once the reward is known."""
    timeout_s: float
    """After so many seconds the agent is stopped."""
    traceparent: str = ""
    """The W3C trace context of the rollout, for spans of the agent's own; empty where nothing is traced.

    A command finds its own one as ``TRACEPARENT``.
    """

    @property
    def question(self) -> str:
        """The content of the prompt's last message."""
        return str(self.prompt[-1].get("content") or "")

    def environment(self) -> dict[str, str]:
        """What a command finds in its environment. ``FOREBAY_INSTANCE`` is the path of a JSON file in its folder."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "FOREBAY_MODEL": self.model,
            "FOREBAY_INSTANCE": str(self.folder / INSTANCE_FILE),
        }

    def write_instance(self) -> None:
        """Put the instance where ``FOREBAY_INSTANCE`` says: the row, with its prompt as messages."""
        instance = {**self.row, "instance_id": self.instance_id, "prompt": self.prompt}
        (self.folder / INSTANCE_FILE).write_bytes(msgspec.json.encode(instance))


@dataclass(frozen=True, kw_only=True)
class AgentResult:
    """What an agent left behind. Reward functions and verifiers find it as ``item["agent"]``."""

    output: Any
    """What a callable returned, as JSON values; what a command wrote to its standard output."""
    wall_s: float
    folder: Path
    """Where it worked. It is there until the reward is known."""

    def for_reward(self) -> dict[str, Any]:
        """As JSON values."""
        return {"output": self.output, "wall_s": self.wall_s, "folder": str(self.folder)}
