"""Groups for TRL's trainers, and scripts that train on them."""

from collections.abc import Callable
from pathlib import Path

from tests.kit import Json, NativeRun, ServerProcess, make_sample
from tests.trainers.conftest import RunScript

Train = Callable[..., list[Json]]


def trainings(
    script: str, config: Json, run_script: RunScript, server: ServerProcess, model: str, folder: Path
) -> Train:
    """A function for trainings one after the other in one process, each with changes to the script's arguments."""

    def train(native: NativeRun, *changes: Json, **options: object) -> list[Json]:
        common = {"url": server.url, "run_id": native.run_id, "model": model, "folder": "/out", "config": config}
        given = [{**common, **options, **change} for change in changes or ({},)]
        made: list[Json] = run_script(
            script, trainings=[{**each, "folder": f"{folder}{each['folder']}"} for each in given]
        )
        return made

    return train


def group(number: int, shift: float = 0.0) -> list[Json]:
    """Four samples of two turns, whose tokens tell the group and the slot."""
    return [
        make_sample(
            uid=f"{number}/{slot}",
            instance_id=number,
            epoch=0,
            slot=slot,
            rollout_id=f"{number}-{slot}",
            reward=[0.0, 1.0, 1.0, 3.0][slot],
            reward_parts={"half": slot / 2},
            tokens=[10 + number, 50 + slot, 7, 8, 9],
            loss_mask=[0, 1, 0, 1, 1],
            logprobs=[0.0, -1.0 + shift, 0.0, -2.0 + shift, -3.0 + shift],
        )
        for slot in range(4)
    ]


def write(run: NativeRun, *samples: Json) -> None:
    """Write samples that are all taken."""
    verdicts = run.write(*samples)
    assert [verdict["status"] for verdict in verdicts] == [200] * len(samples), verdicts
