"""Start bodies and rows for end-to-end runs."""

import json
from pathlib import Path
from typing import Any

Json = dict[str, Any]

GROUP_SIZE = 8


def make_payload(folder: Path, engine_url: str, rows: list[Json], **changes: Any) -> Json:
    """Write ``rows`` to a file in ``folder``; the body of the start that runs them, as slime's client sends it."""
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    payload = {
        "task_type": "parity",
        "input_file": str(path),
        "remote_engine_url": engine_url,
        "num_process": "16",
        "num_epoch": "1",
        "num_repeat_per_sample": str(GROUP_SIZE),
        "max_tokens": "16",
        "sampling_params": {"max_tokens": 16, "temperature": 1.0, "top_p": 1.0},
        "tokenizer_path": "",
    }
    return payload | changes


def numbered_rows(count: int) -> list[Json]:
    """Rows whose prompt is their id."""
    return [{"instance_id": f"row-{n}", "prompt": f"row-{n}"} for n in range(count)]
