"""Factories for hook tests: a group with real bodies, a generator file, an installed plugin, a runner."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from forebay.hooks import HookInput, HookRunner
from forebay.hooks.check import check_hooks

MakeGroup = Callable[..., HookInput]


@pytest.fixture
def make_group() -> MakeGroup:
    """``make_group([0.0, 1.0], instance_id=7, **fields)``: a group whose bodies hold these rewards and fields."""

    def make(rewards: list[float], instance_id: str | int = 7, **fields: Any) -> HookInput:
        bodies = [
            json.dumps(
                {"uid": f"u{row}", "instance_id": instance_id, "messages": [{"role": "user", "content": "é"}]}
                | {"reward": reward, "extra_info": {"row": row}}
                | fields
            ).encode()
            for row, reward in enumerate(rewards)
        ]

        async def read() -> list[bytes]:
            return bodies

        return HookInput(instance_id, rewards, read)

    return make


@pytest.fixture
def make_file(tmp_path: Path) -> Callable[[str], Path]:
    """``make_file(source)``: a generator file for the task type "task" that imports nothing of ours."""

    def make(source: str, name: str = "task_generator.py") -> Path:
        path = tmp_path / name
        path.write_text('TASK_TYPE = "task"\ndef run_rollout(data): ...\n' + dedent(source))
        return path

    return make


@pytest.fixture
def make_runner() -> Callable[..., AbstractAsyncContextManager[HookRunner]]:
    """``make_runner(path)``: a runner for a file, with the hooks that an inspection would find in it."""

    def make(path: Path | None = None, **settings: Any) -> HookRunner:
        hooks: list[str] = []
        if path is not None and "user_hooks" not in settings:
            namespace: dict[str, Any] = {}
            exec(compile(path.read_text(), path, "exec"), namespace)
            hooks = list(check_hooks(namespace).hooks)
        settings = {"user_hooks": hooks, "plugins": False, "time_limit_s": 30} | settings
        return HookRunner(task_type="task", module_path=path, **settings)

    return make


@pytest.fixture
def install_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Path]]:
    """``install_plugin(name, source)``: a distribution with an entry point, on the path of this process."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def install(name: str, source: str) -> Path:
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[forebay]\n{name} = {name}\n")
        (site / f"{name}.py").write_text("from forebay.hooks import hookimpl\n" + dedent(source))
        return site

    return install
