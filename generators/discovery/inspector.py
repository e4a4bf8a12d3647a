"""Inspecting one generator file in a throw-away child process."""

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from forebay.core.child_process import (
    child_environment,
    end_session,
    last_line,
    memory_file,
    python_argv,
    read_back,
    signal_group,
)
from forebay.generators.discovery.info import GeneratorInfo

_OUTPUT_TAIL_BYTES = 64 * 1024


async def inspect_file(draft: GeneratorInfo, *, working_dir: Path, timeout_s: float) -> GeneratorInfo:
    """Complete ``draft`` (path, source and what its source text tells) with what importing the file shows.

    The child is killed with its whole process group when ``timeout_s`` have passed or the caller is cancelled.
    """
    # The answer has a descriptor of its own: the user's code may print whatever it likes.
    with memory_file("forebay-answer") as answer, memory_file("forebay-output") as output:
        try:
            exit_code = await _run_child(draft.path, answer, output, working_dir, timeout_s)
        except TimeoutError:
            limit = f"{timeout_s:g} s"
            return _failed(draft, f"importing it took longer than {limit}; move slow work into run_rollout")
        except OSError as error:
            return _failed(draft, f"it could not be inspected: {error}; free resources on this machine and try again")
        written = read_back(answer)
        if not written:
            return _died(draft, exit_code, read_back(output)[-_OUTPUT_TAIL_BYTES:].decode(errors="replace"))
    return _complete(draft, json.loads(written))


async def _run_child(path: Path, answer: BinaryIO, output: BinaryIO, working_dir: Path, timeout_s: float) -> int:
    process = await asyncio.create_subprocess_exec(
        *python_argv("forebay.generators.discovery.inspect_child", str(path), str(answer.fileno()), str(os.getpid())),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[answer.fileno()],
        cwd=working_dir,
        # Without bytecode: an inspection leaves nothing beside the user's files.
        env=child_environment(os.environ) | {"PYTHONDONTWRITEBYTECODE": "1"},
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(timeout_s):
            return await process.wait()
    finally:
        # Also when we are cancelled, or it stays a zombie.
        await asyncio.shield(_end(process))


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the inspection, and what the file started."""
    signal_group(process.pid, signal.SIGKILL)
    await process.wait()
    await asyncio.to_thread(end_session, process.pid)


def _complete(draft: GeneratorInfo, answer: dict[str, Any]) -> GeneratorInfo:
    problems: list[str] = answer["problems"]
    imports_base = draft.imports_base or answer.get("imports_base", False)
    return replace(
        draft,
        status="failed" if problems else "ok",
        task_type=answer.get("task_type") or draft.task_type,
        error="; also: ".join(problems),
        traceback=answer.get("traceback", ""),
        # One that goes over its rows by itself is treated as what it is: foreign.
        imports_base=imports_base and not answer.get("has_own_loop", False),
        contract=answer.get("contract"),
        hooks=answer.get("hooks", {}),
        problems=problems,
    )


def _died(draft: GeneratorInfo, exit_code: int, output: str) -> GeneratorInfo:
    how = signal.strsignal(-exit_code) if exit_code < 0 else f"exit code {exit_code}"
    said = f" after saying {line!r}" if (line := last_line(output)) else ""
    problem = f"importing it ended the process ({how}){said}; move what ends it into run_rollout"
    return replace(_failed(draft, problem), traceback=output)


def _failed(draft: GeneratorInfo, problem: str) -> GeneratorInfo:
    return replace(draft, status="failed", error=problem, problems=[problem])
