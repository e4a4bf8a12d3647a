"""Which of several files answers for a task type."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from forebay.generators.info import GeneratorInfo, Source

_RANK: dict[Source, int] = {"built-in": 0, "entry-point": 1, "user": 2}


def settle(infos: Iterable[GeneratorInfo]) -> list[GeneratorInfo]:
    """The same files, with replacements and collisions told; ordered by source and path.

    A user's file replaces an installed one, which replaces a built-in. Two of the same rank collide: neither can be
    used. A user's file that failed still stands for its task type: falling back in silence would surprise.
    """
    settled: list[GeneratorInfo] = []
    claims: dict[str, list[GeneratorInfo]] = defaultdict(list)
    for info in infos:
        if info.task_type is None or info.status == "skipped":
            settled.append(info)
        else:
            claims[info.task_type].append(info)
    for rivals in claims.values():
        settled += _settle_one(rivals)
    return sorted(settled, key=lambda info: (-_RANK[info.source], str(info.path)))


def _settle_one(rivals: list[GeneratorInfo]) -> list[GeneratorInfo]:
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
    told = f"TASK_TYPE {info.task_type!r} is also that of {', '.join(map(str, others))}; change one, or remove one file"
    problems = [*info.problems, told]
    return replace(info, status="failed", error="; also: ".join(problems), problems=problems)


def _replaced(info: GeneratorInfo, by: Path) -> GeneratorInfo:
    told = f"replaced by {by}, which has the same TASK_TYPE; change that one to have both"
    return replace(info, status="skipped", replaced_by=by, error=told)
