"""Train on the groups of a run with Tinker, or with --local on a stand-in for it. README.md has the commands."""

import argparse
import json
from pathlib import Path
from typing import Any

import tinker

from forebay.client import BufferClient
from forebay.client.tinker import datums

LOSS = "importance_sampling"


def train(client: BufferClient, service: Any, asked: argparse.Namespace) -> None:
    """Take an optimiser step for each batch until the run ends, beginning with the last model in ``asked.models``."""
    saved = [json.loads(line) for line in asked.models.read_text().splitlines()] if asked.models.exists() else []
    if saved:
        training = service.create_training_client_from_state_with_optimizer(saved[-1]["path"]).result()
    else:
        training = service.create_lora_training_client(base_model=asked.base_model).result()
    step = saved[-1]["step"] if saved else None
    client.rewind(step)  # what this model has not seen is delivered again
    for batch in client.batches(num_groups=asked.num_groups, step=(step or 0) + 1):
        data, unusable = datums(batch, LOSS)
        if not data:
            continue  # the next checkpoint includes the batch
        forward = training.forward_backward(data, LOSS)
        training.optim_step(tinker.AdamParams(learning_rate=asked.learning_rate)).result()
        client.checkpoint(batch.step)  # before the model is listed: a checkpoint without a model is harmless
        path = training.save_state(f"step-{batch.step}", overwrite=True).result().path
        with asked.models.open("a") as lines:
            lines.write(json.dumps({"step": batch.step, "path": path}) + "\n")
        numbers = {**client.metrics(batch), **forward.result().metrics, "unusable": len(unusable)}
        print(json.dumps({"step": batch.step, **numbers}), flush=True)


def main() -> None:
    """Read the options, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="name of the run")
    parser.add_argument("--url", default="http://127.0.0.1:8889")
    parser.add_argument("--models", type=Path, default=Path("models.jsonl"), help="file that lists the saved models")
    parser.add_argument("--base-model", default="Qwen/Qwen3-8B")
    parser.add_argument("--num-groups", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--local", type=Path, metavar="FOLDER", help="train the stand-in, and save its models here")
    asked = parser.parse_args()
    if asked.local:
        from local_service import LocalService
    service = LocalService(asked.local) if asked.local else tinker.ServiceClient()
    with BufferClient(asked.url, as_tensors=True) as client:
        client.attach(client.runs(asked.run)[-1].run_id)
        train(client, service, asked)


if __name__ == "__main__":
    main()
