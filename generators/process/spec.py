"""What the supervisor hands to a run process, and what comes back, both over inherited descriptors."""

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Which module to load, from the run's own copy, and the payload for ``run_rollout``; it may hold secrets."""

    module_path: str
    original_folder: str
    payload: dict[str, Any]
    max_engine_reply_bytes: int = 64 << 20
    trace: dict[str, Any] | None = None
    """``TraceSettings`` by name; None records nothing."""
    earlier_traces: list[str] = field(default_factory=list)
    """Folders with the traces of earlier runs of the same input, newest first; not all of them need be there."""
    workers: list[int] = field(default_factory=list)
    """How many workers each node has; without any, the run process runs its rollouts itself."""
    backend: str = "processes"
    worker_silence_s: float = 10.0
    ray_address: str = ""
    ray_namespace: str = ""

    def write(self, file: BinaryIO) -> None:
        """Write the spec for a child that inherits ``file``. Raises TypeError if the payload is not JSON."""
        file.write(json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, descriptor: int) -> "RunSpec":
        """Read what ``write`` wrote, and close the descriptor."""
        with os.fdopen(descriptor, "rb") as file:
            file.seek(0)  # the descriptor shares its position with that of the writer
            return cls(**json.load(file))


@dataclass(frozen=True, slots=True)
class Report:
    """How a run process ended. ``exit_code`` is negative for a signal, as in ``subprocess``."""

    is_returned: bool
    error: str
    traceback: str
    exit_code: int | None
    session: int = field(default=0, compare=False)
    """Of the run process and what it started; 0 if it ended before it had told."""


def read_report(written: bytes) -> Report:
    """Put the parts of a report together: ``session``, ``is_returned``, ``error`` and ``traceback``, ``exit_code``."""
    parts: dict[str, Any] = {}
    for line in written.splitlines():
        parts |= json.loads(line)
    return Report(
        is_returned=parts.get("is_returned", False),
        error=parts.get("error", ""),
        traceback=parts.get("traceback", ""),
        exit_code=parts.get("exit_code"),
        session=parts.get("session", 0),
    )
