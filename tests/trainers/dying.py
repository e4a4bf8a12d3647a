"""What the scripts that train with TRL share: options, and a death between two steps."""

import json
import os
from typing import Any

from transformers import TrainerCallback

OPTIONS = {"report_to": "none", "logging_steps": 1, "use_cpu": True, "bf16": False, "disable_tqdm": True}


class Dying(TrainerCallback):
    """Ends the process without a word after an optimiser step, before TRL saves its checkpoint."""

    def __init__(self, trainer: Any, step: int | None) -> None:
        self.trainer, self.step = trainer, step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            print(json.dumps([{"seen": self.trainer.seen}]), flush=True)
            os._exit(0)
