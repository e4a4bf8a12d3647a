"""Opens a Parquet file with `datasets` and DuckDB, and fine-tunes on it, twice: on its messages and on its tokens."""

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import duckdb
from trl import SFTConfig, SFTTrainer

NUM_STEPS = 3


def main(file: str, model: str, folder: str) -> None:
    rows = datasets.load_dataset("parquet", data_files=file, split="train", cache_dir=f"{folder}/cache")
    groups = duckdb.execute("SELECT count(DISTINCT group_id), avg(reward) FROM read_parquet(?)", [file]).fetchone()
    exact = rows.select_columns(["tokens", "loss_mask"])
    exact = exact.rename_columns({"tokens": "input_ids", "loss_mask": "completion_mask"})
    losses = [train(each, model, folder) for each in (rows.select_columns(["messages"]), exact)]
    assert {part["name"] for row in rows for part in row["reward_parts"] or []} == {"exact"}
    print(json.dumps({"num_rows": len(rows), "duckdb": groups, "losses": losses}))


def train(rows: Any, model: str, folder: str) -> list[float]:
    config = SFTConfig(
        output_dir=str(Path(folder) / "sft"),
        max_steps=NUM_STEPS,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = SFTTrainer(model=model, args=config, train_dataset=rows)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
