"""Run examples/trl, and write a line for each batch that its client reads: the attempt, the step, and the groups."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import forebay.client
from forebay.client import Batch, BufferClient


class WatchedClient(BufferClient):
    """Notes what it reads."""

    def read(self, *args: Any, **kwargs: Any) -> Batch | None:
        batch = super().read(*args, **kwargs)
        if batch is not None:
            with Path(notes).open("a") as lines:
                lines.write(json.dumps([int(attempt), batch.step, list(batch.group_ids)]) + "\n")
        return batch


example, notes, attempt = sys.argv[1:4]
sys.argv = [example, *sys.argv[4:]]
forebay.client.BufferClient = WatchedClient
runpy.run_path(example, run_name="__main__")
