"""A trainer of a mix: trains on each batch, and writes a line for each model that becomes visible.

python -m tests.client.mixed_trainer URL MODELS NUM_GROUPS MAX_STEPS RUNS
"""

import json
import sys
from pathlib import Path

from forebay.client import MixedClient


def main(url: str, models: str, num_groups: str, max_steps: str, runs: str) -> None:
    visible = Path(models)
    first = len(visible.read_text().splitlines()) + 1 if visible.exists() else 1
    with MixedClient(url, json.loads(runs)) as client:
        client.rewind(first - 1 or None)
        batches = client.batches(int(num_groups), step=first)
        for step in range(first, int(max_steps) + 1):
            batch = next(batches)
            client.checkpoint(step)
            with visible.open("a") as lines:
                lines.write(json.dumps([group.instance_id for group in batch.groups]) + "\n")


main(*sys.argv[1:])
