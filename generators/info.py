"""What discovery knows of one generator file."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Source = Literal["built-in", "user", "entry-point"]
Status = Literal["ok", "failed", "skipped"]
Contract = Literal["A", "B"]


@dataclass(frozen=True, slots=True)
class GeneratorInfo:
    """One generator file and the verdict on it. Only a file with status ``ok`` can be started.

    ``sha256`` covers the file and the ``*.py`` beside it that are no generators themselves. ``error`` is one line:
    what is wrong, then the remedy; ``problems`` lists everything that is wrong. ``hooks`` maps each hook that the file
    implements to its contract. ``replaces`` and ``replaced_by`` name the other file of the same task type; the user's
    comes first.
    """

    path: Path
    source: Source
    sha256: str
    status: Status
    task_type: str | None = None
    error: str = ""
    traceback: str = ""
    imports_base: bool = False
    contract: Contract | None = None
    hooks: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    replaces: Path | None = None
    replaced_by: Path | None = None

    def as_json(self) -> dict[str, Any]:
        """The same as a JSON object, paths as strings."""
        return {
            "path": str(self.path),
            "task_type": self.task_type,
            "source": self.source,
            "sha256": self.sha256,
            "status": self.status,
            "error": self.error,
            "traceback": self.traceback,
            "imports_base": self.imports_base,
            "contract": self.contract,
            "hooks": dict(self.hooks),
            "problems": list(self.problems),
            "replaces": str(self.replaces) if self.replaces else None,
            "replaced_by": str(self.replaced_by) if self.replaced_by else None,
        }


class InspectionPending(Exception):
    """The files that decide about ``task_type`` are still being inspected; ``paths`` names them. Ask again later."""

    def __init__(self, task_type: str, paths: list[Path]) -> None:
        super().__init__(task_type, paths)
        self.task_type = task_type
        self.paths = paths

    def __str__(self) -> str:
        return f"still inspecting, for task type {self.task_type!r}: {', '.join(map(str, self.paths))}"
