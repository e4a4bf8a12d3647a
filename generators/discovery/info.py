"""Discovery's verdict on a generator file, and the choice between files of the same task type."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

Source = Literal["built-in", "user", "entry-point"]
Status = Literal["ok", "failed", "skipped"]
Contract = Literal["A", "B"]


@dataclass(frozen=True, slots=True)
class GeneratorInfo:
    """A generator file and the verdict on it. Only files with status ``ok`` can be started.

    ``sha256`` covers the file and the ``*.py`` files next to it, except other generators. ``error`` is one line with
    the problem and its remedy; ``problems`` lists all problems. ``imports_base`` says whether ``BaseGenerator`` runs
    its rollouts. ``hooks`` maps each implemented hook to its contract. ``replaces`` and ``replaced_by`` name another
    file of the same task type; a user's file wins.
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
    needs_input: bool = True
    """Whether its rows are those of an input file. Some built-in generators make their own."""
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 by name of all files that ``sha256`` covers."""

    def as_json(self) -> dict[str, Any]:
        """Convert to a JSON object with paths as strings."""
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
    """Raised while the files ``paths``, which may define ``task_type``, are being inspected. Retry later."""

    def __init__(self, task_type: str, paths: list[Path]) -> None:
        super().__init__(task_type, paths)
        self.task_type = task_type
        self.paths = paths

    def __str__(self) -> str:
        return f"still inspecting, for task type {self.task_type!r}: {', '.join(map(str, self.paths))}"


_RANK: dict[Source, int] = {"built-in": 0, "entry-point": 1, "user": 2}


def rank(infos: Iterable[GeneratorInfo]) -> list[GeneratorInfo]:
    """Return the files with replacements and collisions marked, ordered by source and path.

    A user's file replaces an installed one, which replaces a built-in one. Files of the same rank collide, and none of
    them can be used.
    """
    ranked: list[GeneratorInfo] = []
    claims: dict[str, list[GeneratorInfo]] = defaultdict(list)
    for info in infos:
        if info.task_type is None or info.status == "skipped":
            ranked.append(info)
        else:
            claims[info.task_type].append(info)
    for rivals in claims.values():
        ranked += _rank_rivals(rivals)
    return sorted(ranked, key=lambda info: (-_RANK[info.source], str(info.path)))


def _rank_rivals(rivals: list[GeneratorInfo]) -> list[GeneratorInfo]:
    # Failed files count as well: a silent fallback to a built-in generator would be surprising.
    best = max(_RANK[info.source] for info in rivals)
    first = [info for info in rivals if _RANK[info.source] == best]
    rest = [info for info in rivals if _RANK[info.source] < best]
    if rest:
        next_best = max(rest, key=lambda info: _RANK[info.source])
        first = [replace(info, replaces=next_best.path) for info in first]
    if len(first) > 1:
        first = [_colliding(info, [other.path for other in first if other is not info]) for info in first]
    return [*first, *(_replaced(info, first[0].path) for info in rest)]


def _colliding(info: GeneratorInfo, others: list[Path]) -> GeneratorInfo:
    problem = (
        f"TASK_TYPE {info.task_type!r} is also that of {', '.join(map(str, others))}; change one or remove one file"
    )
    problems = [*info.problems, problem]
    return replace(info, status="failed", error="; also: ".join(problems), problems=problems)


def _replaced(info: GeneratorInfo, by: Path) -> GeneratorInfo:
    reason = f"replaced by {by}, which has the same TASK_TYPE; change one of them to use both"
    return replace(info, status="skipped", replaced_by=by, error=reason)
