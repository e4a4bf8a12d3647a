"""Files of a run: for each start, a copy of the generator and the output of its processes; and the run's trace."""

import asyncio
import errno
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Self

from forebay.buffer.buffer import Buffer
from forebay.core.errors import ForebayError, StartRefused, StorageFailed
from forebay.core.run import Run
from forebay.core.tasks import TaskSet
from forebay.generators.discovery.module_loading import import_roots
from forebay.generators.process.code_copy import (
    copied_module,
    copy_code,
    copy_copy,
    has_code,
    packages_folder,
    remove_code,
)
from forebay.generators.process.run_logs import read_agent_log
from forebay.hooks.run_hooks import HookRunner

REMOVE_EVERY_S = 10.0
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})

logger = logging.getLogger(__name__)


class RunFolders:
    """The folders ``runs/<run_id>/start-<n>`` of a data directory, and ``runs/<run_id>/trace``."""

    def __init__(self, data_dir: Path, max_log_bytes: int, max_hook_answer_bytes: int) -> None:
        """The newest ``max_log_bytes`` of what a start's hooks print are kept."""
        self._max_log_bytes = max_log_bytes
        self._max_hook_answer_bytes = max_hook_answer_bytes
        self._runs_dir = data_dir.resolve() / "runs"

    def of(self, run: Run) -> Path:
        """The folder of the run's current start."""
        return self._of_start(run.run_id, run.num_starts)

    def trace(self, run_id: str) -> Path:
        """The folder where all processes of all starts write the run's trace."""
        return self._runs_dir / run_id / "trace"

    def agent_log(self, run: Run, uid: str) -> str | None:
        """The end of the output of sample ``uid``'s agent, from the newest start that has it; None without one."""
        return read_agent_log((self._of_start(run.run_id, number) for number in range(run.num_starts, 0, -1)), uid)

    def _of_start(self, run_id: str, number: int) -> Path:
        return self._runs_dir / run_id / f"start-{number}"

    async def copy_code(self, run_id: str, number: int, module_path: Path) -> None:
        """Copy the generator for start ``number``, replacing any copy that an abandoned start left.

        Raises ``StartRefused``, or ``StorageFailed`` if the disk is full.
        """
        run_dir = self._of_start(run_id, number)
        try:
            await _in_thread(_copy_afresh, module_path, run_dir)
        except OSError as error:
            raise _refusal(module_path, run_dir, error) from error

    async def copy_recorded(self, run_id: str, number: int, source: Run) -> None:
        """Copy the code of another run's last start for start ``number``. Raises as ``copy_code`` does."""
        run_dir, copied = self._of_start(run_id, number), self._newest_code(source)
        try:
            await _in_thread(_copy_copy, copied, run_dir)
        except OSError as error:
            raise _refusal(copied, run_dir, error) from error

    def _newest_code(self, run: Run) -> Path:
        starts = (self._of_start(run.run_id, number) for number in range(run.num_starts, 0, -1))
        return next((start for start in starts if has_code(start)), self.of(run))

    async def restore_code(self, run: Run) -> None:
        """Restore the copy of the current start if it was lost. Raises as ``copy_code`` does."""
        run_dir = self.of(run)
        try:
            await _in_thread(copy_code, Path(run.generator_path), run_dir)
        except OSError as error:
            raise _refusal(Path(run.generator_path), run_dir, error) from error

    def has_code(self, run: Run) -> bool:
        """Whether any start of the run has its copy of the generator."""
        return any(has_code(self._of_start(run.run_id, number)) for number in range(1, run.num_starts + 1))

    async def remove_code(self, run: Run) -> None:
        """Remove the copies of all starts so far; logs are kept. Raises OSError."""
        for number in range(1, run.num_starts + 1):
            await asyncio.to_thread(remove_code, self._of_start(run.run_id, number))

    async def remove(self, run_id: str) -> None:
        """Remove all files of a run."""
        await asyncio.to_thread(shutil.rmtree, self._runs_dir / run_id, ignore_errors=True)

    def make_hooks(self, run: Run) -> HookRunner:
        """The hooks of a run, from its own copy of the generator."""
        run_dir, original = self.of(run), Path(run.generator_path)
        module_path = copied_module(original, run_dir) if run.generator_path else None
        return HookRunner(
            task_type=run.task_type,
            contract=run.settings.contract or run.generator_contract,
            normaliser=run.settings.normaliser,
            reward_range=run.settings.reward_range,
            module_path=module_path,
            python_path=[packages_folder(module_path), *import_roots(original.parent)] if module_path else [],
            user_hooks=run.generator_hooks,
            time_limit_s=run.settings.hook_time_limit_s,
            log_path=run_dir / "hooks.log",
            log_limit_bytes=self._max_log_bytes,
            max_answer_bytes=self._max_hook_answer_bytes,
        )


class CodeCopies:
    """Regularly removes copies of generators that no run needs any more. Enter it with ``async with``.

    As long as a body is stored, a rewind may restore it, and a read then calls the run's hooks. A resumed run gets a
    new copy.
    """

    def __init__(self, buffer: Buffer, folders: RunFolders) -> None:
        self._buffer = buffer
        self._folders = folders
        self._tasks = TaskSet()

    async def __aenter__(self) -> Self:
        self._tasks.start(self._keep_removing())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.cancel()

    async def remove_unneeded(self) -> None:
        """Remove the copies of each inactive run that has no body left. Raises ``StorageFailed``, OSError."""
        while self._buffer.at_rest:
            entry = self._buffer.get(self._buffer.at_rest.pop())
            run = entry.run
            if not entry.buffer.is_exhausted or not await asyncio.to_thread(self._folders.has_code, run):
                continue
            has_bodies = await self._buffer.store.has_bodies(run.run_id)
            # Checked again: it may have been resumed or rewound meanwhile.
            if not has_bodies and entry.buffer.is_exhausted:
                await self._folders.remove_code(run)
                logger.debug("run %s: its copy of the generator is removed", run.run_id)

    async def _keep_removing(self) -> None:
        while True:
            await asyncio.sleep(REMOVE_EVERY_S)
            try:
                await self.remove_unneeded()
            except (ForebayError, OSError) as error:
                logger.warning("code that no run needs any more cannot be removed for now: %s", error)
                self._buffer.at_rest.update(entry.run.run_id for entry in self._buffer.entries)


async def _in_thread(copy: Callable[[Path, Path], object], module_path: Path, run_dir: Path) -> None:
    # Waits for the end even if cancelled: the next caller may need the same folder.
    work = asyncio.create_task(asyncio.to_thread(copy, module_path, run_dir))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


def _copy_afresh(module_path: Path, run_dir: Path) -> None:
    if run_dir.exists():  # a start that was abandoned before the run counted it
        shutil.rmtree(run_dir)
    copy_code(module_path, run_dir)


def _copy_copy(source_dir: Path, run_dir: Path) -> None:
    if run_dir.exists():
        shutil.rmtree(run_dir)
    copy_copy(source_dir, run_dir)


def _refusal(module_path: Path, run_dir: Path, error: OSError) -> ForebayError:
    what = f"the generator {module_path} cannot be copied to {run_dir}"
    if error.errno in _NO_ROOM:
        return StorageFailed(error.strerror or str(error), what=what, hint="make room in the data directory")
    return StartRefused(f"{what}: {error}", hint="make room, or make the file readable, and start again")
