"""What the supervisor hands to a run process, and what comes back, both over inherited descriptors."""

import json
import os
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Which module to load, from the run's own copy, and the payload for ``run_rollout``; it may hold secrets."""

    module_path: str
    original_folder: str
    payload: dict[str, Any]

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


def write_part(descriptor: int, **part: Any) -> None:
    """Add to the report: ``is_returned``, or ``error`` and ``traceback``, or ``exit_code``."""
    # In one write: the monitor and the main both add parts, at a position that they share.
    os.write(descriptor, json.dumps(part).encode() + b"\n")


def read_report(written: bytes) -> Report:
    """Put the parts of a report together."""
    parts: dict[str, Any] = {}
    for line in written.splitlines():
        parts |= json.loads(line)
    return Report(
        is_returned=parts.get("is_returned", False),
        error=parts.get("error", ""),
        traceback=parts.get("traceback", ""),
        exit_code=parts.get("exit_code"),
    )
