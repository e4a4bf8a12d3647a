"""Inspection of one generator file in a temporary child process."""

import asyncio
import json
import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from forebay.core.child_process import last_line
from forebay.core.processes.child_link import ChildEnded, ChildLink
from forebay.generators.discovery.info import GeneratorInfo

_OUTPUT_TAIL_BYTES = 64 * 1024


async def inspect_file(draft: GeneratorInfo, *, working_dir: Path, timeout_s: float) -> GeneratorInfo:
    """Import the file in a child process and complete ``draft``, which has its path, source and source facts.

    The child and its whole session are killed after ``timeout_s`` seconds, or when the caller is cancelled.
    """
    with tempfile.TemporaryFile() as output:
        try:
            answer = await _ask_child(draft.path, output.fileno(), working_dir, timeout_s)
            return _complete(draft, json.loads(answer))
        except TimeoutError:
            limit = f"{timeout_s:g} s"
            return _failed(draft, f"importing it took longer than {limit}; move slow work into run_rollout")
        except OSError as error:
            return _failed(draft, f"it could not be inspected: {error}; free resources on this machine and try again")
        except ChildEnded as ended:
            output.seek(max(0, output.seek(0, os.SEEK_END) - _OUTPUT_TAIL_BYTES))
            return _died(draft, ended.code, output.read().decode(errors="replace"))


async def _ask_child(path: Path, output: int, working_dir: Path, timeout_s: float) -> str:
    child = await ChildLink[str].start(
        "forebay.generators.discovery.inspect_child",
        setup=os.fsencode(path),
        reads=str,
        cwd=working_dir,
        # Without bytecode, so that an inspection leaves no files behind.
        env={"PYTHONDONTWRITEBYTECODE": "1"},
        stdout=output,
        stderr=output,
    )
    try:
        async with asyncio.timeout(timeout_s):
            return await child.receive()
    finally:
        # Shielded, so that the child is reaped even if we are cancelled.
        await asyncio.shield(child.kill())


def _complete(draft: GeneratorInfo, answer: dict[str, Any]) -> GeneratorInfo:
    problems: list[str] = answer["problems"]
    imports_base = draft.imports_base or answer.get("imports_base", False)
    return replace(
        draft,
        status="failed" if problems else "ok",
        task_type=answer.get("task_type") or draft.task_type,
        error="; also: ".join(problems),
        traceback=answer.get("traceback", ""),
        # A generator with its own loop over the rows is treated as unregistered.
        imports_base=imports_base and not answer.get("has_own_loop", False),
        contract=answer.get("contract"),
        hooks=answer.get("hooks", {}),
        problems=problems,
    )


def _died(draft: GeneratorInfo, exit_code: int, output: str) -> GeneratorInfo:
    how = signal.strsignal(-exit_code) if exit_code < 0 else f"exit code {exit_code}"
    said = f" after printing {line!r}" if (line := last_line(output)) else ""
    problem = f"importing it ended the process ({how}){said}; move what ends it into run_rollout"
    return replace(_failed(draft, problem), traceback=output)


def _failed(draft: GeneratorInfo, problem: str) -> GeneratorInfo:
    return replace(draft, status="failed", error=problem, problems=[problem])
