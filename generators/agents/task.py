"""Input and result of an agent."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from forebay.core.ids import InstanceId
from forebay.core.task_row import Message

INSTANCE_FILE = "instance.json"


@dataclass(frozen=True, kw_only=True)
class AgentTask:
    """One instance and the model to solve it with. ``base_url`` and ``api_key`` are valid for this rollout only."""

    instance_id: InstanceId
    row: dict[str, Any] = field(repr=False)
    """Fields of the instance's row in the input file, except those hidden from agents."""
    prompt: list[Message] = field(repr=False)
    """The row's prompt as messages."""
    model: str
    base_url: str
    """Base URL of Chat Completions and Responses for the ``openai`` package; ends in ``/v1``."""
    anthropic_url: str
    """Base URL of Messages for the ``anthropic`` package."""
    api_key: str = field(repr=False)
    folder: Path
    """Working folder of this rollout, removed once the reward is known."""
    timeout_s: float
    """Seconds after which the agent is stopped."""
    traceparent: str = ""
    """W3C trace context of the rollout, for the agent's own spans; empty if the run is not traced.

    Commands get theirs in the environment variable ``TRACEPARENT``.
    """

    @property
    def question(self) -> str:
        """The content of the prompt's last message."""
        return str(self.prompt[-1].get("content") or "")

    def environment(self) -> dict[str, str]:
        """Return environment variables for a command. ``FOREBAY_INSTANCE`` is the path of a JSON file in its folder."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "FOREBAY_MODEL": self.model,
            "FOREBAY_INSTANCE": str(self.folder / INSTANCE_FILE),
        }

    def write_instance(self) -> None:
        """Write the row, with its prompt as messages, to the file that ``FOREBAY_INSTANCE`` names."""
        instance = {**self.row, "instance_id": self.instance_id, "prompt": self.prompt}
        (self.folder / INSTANCE_FILE).write_bytes(msgspec.json.encode(instance))


@dataclass(frozen=True, kw_only=True)
class AgentResult:
    """Result of an agent. Reward functions and verifiers find it as ``item["agent"]``."""

    output: Any
    """Return value of a callable as JSON values, or standard output of a command."""
    wall_s: float
    folder: Path
    """Working folder of the agent, removed once the reward is known."""

    def for_reward(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {"output": self.output, "wall_s": self.wall_s, "folder": str(self.folder)}
