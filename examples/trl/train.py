"""A tiny model learns to add, with TRL's GRPOTrainer. README.md has the commands.

Kill it and start it again with the same --dir: it resumes where it was.
"""

import argparse
import hashlib
import json
from pathlib import Path

from trl import GRPOConfig

from forebay.client import BufferClient
from forebay.client.trl import GRPOTrainer, Rollouts, last_checkpoint

NUM_GROUPS, GROUP_SIZE = 32, 8
STEPS_PER_BATCH = 2
"""Optimiser steps for each batch, on half of it each."""
QUESTION = "What is {} + {}?\nPut the final answer in \\boxed{{}}."


def attach(client: BufferClient, folder: Path, engine_url: str) -> None:
    """Attach to the run of this folder, or start it."""
    name = f"trl-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    if runs := client.runs(name):
        client.attach(runs[-1].run_id)
        return
    sums = [(left, right) for left in range(10) for right in range(10)]
    rows = [{"instance_id": f"{a}+{b}", "prompt": QUESTION.format(a, b), "label": str(a + b)} for a, b in sums]
    path = folder / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    client.start(
        "math",
        group_size=GROUP_SIZE,
        input_file=path,
        name=name,
        remote_engine_url=engine_url,
        num_epoch=10_000,
        num_process=64,
        sampling_params={"max_tokens": 12, "temperature": 1.0, "logprobs": True, "return_token_ids": True},
        max_staleness=2 * STEPS_PER_BATCH,
        max_buffer_size=NUM_GROUPS * GROUP_SIZE,  # groups generated further ahead have older weights
        keep_checkpoints=3,  # one more than there are batches between two saves: a killed training resumes at a save
    )


def main() -> None:
    """Train up to ``--steps``, from the last checkpoint if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8889", help="the server")
    parser.add_argument("--engine-url", default="http://127.0.0.1:30000", help="an engine that can read --dir")
    parser.add_argument("--model", required=True, help="folder of the engine's model")
    parser.add_argument("--dir", type=Path, required=True, help="folder for checkpoints and the policy's weights")
    parser.add_argument("--steps", type=int, default=60)
    asked = parser.parse_args()
    folder = asked.dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    config = GRPOConfig(
        str(folder / "checkpoints"),
        max_steps=asked.steps,
        num_generations=GROUP_SIZE,
        per_device_train_batch_size=NUM_GROUPS * GROUP_SIZE // STEPS_PER_BATCH,
        steps_per_generation=STEPS_PER_BATCH,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        save_steps=STEPS_PER_BATCH,
        save_total_limit=2,
        logging_steps=1,
        report_to="none",
        bf16=False,
        use_cpu=True,
    )
    with BufferClient(asked.url, as_tensors=True) as client:
        attach(client, folder, asked.engine_url)
        rollouts = Rollouts(client, weights=folder / "policy")
        trainer = GRPOTrainer(asked.model, args=config, **rollouts.arguments)
        trainer.train(resume_from_checkpoint=last_checkpoint(config.output_dir))


if __name__ == "__main__":
    main()
