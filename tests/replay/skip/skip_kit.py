"""Configurations, and functions that count how often they run."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay.replay.skip import SkipManager

SIZES = "GBS4_N2_in16_out32"
TRAINER = {
    "trainer": {"experiment_name": "exp", "project_name": "proj"},
    "data": {"gen_batch_size": 4, "max_prompt_length": 16, "max_response_length": 32},
    "actor_rollout_ref": {"rollout": {"n": 2}},
}


def config(dump_dir: Path, role: str = "rollout", /, **fields: Any) -> dict[str, Any]:
    """A trainer's configuration in which ``role`` is switched on."""
    return {**TRAINER, "skip": {role: {"enable": True, "dump_dir": str(dump_dir), "steps": [1, 2, 3], **fields}}}


def folder(dump_dir: Path) -> Path:
    """Where the dumps of ``config`` lie."""
    return dump_dir / "exp_proj" / SIZES


class Rollouts:
    """A rollout function: what it returns tells which of its calls made it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    @SkipManager.annotate(role="rollout")
    def generate(self, prompts: Any) -> dict[str, Any]:
        """Generates."""
        self.calls.append(prompts)
        return {"call": len(self.calls), "prompts": prompts}

    def at(self, step: int, prompts: Any = "p") -> dict[str, Any]:
        """The function called at a step of the trainer."""
        SkipManager.set_step(step)
        return self.generate(prompts)


class Samples:
    """The same for single samples of a stream."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @SkipManager.annotate(role="async_rollout")
    async def generate(self, prompts: Any, sample_id: str | None = None) -> dict[str, Any]:
        """Generates one."""
        self.calls.append(sample_id or prompts["uid"][0])
        return {"of": self.calls[-1]}


class Prompts:
    """As much of a batch of verl as is looked at."""

    def __init__(self, **meta_info: Any) -> None:
        self.meta_info = meta_info


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def run_python(code: str, *arguments: object, **env: str) -> str:
    """What a fresh Python prints that runs ``code``."""
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code, *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
