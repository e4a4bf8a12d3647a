"""A trainer that can be killed anywhere: its model is a file that says what it was trained on.

Called with the server's URL, the run's id and the model's folder. Each line of its output tells that it got on.
"""

import json
import os
import sys
import time
from pathlib import Path

from forebay.client import Batch, BufferClient

GROUPS_PER_BATCH = 2
BATCHES_PER_STEP = 2
TRAINING_S = 0.1
"""What one batch takes."""


class Model:
    """The groups that it was trained on, as ``[instance_id, epoch]``; visible once ``save`` has renamed its file."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "model.json"
        self.step: int | None = None
        self.trained: list[list[object]] = []
        if self._path.exists():
            saved = json.loads(self._path.read_text())
            self.step, self.trained = saved["step"], saved["trained"]

    def train(self, batch: Batch) -> None:
        time.sleep(TRAINING_S)
        self.trained += [[group.instance_id, group.samples[0]["epoch"]] for group in batch.groups]

    def save(self, step: int) -> None:
        self.step = step
        unseen = self._path.with_suffix(".tmp")
        with unseen.open("w") as file:
            json.dump({"step": step, "trained": self.trained}, file)
            file.flush()
            os.fsync(file.fileno())
        unseen.replace(self._path)


def main(url: str, run_id: str, folder: Path) -> None:
    """Train from the last model to the end of the run."""
    model = Model(folder)
    with BufferClient(url, retry_for_s=60) as client:
        client.attach(run_id)
        client.rewind(model.step)
        held: list[Batch] = []
        for batch in client.batches(num_groups=GROUPS_PER_BATCH):
            model.train(batch)
            held.append(batch)
            tell("trained")
            if len(held) == BATCHES_PER_STEP:
                save(client, model, held)
        save(client, model, held)
    tell("done")


def save(client: BufferClient, model: Model, held: list[Batch]) -> None:
    """Mark first, then let the model be seen."""
    step = 0 if model.step is None else model.step + 1
    client.checkpoint(step, held)
    tell("marked")
    model.save(step)
    held.clear()
    tell("saved")


def tell(what: str) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
