"""Catalog of generators, scanned again at each use, and inspected in child processes instead of imported here."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from forebay.core.clock import Clock, SystemClock
from forebay.core.errors import GeneratorBroken, UnknownTaskType
from forebay.core.tasks import TaskSet
from forebay.generators.discovery.files import FileFinder, FoundFile
from forebay.generators.discovery.info import GeneratorInfo, InspectionPending, rank
from forebay.generators.discovery.inspector import inspect_file

RECHECK_FAILED_S = 30.0
"""A failed file is inspected again after this time, because missing modules may have been installed since."""


class Catalog:
    """Generators in ``given`` (folders, or files of any name), in ``./generators``, and installed and built-in ones.

    Built-in generators are not inspected: they are known to work and to have no hooks. Relative paths start at
    ``working_dir``, in which inspected files also run. At most ``max_parallel`` files are inspected at once, each for
    up to ``inspect_timeout_s``. Leaving the context cancels running inspections.
    """

    def __init__(
        self,
        given: Sequence[Path],
        *,
        working_dir: Path,
        inspect_timeout_s: float = 120.0,
        max_parallel: int = 2,
        clock: Clock | None = None,
    ) -> None:
        self._finder = FileFinder(given, working_dir)
        self._working_dir = working_dir
        self._inspect_timeout_s = inspect_timeout_s
        self._places = asyncio.Semaphore(max_parallel)
        self._clock: Clock = clock or SystemClock()
        # The finder runs in a thread and is not thread-safe.
        self._looking = asyncio.Lock()
        self._found: dict[Path, FoundFile] = {}
        self._verdicts: dict[Path, tuple[GeneratorInfo, float]] = {}
        self._inspections: dict[Path, tuple[str, asyncio.Task[None]]] = {}
        self._tasks = TaskSet()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.cancel()

    async def scan(self) -> list[GeneratorInfo]:
        """Scan for new, edited and removed files, wait for all verdicts, and return them."""
        await self._look()
        while tasks := [task for _, task in self._inspections.values()]:
            await asyncio.wait(tasks)
        return self.cached()

    async def resolve(self, task_type: str, *, wait_s: float | None) -> GeneratorInfo:
        """Return the current generator of ``task_type``. With ``wait_s`` None, waits as long as inspections may take.

        Raises UnknownTaskType, GeneratorBroken, or InspectionPending if there is no verdict within ``wait_s``.
        """
        await self._look()
        try:
            async with asyncio.timeout(wait_s):
                while paths := self._undecided(task_type):
                    await self._wait_for(paths)
                if self._is_unknown(task_type):  # the error lists all known task types
                    await self._wait_for(list(self._inspections))
        except TimeoutError:
            # Do not wait any longer if only the list in the error is incomplete.
            if paths := self._undecided(task_type):
                raise InspectionPending(task_type, paths) from None
        return self._decide(task_type)

    async def _wait_for(self, paths: Sequence[Path]) -> None:
        if tasks := [self._inspections[path][1] for path in paths]:
            await asyncio.wait(tasks)

    def _is_unknown(self, task_type: str) -> bool:
        return all(info.task_type != task_type for info in self.cached())

    def cached(self) -> list[GeneratorInfo]:
        """Return all current verdicts without scanning. Files being inspected are left out."""
        return rank(
            self._verdicts[path][0] if path in self._verdicts else _known_from_source(file)
            for path, file in self._found.items()
            if path in self._verdicts or not _is_inspected(file)
        )

    async def _look(self) -> None:
        async with self._looking:
            self._found = await asyncio.to_thread(self._finder.find)
            for path in list(self._inspections):
                # Edited during its inspection: the verdict would be about the old text.
                if path not in self._found or self._found[path].digest != self._inspections[path][0]:
                    self._inspections.pop(path)[1].cancel()
            for path in list(self._verdicts):
                if path not in self._found or self._is_outdated(self._found[path]):
                    del self._verdicts[path]
            for path, file in self._found.items():
                if not _is_inspected(file) or path in self._verdicts or path in self._inspections:
                    continue
                if file.source == "built-in":
                    info = replace(_known_from_source(file), status="ok", contract="A")
                    self._verdicts[path] = (info, self._clock.monotonic())
                else:
                    self._inspections[path] = (file.digest, self._tasks.start(self._inspect(file)))

    def _is_outdated(self, file: FoundFile) -> bool:
        info, at_s = self._verdicts[file.path]
        is_stale_failure = info.status == "failed" and self._clock.monotonic() - at_s >= RECHECK_FAILED_S
        return not _is_inspected(file) or info.sha256 != file.digest or is_stale_failure

    async def _inspect(self, file: FoundFile) -> None:
        draft = _known_from_source(file)
        try:
            # Limited, because each is a Python process with all imports of the file, often including torch.
            async with self._places:
                info = await inspect_file(draft, working_dir=self._working_dir, timeout_s=self._inspect_timeout_s)
            self._verdicts[file.path] = (info, self._clock.monotonic())
        finally:
            # An edit may have replaced this inspection with another one.
            if self._inspections.get(file.path, ("", None))[1] is asyncio.current_task():
                del self._inspections[file.path]

    def _undecided(self, task_type: str) -> list[Path]:
        """Return the files under inspection that may define ``task_type``."""
        facts = ((path, self._found[path].facts) for path in self._inspections)
        return [
            path
            for path, known in facts
            if known.task_type == task_type or (known.task_type is None and known.may_define_task_type)
        ]

    def _decide(self, task_type: str) -> GeneratorInfo:
        infos = [info for info in self.cached() if info.replaced_by is None]
        for info in infos:
            if info.task_type == task_type and info.status == "ok":
                return info
        broken = [info for info in infos if info.task_type == task_type and info.status == "failed"]
        if broken:
            problems = "; ".join(f"{info.path}: {info.error}" for info in broken)
            raise GeneratorBroken(
                f"the generator for task type {task_type!r} cannot be used: {problems}",
                hint=f"forebay generators check {broken[0].path} shows the whole error",
                field="task_type",
            )
        known = {info.task_type for info in infos if info.task_type and info.status == "ok"}
        unusable = [f"{info.path}: {info.error}" for info in infos if info.status != "ok"]
        raise UnknownTaskType(task_type, sorted(known), unusable)


async def inspect_alone(path: Path, *, working_dir: Path, inspect_timeout_s: float) -> GeneratorInfo:
    """Return the verdict on one file, regardless of other files with its task type."""
    found = await asyncio.to_thread(FileFinder([path], working_dir).find)
    file = found[(working_dir / path).resolve()]
    draft = replace(_known_from_source(file), status="failed", source="user")
    return draft if file.error else await inspect_file(draft, working_dir=working_dir, timeout_s=inspect_timeout_s)


def _is_inspected(file: FoundFile) -> bool:
    return file.fits and not file.error


def _known_from_source(file: FoundFile) -> GeneratorInfo:
    """Return what is known about a file without inspecting it."""
    skipped = f"skipped: name; rename it so that it ends in _generator.py, or pass --generators {file.path}"
    error = file.error or ("" if file.fits else skipped)
    return GeneratorInfo(
        path=file.path,
        source=file.source,
        sha256=file.digest,
        status="failed" if file.error or file.fits else "skipped",
        task_type=file.facts.task_type,
        error=error,
        imports_base=file.facts.names_base,
        needs_input=file.source != "built-in" or file.facts.names_input,
        files=file.digests,
        problems=[error] if error else [],
    )
