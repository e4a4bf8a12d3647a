"""Runs of a server compared with verifiers' own rollouts against the same recorded engines."""

import asyncio
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from forebay.engines.capture.checking import check
from forebay.replay import EngineRecorder, RecordedEngine
from tests.generators.agent_kit import LIMIT_S, Json, Samples, stored
from tests.kit import ServerProcess

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "verifiers.md").read_text(encoding="utf-8")
LOCAL = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
"""Forebay's defaults, which it is not given."""
SUMS: Json = {"taskset": {"id": "my-sums", "num_tasks": 2}, "agent": LOCAL}
PARAMS = {"max_tokens": 256}
GROUP_SIZE = 2


def copied_tasksets(folder: Path) -> Path:
    """A folder with the tasksets of the tests and the one of the documentation."""
    tasksets = Path(shutil.copytree(HERE / "tasksets", folder / "tasksets"))
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tasksets / "my_sums.py").write_text(example)
    return tasksets


def variables_for(tasksets: Path) -> dict[str, str]:
    """What verifiers finds tasksets with, and uv its certificates, of which the tests know nothing."""
    certificates = os.environ.get("PIP_CERT") or os.environ.get("REQUESTS_CA_BUNDLE")
    return {"PYTHONPATH": str(tasksets), **({"SSL_CERT_FILE": certificates} if certificates else {})}


def settings_of(env: Json) -> Json:
    """The fields of a start for an environment, without what are Forebay's defaults."""
    given = {name: value for name, value in env.items() if value is not LOCAL}
    return {"taskset": env["taskset"]["id"], "env": given, "sampling_params": PARAMS, "group_size": GROUP_SIZE}


async def runs_like_verifiers(
    server: ServerProcess, engines: Sequence[str], envs: Sequence[Json], python: str, env: dict[str, str], folder: Path
) -> list[Samples]:
    """Run each environment on an engine; its tokens are the engine's, its rewards those of verifiers alone."""
    files = [str(folder / f"{number}.fbr") for number in range(len(envs))]
    with ExitStack() as stack:
        recorders = [
            stack.enter_context(EngineRecorder(*each).in_thread()) for each in zip(files, engines, strict=True)
        ]
        runs = [
            server.start_run("verifiers", remote_engine_url=recorder.url, **settings_of(each))
            for recorder, each in zip(recorders, envs, strict=True)
        ]
        told = [stored(run) for run in runs]
    for url, run in zip(engines, told, strict=True):
        for sample in samples_of(run):
            assert sample["outcome"] in ("ok", "truncated"), sample["error"]
            found = await check(url, sample)
            assert found.num_tokens + found.num_unknown == sum(sample["loss_mask"]) > 0
            assert found.max_delta < 1e-4
    own = await asyncio.to_thread(own_rollouts, files, envs, python, env)
    for run, own_run in zip(told, own, strict=True):
        ours = [[index, sample["reward"], sample["reward_parts"]] for index, of in run.items() for sample in of]
        assert in_order(ours) == in_order(own_run)
    return told


def own_rollouts(files: Sequence[str], envs: Sequence[Json], python: str, env: dict[str, str]) -> list[Any]:
    """The rewards of verifiers' own rollouts, with the engines that were recorded in the files."""
    with ExitStack() as stack:
        recorded = [stack.enter_context(RecordedEngine(file).in_thread()) for file in files]
        given = [
            {"config": config, "url": each.url, "model": model_of(each.url)}
            for config, each in zip(envs, recorded, strict=True)
        ]
        words = json.dumps({"envs": given, "common": {"num_each": GROUP_SIZE, **PARAMS}})
        command, variables = [python, HERE / "own_rollouts.py", words], {**os.environ, **env}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 0, done.stderr[-4_000:]
        assert [each.misses for each in recorded] == [[]] * len(files)
    rewards: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return rewards


def samples_of(run: Samples) -> list[Json]:
    return [sample for of_instance in run.values() for sample in of_instance]


def model_of(url: str) -> str:
    return str(httpx.get(f"{url}/v1/models", timeout=LIMIT_S).json()["data"][0]["id"])


def in_order(rewards: list[Any]) -> list[str]:
    return sorted(json.dumps(reward, sort_keys=True) for reward in rewards)
