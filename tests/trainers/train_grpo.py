"""Train with TRL's real GRPOTrainer, as often as asked, and print what its loss was given."""

import json
import sys
from typing import Any

import trl
from dying import OPTIONS, Dying

from forebay.client import BufferClient
from forebay.client.trl import GRPOTrainer, Rollouts, grpo
from forebay.core.errors import ForebayError


class Watched(GRPOTrainer):
    """Keeps the rows that the loss is computed for, without their padding."""

    seen: list[Any]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        is_token = inputs["completion_mask"].bool()
        for n, kept in enumerate(is_token):
            row = {
                "step": self.state.global_step + 1,
                "ids": [*inputs["prompt_ids"][n][inputs["prompt_mask"][n].bool()], *inputs["completion_ids"][n][kept]],
                "mask": (inputs["completion_mask"] * inputs["tool_mask"])[n][kept].tolist(),
                "logprobs": inputs["old_per_token_logps"][n][kept].tolist(),
                "advantage": float(inputs["advantages"][n]),
            }
            self.seen.append({**row, "ids": [int(each) for each in row["ids"]]})
        return loss


def train(
    url: str, run_id: str, model: str, folder: str, config: dict[str, Any], *,
    resumes: bool = False, dies_after: int | None = None, plain: bool = False, without: str = "",
    trl_version: str = "", weights: str = "",
) -> dict[str, Any]:  # fmt: skip
    """One training: the rows of its loss, TRL's log, and the error that ended it."""
    grpo.version = (lambda _: trl_version) if trl_version else installed
    try:
        with BufferClient(url, as_tensors=not resumes) as client:
            client.attach(run_id)
            rollouts = Rollouts(client, weights or None)
            kind = trl.GRPOTrainer if plain else Watched
            arguments = {name: value for name, value in rollouts.arguments.items() if name != without}
            args = trl.GRPOConfig(folder, **OPTIONS, **config)
            trainer = kind(model, args=args, eval_dataset=arguments["train_dataset"], **arguments)
            trainer.seen = []
            trainer.add_callback(Dying(trainer, dies_after))
            trainer.train(resume_from_checkpoint=resumes)
    except ForebayError as error:
        return {"kind": type(error).__name__, "field": error.field, "hint": error.hint}
    return {"seen": trainer.seen, "log": trainer.state.log_history}


installed = grpo.version
given = json.loads(sys.argv[1])
print(json.dumps([train(**each) for each in given["trainings"]]))
